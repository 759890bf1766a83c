"""The rivals of a benchmark: one model as a shared base, as a PEFT model and as it is, all on the same weights."""

from __future__ import annotations

import argparse
import copy
from collections.abc import Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch

from mafrt.config.agent import ALL_LINEAR, LoraSpec
from mafrt.models.pretrained import load_pretrained
from mafrt.models.shared_base import SharedBase


class NoText:
    """Stands in for a tokenizer: a random model has nothing to say."""

    def decode(self, ids: Sequence[int], **_: Any) -> str:
        return ""

    def convert_ids_to_tokens(self, ids: Sequence[int]) -> list[str]:
        return ["?"] * len(ids)


class Rivals(NamedTuple):
    """One model, three times. The frozen weights are the same tensors, so that all read the same memory."""

    base: SharedBase
    peft: Any
    plain: Any
    """the transformers model without adapters"""


def build_rivals(args: argparse.Namespace, count: int, *, window: int, spread: float) -> Rivals:
    """The model with `count` adapters `agent0`, `agent1`, ... as a shared base and in PEFT, and without adapters.

    Args:
        args: `vocab`, `width`, `mlp`, `layers`, `rank` and `device` determine the model, or `model`, where it is given;
            the shape in `args` is then that of the model.
        count: adapters, on all linear layers.
        window: positions of a random model.
        spread: deviation of the adapters' B, which a fresh adapter has at 0.
    """
    from peft import LoraConfig, get_peft_model, set_peft_model_state_dict

    model, tokenizer, name = _loaded(args) if getattr(args, "model", None) else _random(args, window)
    # Each wraps the layers in place, so that it needs modules of its own.
    twin, plain = sharing_weights(model), sharing_weights(model)
    base = SharedBase(model, tokenizer, name)
    peft: Any = None
    for k in range(count):
        name = f"agent{k}"
        add_spread_adapter(base, k, args.rank, spread)
        lora = LoraConfig(r=args.rank, lora_alpha=2 * args.rank, target_modules=ALL_LINEAR)
        peft = get_peft_model(twin, lora, adapter_name=name) if peft is None else peft
        if name not in peft.peft_config:
            peft.add_adapter(name, lora)
        # The same weights in both, or the results could not be compared before they are timed.
        set_peft_model_state_dict(peft, base.adapter_state(name), adapter_name=name)
    base.model.to(args.device)
    return Rivals(base, peft.eval().to(args.device), plain.to(args.device))


def cast(rivals: Rivals, dtype: str) -> None:
    """Convert the frozen weights of all rivals, in place; adapters stay in float32."""
    for model in (rivals.base.model, rivals.peft, rivals.plain):
        for name, parameter in model.named_parameters():
            if "lora_" not in name:
                parameter.data = parameter.data.to(getattr(torch, dtype))
    for name in rivals.base.adapters:
        rivals.base.bump(name)


def sharpen(rivals: Rivals, spread: float = 2.0) -> None:
    """Scale the head so that logits have that deviation: all tokens of a random model are about equally likely."""
    head = rivals.plain.get_output_embeddings().weight
    with torch.no_grad():
        head.mul_(spread / (head.std() * head.shape[1] ** 0.5))


def sharing_weights(model: Any) -> Any:
    return copy.deepcopy(model, {id(tensor): tensor for tensor in chain(model.parameters(), model.buffers())})


def _loaded(args: argparse.Namespace) -> tuple[Any, Any, str]:
    model, tokenizer, name = load_pretrained(
        args.model,
        dtype="float32",
        device=args.device,
        attn_implementation="sdpa",
        trust_remote_code=False,
        bits=None,
    )
    shape = model.config
    args.vocab, args.width, args.mlp = shape.vocab_size, shape.hidden_size, shape.intermediate_size
    args.layers = shape.num_hidden_layers
    return model, tokenizer, name


def _random(args: argparse.Namespace, window: int) -> tuple[Any, Any, str]:
    return random_model(args, window), NoText(), "random Qwen3"


def build_base(args: argparse.Namespace, ranks: Sequence[int], *, window: int, spread: float) -> SharedBase:
    """The shared base alone, with an adapter `agent0`, `agent1`, ... of each rank; arguments as of `build_rivals`."""
    model, tokenizer, name = _random(args, window)
    base = SharedBase(model.to(args.device), tokenizer, name)
    for number, rank in enumerate(ranks):
        add_spread_adapter(base, number, rank, spread)
    return base


def random_model(args: argparse.Namespace, window: int) -> Any:
    """A frozen random Qwen3 of `window` positions; arguments as of `build_rivals`.

    With `experts` in `args` it is a mixture of so many, of which a token goes through `chosen`.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    kind: dict[str, Any] = {"model_type": "qwen3", "intermediate_size": args.mlp}
    if getattr(args, "experts", 0):
        kind = {"model_type": "qwen3_moe", "moe_intermediate_size": args.mlp}
        kind |= {"num_experts": args.experts, "num_experts_per_tok": args.chosen}
    config = AutoConfig.for_model(
        **kind,
        vocab_size=args.vocab,
        hidden_size=args.width,
        num_hidden_layers=args.layers,
        num_attention_heads=max(1, args.width // 64),
        num_key_value_heads=max(1, args.width // 128),
        head_dim=64,
        max_position_embeddings=window,
        pad_token_id=0,
        # Without an end token every answer has the full length, and rivals do the same work.
        eos_token_id=None,
    )
    config._attn_implementation = "sdpa"
    return AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)


def add_spread_adapter(base: SharedBase, number: int, rank: int, spread: float) -> None:
    """Add `agentN` on all linear layers, with a B of deviation `spread`, the same in every run."""
    name, generator = f"agent{number}", torch.Generator().manual_seed(number)
    base.add_adapter(name, LoraSpec(rank=rank, alpha=2.0 * rank), seed=number)
    with torch.no_grad():
        for _, b in base.adapter_layers(name).values():
            b.copy_(torch.randn(b.shape, generator=generator) * spread)
    base.bump(name)
