"""Settings of tasks with a reward function; flags and their help follow from them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TaskSettings:
    """Tasks and their reward."""

    dataset_path: str | None = None
    """JSON, JSONL or Parquet with a problem in each record (a text, or chat messages), or a Hugging Face data set id"""
    reward: str | None = None
    """file.py:function or package.module:function that grades a text: function(text, record) -> number"""
    eval_dataset_path: str | None = None
    """held-out tasks; default: the last tenth (at most 200) of dataset_path"""
