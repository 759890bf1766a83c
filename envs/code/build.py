"""The code environment and its settings, from which flags and their help follow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mafrt.config.team import Team
from mafrt.envs.code.by_workflow import code_env
from mafrt.envs.code.env import CodeEnv
from mafrt.envs.code.task_env import CodeTaskEnv
from mafrt.envs.code.tasks import SETS, CodeTask, load_tasks
from mafrt.envs.construction import Construction, evaluated_split, held_out_note, hold_out, subset
from mafrt.envs.workflows.config import workflow_options


@dataclass(frozen=True)
class CodeSettings:
    """Problems."""

    dataset_path: str = "programs"
    """HumanEval-, MBPP- or APPS-style JSONL, or shipped data: functions, or programs, which suit the teaching base"""
    eval_dataset_path: str | None = None
    """held-out problems; default: the shipped ones, or the last tenth (at most 200) of your own"""
    coder_turns: int | None = None
    """coder_tester: turns of the Coder in a row while its program fails to compile or raises; default: 2"""
    reviews: int | None = None
    """coder_tester: times that the Tester, if the team has one, may send a program back; default: 1"""
    program_timeout: float = 10.0
    """seconds that a program and all its tests may take"""
    program_memory: int = 1024
    """MiB of memory that they may take"""


NAME = "code"
DEFAULT_SET = "programs"


def build(settings: Mapping[str, Any], team: Team | None = None) -> Construction:
    """Problems, sandbox and environments.

    Args:
        settings: the fields of `CodeSettings` and `WorkflowSettings`, `sandbox` and `seed`, by name. All are JSON
            values.
        team: for the workflow `coder_tester` a Coder, or a Coder and a Tester; None: a Coder.

    Raises:
        DataError: the problems cannot be read.
        ConfigError: a setting or the team does not fit.
        SandboxError: there is no such sandbox here.
    """
    source = settings.get("dataset_path", DEFAULT_SET)
    tasks, held_out = problems(settings)
    notes = []
    if source not in SETS and settings.get("eval_dataset_path") is None:
        notes.append(held_out_note(source, len(tasks), len(held_out)))
    shared = {task.statement for task in tasks} & {task.statement for task in held_out}
    if shared:
        notes.append(
            f"Careful: {len(shared)} statements stand in both sets, so the evaluation shows in part what was learnt by "
            "heart."
        )
    tasks = subset(tasks, settings.get("train_limit"), settings.get("seed", 0))
    eval_env = build_env(settings, held_out, team) if held_out else None
    if eval_env is not None and settings.get("eval_dataset_path") in (None, *SETS):
        eval_env.split = evaluated_split(settings)
    return Construction(build_env(settings, tasks, team), eval_env, tuple(notes))


def build_env(settings: Mapping[str, Any], tasks: Sequence[CodeTask], team: Team | None) -> CodeEnv | CodeTaskEnv:
    """The environment that the settings describe, on these tasks."""
    arguments = {
        "turns": "coder_turns",
        "reviews": "reviews",
        "timeout_s": "program_timeout",
        "memory_mib": "program_memory",
    }
    given = {argument: settings[name] for argument, name in arguments.items() if name in settings}
    return code_env(tasks=tasks, team=team, **given, **workflow_options(settings))


def problems(settings: Mapping[str, Any]) -> tuple[Sequence[CodeTask], Sequence[CodeTask]]:
    """Problems to train on and held-out problems; there are none of the latter if the file is too small."""
    source, held_out = settings.get("dataset_path", DEFAULT_SET), settings.get("eval_dataset_path")
    tasks = load_tasks(source)
    split = evaluated_split(settings)
    if held_out is not None:
        return tasks, load_tasks(held_out, split=split)
    if source in SETS:
        return tasks, load_tasks(source, split=split)
    return hold_out(tasks, split)
