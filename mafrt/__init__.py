"""mafrt: fine-tune teams of language models on one frozen base, a LoRA adapter per agent.

Names are resolved on first use, so that `import mafrt` costs milliseconds and torch is loaded only when needed.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_WHERE = {
    "Env": "mafrt.environment.base",
    "check_env": "mafrt.environment.checker",
    "make_env": "mafrt.environment.registry",
    "Session": "mafrt.environment.session",
    "register_env": "mafrt.environment.registry",
    "register_agent": "mafrt.config.registered_agents",
    "Team": "mafrt.config.team",
    "AgentSpec": "mafrt.config.team",
    "LoraSpec": "mafrt.config.team",
    "TrainConfig": "mafrt.config.train_config",
    "SharedBase": "mafrt.models.shared_base",
    "Turn": "mafrt.core.types",
    "Episode": "mafrt.core.types",
    "StepResult": "mafrt.core.types",
    "SamplingParams": "mafrt.core.types",
    "Request": "mafrt.core.types",
    "Completion": "mafrt.core.types",
    "Coach": "mafrt.coach",
    "Case": "mafrt.coach",
    "Evidence": "mafrt.core.types",
    "Scored": "mafrt.core.types",
    "Unscored": "mafrt.core.types",
    "LocalEngine": "mafrt.engines.local.engine",
    "ScriptedEngine": "mafrt.engines.scripted",
    "MafrtError": "mafrt.core.errors",
}
_MODULES = {
    "algorithms": "mafrt.algorithms",
    "errors": "mafrt.core.errors",
    "envs": "mafrt.envs",
    "runners": "mafrt.runners",
}

__all__ = [*_WHERE, *_MODULES, "__version__"]


def __getattr__(name: str) -> Any:
    if name in _WHERE:
        return getattr(importlib.import_module(_WHERE[name]), name)
    if name in _MODULES:
        return importlib.import_module(_MODULES[name])
    raise AttributeError(f"module 'mafrt' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
