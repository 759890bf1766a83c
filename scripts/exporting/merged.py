"""Whole models with an adapter merged into the base, made by PEFT."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from mafrt.core.shipped import base_folder


def write_merged(target: Path, base: str, adapters: Mapping[str, Path]) -> None:
    """Write `target/ADAPTER` with weights, configuration and tokenizer, for each adapter."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = str(base_folder(base) or base)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for name, path in adapters.items():
        model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")  # merging changes it: one load for each
        merged = PeftModel.from_pretrained(model, str(path)).merge_and_unload()
        merged.save_pretrained(str(target / name))
        tokenizer.save_pretrained(str(target / name))
