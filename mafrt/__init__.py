"""mafrt: fine-tune teams of language models on one frozen base, a LoRA adapter per agent.

Names are resolved on first use, so that `import mafrt` costs milliseconds and torch is loaded only when needed.
"""

from __future__ import annotations

import importlib
from typing import Any

from mafrt.version import __version__

_WHERE = {
    "Env": "mafrt.env",
    "check_env": "mafrt.env",
    "make_env": "mafrt.env",
    "register_env": "mafrt.env",
    "Team": "mafrt.team",
    "AgentSpec": "mafrt.team",
    "LoraSpec": "mafrt.team",
    "TrainConfig": "mafrt.config",
    "SharedBase": "mafrt.policy",
    "Turn": "mafrt.types",
    "Episode": "mafrt.types",
    "StepResult": "mafrt.types",
    "SamplingParams": "mafrt.types",
    "Request": "mafrt.types",
    "Completion": "mafrt.types",
    "Coach": "mafrt.coach",
    "Case": "mafrt.coach",
    "Evidence": "mafrt.types",
    "Scored": "mafrt.types",
    "Unscored": "mafrt.types",
    "LocalEngine": "mafrt.engine.local",
    "ScriptedEngine": "mafrt.engine.scripted",
    "MafrtError": "mafrt.errors",
}
_MODULES = ("credit", "runners", "envs", "losses", "errors")

__all__ = [*_WHERE, *_MODULES, "__version__"]


def __getattr__(name: str) -> Any:
    if name in _WHERE:
        return getattr(importlib.import_module(_WHERE[name]), name)
    if name in _MODULES:
        return importlib.import_module(f"mafrt.{name}")
    raise AttributeError(f"module 'mafrt' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
