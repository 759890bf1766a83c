"""Bases with the widths of a published model, fewer layers and random weights, for shapes that are not at hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from mafrt.core.shipped import TEACHING_BASE

SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "random:qwen3.5-0.8b": (
        "qwen3_5_text",
        {"hidden_size": 1024, "intermediate_size": 3584, "num_attention_heads": 8, "num_key_value_heads": 2,
         "head_dim": 256, "linear_num_key_heads": 16, "linear_num_value_heads": 16, "linear_key_head_dim": 128,
         "linear_value_head_dim": 128, "num_hidden_layers": 24, "tie_word_embeddings": True},
    ),
}  # fmt: skip
"""Name -> family and widths (Qwen/Qwen3.5-0.8B's configuration), with the shipped tokenizer's vocabulary."""


def write_random_base(name: str, layers: int | None, folder: Path) -> str:
    """Write such a base into `folder`, and return its path; a name that is no shape is returned as it is."""
    if name not in SHAPES:
        return name
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    family, widths = SHAPES[name]
    tokenizer = AutoTokenizer.from_pretrained(TEACHING_BASE)
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    more = {"vocab_size": len(tokenizer), "num_hidden_layers": layers or widths["num_hidden_layers"]}
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **(widths | more | ends)))
    target = folder / name.replace(":", "-")
    model.float().save_pretrained(target)
    tokenizer.save_pretrained(target)
    return str(target)
