"""Random models of real dimensions, made on the device, with adapters that act."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from bench._models import NoText
from mafrt.config.agent import LoraSpec
from mafrt.models.memory_estimate import MODEL_SHAPES, ModelShape
from mafrt.models.shared_base import SharedBase

SMALL = ModelShape(hidden=128, layers=2, inner=256, heads=4, kv_heads=2, head_dim=32, vocabulary=1024, tied=True)
"""For a CPU and for parity."""
NAMES = {
    "small": SMALL,
    "qwen3-0.6b": MODEL_SHAPES["Qwen/Qwen3-0.6B"],
    "qwen3-4b": MODEL_SHAPES["Qwen/Qwen3-4B"],
    "qwen3.5-0.8b": MODEL_SHAPES["Qwen/Qwen3.5-0.8B"],
}


def random_base(
    shape: ModelShape, adapters: int, *, device: str, dtype: torch.dtype, rank: int = 8, window: int = 16384
) -> SharedBase:
    """A model with random weights of these dimensions and `adapters` adapters `agent0`, `agent1`, ..."""
    model = random_model(shape, device=device, dtype=dtype, window=window)
    tokenizer: Any = NoText()
    base = SharedBase(model.eval().requires_grad_(False), tokenizer, "random model")
    for k in range(adapters):
        add_adapter(base, k, rank)
    return base


def random_model(shape: ModelShape, *, device: str, dtype: torch.dtype, window: int = 16384) -> Any:
    """A Qwen3 of these dimensions, or a Qwen3.5 where blocks have a gated delta rule."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    kind: dict[str, Any] = {"model_type": "qwen3"}
    if shape.recurrent:
        kind = {
            "model_type": "qwen3_5_text",
            "linear_num_key_heads": shape.state_keys // shape.state_rows,
            "linear_num_value_heads": shape.state_heads,
            "linear_key_head_dim": shape.state_rows,
            "linear_value_head_dim": shape.state_values // shape.state_heads,
            "full_attention_interval": period(shape),
        }
    config = AutoConfig.for_model(
        **kind,
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.inner,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=window,
        initializer_range=shape.hidden**-0.5,
        tie_word_embeddings=shape.tied,
        pad_token_id=0,
        eos_token_id=None,
    )
    config._attn_implementation = "sdpa"
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            return AutoModelForCausalLM.from_config(config)
    finally:
        torch.set_default_dtype(before)


def period(shape: ModelShape) -> int:
    """Blocks from one with attention to the next."""
    return shape.layers // (shape.layers - shape.recurrent)


def of_periods(shape: ModelShape, periods: int) -> ModelShape:
    """The same model with so many blocks with attention, and those between them."""
    blocks = periods * period(shape)
    return replace(shape, layers=blocks, recurrent=blocks - periods if shape.recurrent else 0)


def add_adapter(base: SharedBase, number: int, rank: int = 8) -> None:
    """Add `agent<number>` with a B that is not 0, as that of a trained adapter."""
    name = f"agent{number}"
    base.add_adapter(name, LoraSpec(rank=rank, alpha=2.0 * rank), seed=number)
    generator = torch.Generator().manual_seed(number)
    with torch.no_grad():
        for _, b in base.adapter_layers(name).values():
            b.copy_(0.02 * torch.randn(b.shape, generator=generator))
    base.bump(name)
