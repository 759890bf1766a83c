"""mafrt: fine-tune teams of language models on one frozen base, a LoRA adapter per agent.

    env = mafrt.make_env("math")                              # or a class of your own: mafrt.Env
    base = mafrt.SharedBase.load("teaching-base")             # the frozen model, in memory once
    config = mafrt.TrainConfig.of(algorithm="grpo", n_samples=4, iterations=50)
    mafrt.OnPolicy(env, env.unwrapped.team, base, config, run_dir="runs/mine").run()

Environments: `Env`, `Session`, `StepResult`, `make_env`, `check_env`, `register_env`. Team: `Team`, `AgentSpec`,
`LoraSpec`, `register_agent`. Settings: `TrainConfig`, of `PlayConfig`, `LearnConfig`, `TeamConfig`, `RunConfig`,
`CoachConfig`, `EngineConfig` and those of an `Algorithm` (`make_algorithm`). Model: `SharedBase`, `LocalEngine`,
`Request`, `SamplingParams`, `Completion`. What flows: `Turn`, `Episode`. Coach: `Coach`, `make_coach`, `Case`,
`Evidence`, `Scored`, `Unscored`. A loop of one's own is made of the parts that `OnPolicy` is made of: `Player` plays
from `Start`s, `Judge` scores, `Critic` values, `assign` gives credit, `Objective` and `Learner` learn. `Provenance`
names what a run goes on from.

A look at what came of it: `base.generate("3 + 4 =", adapter="actor")`, `team.chat(base, "How many pens are left?")`.

Names are resolved on first use, so that `import mafrt` costs milliseconds and torch is loaded only when needed.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

__version__ = "0.1.0"

if sys.platform == "win32":
    raise ImportError(
        "mafrt does not run on Windows itself; install WSL (wsl --install), and mafrt in there, on its Linux"
    )

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
    "PlayConfig": "mafrt.config.train_config",
    "LearnConfig": "mafrt.config.train_config",
    "TeamConfig": "mafrt.config.train_config",
    "RunConfig": "mafrt.config.train_config",
    "CoachConfig": "mafrt.config.train_config",
    "EngineConfig": "mafrt.config.train_config",
    "SharedBase": "mafrt.models.shared_base",
    "Turn": "mafrt.core.types",
    "Episode": "mafrt.core.types",
    "Start": "mafrt.core.types",
    "StepResult": "mafrt.core.types",
    "SamplingParams": "mafrt.core.types",
    "Request": "mafrt.core.types",
    "Completion": "mafrt.core.types",
    "Coach": "mafrt.coach",
    "Case": "mafrt.coach",
    "make_coach": "mafrt.coach",
    "Evidence": "mafrt.core.types",
    "Scored": "mafrt.core.types",
    "Unscored": "mafrt.core.types",
    "OnPolicy": "mafrt.runners.on_policy",
    "Provenance": "mafrt.runners.identity",
    "Judge": "mafrt.runners.judge",
    "Player": "mafrt.rollout.player",
    "Critic": "mafrt.training.critic",
    "Learner": "mafrt.training.learner",
    "Objective": "mafrt.training.policy_objective",
    "assign": "mafrt.algorithms",
    "make_algorithm": "mafrt.config.algorithm",
    "Algorithm": "mafrt.algorithms",
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
