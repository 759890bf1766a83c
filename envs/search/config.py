"""Settings of the search environment; flags and their help follow from them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class SearchSettings:
    """Questions and retriever."""

    dataset_path: str | None = None
    """JSON, JSONL or Parquet of questions and answers, such as NQ or HotpotQA; default: generated questions"""
    eval_dataset_path: str | None = None
    """held-out questions; default: generated ones, or the last tenth (at most 200) of dataset_path"""
    corpus_path: str | None = None
    """JSON, JSONL or Parquet of passages; default: the passages that the questions bring along, as HotpotQA's do"""
    retriever: str | None = None
    """URL of a retriever in Search-R1's form, such as http://127.0.0.1:8000/retrieve; default: BM25 in this process"""
    topk: int = 3
    """passages of one search"""
    retriever_timeout_s: float = 10.0
    """max seconds of one search over HTTP; a later answer loses its episode"""
    metric: Literal["em", "f1"] = "em"
    """score of an answer: exact match, or F1 of its words"""
    demonstrations: str | None = None
    """write good and careless turns on the generated questions to this JSONL, for train_sft, and leave"""
    demonstration_episodes: int = 400
    """episodes that they come from"""
