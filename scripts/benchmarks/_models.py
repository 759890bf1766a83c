"""The rivals of a benchmark: one random Qwen3 as a shared base and as a PEFT model, with the same weights."""

from __future__ import annotations

import argparse
import copy
from collections.abc import Sequence
from typing import Any

import torch

from mafrt.config.agent import LoraSpec
from mafrt.models.shared_base import SharedBase


class NoText:
    """Stands in for a tokenizer: a random model has nothing to say."""

    def decode(self, ids: Sequence[int], **_: Any) -> str:
        return ""


def build_pair(args: argparse.Namespace, count: int, *, window: int, spread: float) -> tuple[SharedBase, Any]:
    """The shared base and the PEFT model, each with `count` adapters `agent0`, `agent1`, ...

    Args:
        args: `vocab`, `width`, `mlp`, `layers`, `rank` and `device` determine the model.
        count: adapters, on all linear layers.
        window: positions of the model.
        spread: deviation of the adapters' B, which a fresh adapter has at 0.
    """
    from peft import LoraConfig, get_peft_model, set_peft_model_state_dict
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=args.vocab,
        hidden_size=args.width,
        intermediate_size=args.mlp,
        num_hidden_layers=args.layers,
        num_attention_heads=max(1, args.width // 64),
        num_key_value_heads=max(1, args.width // 128),
        head_dim=64,
        max_position_embeddings=window,
        pad_token_id=0,
        eos_token_id=None,
    )
    config._attn_implementation = "sdpa"
    model = Qwen3ForCausalLM(config).eval().requires_grad_(False)
    twin = copy.deepcopy(model)
    base = SharedBase(model, NoText(), "random Qwen3")
    spec = LoraSpec(rank=args.rank, alpha=2.0 * args.rank)
    peft: Any = None
    for k in range(count):
        name = f"agent{k}"
        base.add_adapter(name, spec, seed=k)
        with torch.no_grad():
            for _, b in base.adapter_layers(name).values():
                b.normal_(0, spread)
        base.bump(name)
        lora = LoraConfig(r=args.rank, lora_alpha=2 * args.rank, target_modules=list(spec.targets))
        peft = get_peft_model(twin, lora, adapter_name=name) if peft is None else peft
        if name not in peft.peft_config:
            peft.add_adapter(name, lora)
        set_peft_model_state_dict(peft, base.adapter_state(name), adapter_name=name)
    base.model.to(args.device)
    return base, peft.eval().to(args.device)
