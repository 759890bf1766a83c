"""Settings of the math environment; flags and their help follow from them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class MathSettings:
    """Problems."""

    dataset_path: str | None = None
    """JSON, JSONL, Parquet, a Hugging Face data set id, or stories:train; default: the shipped word problems"""
    eval_dataset_path: str | None = None
    """held-out problems; default: the shipped ones, or the last tenth (at most 200) of your own"""
