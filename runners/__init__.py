"""Training loops and schedules. The names below are resolved on first use, since most of them need torch."""

from __future__ import annotations

import importlib
from typing import Any

_WHERE = {
    "EvaluationPlan": "mafrt.runners.evaluation",
    "OnPolicy": "mafrt.runners.on_policy",
    "Provenance": "mafrt.runners.identity",
    "evaluate": "mafrt.runners.evaluation",
}

__all__ = ["EvaluationPlan", "OnPolicy", "Provenance", "evaluate"]


def __getattr__(name: str) -> Any:
    if name in _WHERE:
        return getattr(importlib.import_module(_WHERE[name]), name)
    raise AttributeError(f"module 'mafrt.runners' has no attribute {name!r}")
