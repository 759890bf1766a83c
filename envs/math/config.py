"""Settings of the math environment; flags and their help follow from them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class MathSettings:
    """Problems."""

    dataset_path: str | None = None
    """file, Hugging Face id, stories:train, arithmetic:train, or several as A@WEIGHT,B; default: shipped problems"""
    eval_dataset_path: str | None = None
    """held-out problems, or several sets as A,B; default: shipped ones, or the last tenth (at most 200) of yours"""
    score_answers_by: Literal["result", "plan"] = "result"
    """with --coach rules, an answer that carries out a wrong plan without a mistake: wrong (result) or right (plan)"""
