"""Training loops and schedules. `OnPolicy` and `evaluate` are resolved on first use, since they need torch."""

from __future__ import annotations

import importlib
from typing import Any

_WHERE = {"OnPolicy": "mafrt.runners.on_policy", "evaluate": "mafrt.runners.evaluation"}

__all__ = ["OnPolicy", "evaluate"]


def __getattr__(name: str) -> Any:
    if name in _WHERE:
        return getattr(importlib.import_module(_WHERE[name]), name)
    raise AttributeError(f"module 'mafrt.runners' has no attribute {name!r}")
