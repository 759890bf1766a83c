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

    model = random_model(args, window)
    # Both wrap the layers in place, so that each needs a model of its own.
    twin = copy.deepcopy(model)
    base = SharedBase(model, NoText(), "random Qwen3")
    peft: Any = None
    for k in range(count):
        name = f"agent{k}"
        add_spread_adapter(base, k, args.rank, spread)
        lora = LoraConfig(r=args.rank, lora_alpha=2 * args.rank, target_modules=list(LoraSpec().targets))
        peft = get_peft_model(twin, lora, adapter_name=name) if peft is None else peft
        if name not in peft.peft_config:
            peft.add_adapter(name, lora)
        # The same weights in both, or the results could not be compared before they are timed.
        set_peft_model_state_dict(peft, base.adapter_state(name), adapter_name=name)
    base.model.to(args.device)
    return base, peft.eval().to(args.device)


def build_base(args: argparse.Namespace, ranks: Sequence[int], *, window: int, spread: float) -> SharedBase:
    """The shared base alone, with an adapter `agent0`, `agent1`, ... of each rank; arguments as of `build_pair`."""
    base = SharedBase(random_model(args, window).to(args.device), NoText(), "random Qwen3")
    for number, rank in enumerate(ranks):
        add_spread_adapter(base, number, rank, spread)
    return base


def random_model(args: argparse.Namespace, window: int) -> Any:
    """A frozen random Qwen3 of `window` positions; arguments as of `build_pair`."""
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
        # Without an end token every answer has the full length, and rivals do the same work.
        eos_token_id=None,
    )
    config._attn_implementation = "sdpa"
    return Qwen3ForCausalLM(config).eval().requires_grad_(False)


def add_spread_adapter(base: SharedBase, number: int, rank: int, spread: float) -> None:
    """Add `agentN` on all linear layers, with a B of deviation `spread`."""
    name = f"agent{number}"
    base.add_adapter(name, LoraSpec(rank=rank, alpha=2.0 * rank), seed=number)
    with torch.no_grad():
        for _, b in base.adapter_layers(name).values():
            b.normal_(0, spread)
    base.bump(name)
