"""Whole iterations of real dimensions against TRL with PEFT, on one device (`bench/iteration.py`)."""

from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from bench import iteration
from bench._gpu.models import random_model
from mafrt.core.shipped import SHIPPED_BASES
from mafrt.models.memory_estimate import ModelShape

SIZE = ("--prompts", "4", "--samples", "8", "--tokens", "64", "--rounds", "2", "--warmup", "1", "--threads", "4")
SMALL = ("--prompts", "1", "--samples", "2", "--tokens", "4", "--rounds", "1", "--warmup", "1")


def iterations(
    shape: ModelShape, device: str, dtype: torch.dtype, adapters: Sequence[int], *, small: bool
) -> list[dict[str, Any]] | dict[str, str]:
    """Rows of `mafrt bench iteration` on a random model with the words of the teaching base."""
    if missing := [name for name in ("trl", "datasets") if importlib.util.find_spec(name) is None]:
        return {"left out": f"{' and '.join(missing)} is not installed"}
    from transformers import AutoTokenizer

    with tempfile.TemporaryDirectory() as folder:
        tokenizer = AutoTokenizer.from_pretrained(SHIPPED_BASES["teaching-base"])
        tokenizer.save_pretrained(folder)
        shape = replace(shape, vocabulary=max(shape.vocabulary, len(tokenizer)))
        random_model(shape, device=device, dtype=dtype).save_pretrained(folder)
        words = ["--model", str(Path(folder)), "--device", device, "--dtype", str(dtype).removeprefix("torch.")]
        rows = iteration.run([*words, *(SMALL if small else SIZE), "--adapters", *map(str, adapters)])["rows"]
    return [
        {name: value["median"] if isinstance(value, dict) else value for name, value in row.items()} for row in rows
    ]
