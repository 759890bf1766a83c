"""The math environment from its settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mafrt.config.team import Team
from mafrt.envs.construction import Construction, held_out_note, hold_out, subset
from mafrt.envs.math.contamination import find_leaks
from mafrt.envs.math.env import MathEnv
from mafrt.envs.math.tasks import Task, load_tasks

NAME = "math"


def build(settings: Mapping[str, Any], team: Team | None = None) -> Construction:
    """Problems, workflow and environments.

    Args:
        settings: the fields of `MathSettings` and `WorkflowSettings`, and `sandbox`, by name. All are JSON values.
        team: who plays; None: a reasoner and an actor.

    Raises:
        DataError: the problems cannot be read.
        ConfigError: a setting does not fit the workflow or the team.
        SandboxError: the workflow runs programs, and there is no such sandbox here.
    """
    source = settings.get("dataset_path")
    tasks, held_out = problems(settings)
    notes = []
    if source is not None and settings.get("eval_dataset_path") is None:
        notes.append(held_out_note(source, len(tasks), len(held_out)))
    leaks = find_leaks(tasks, held_out)
    if leaks.shared:
        notes.append(f"Careful: {leaks}, so the evaluation shows in part what was learnt by heart.")
    tasks = subset(tasks, settings.get("train_limit"), settings.get("seed", 0))
    eval_env = build_env(settings, held_out, team) if held_out else None
    return Construction(build_env(settings, tasks, team), eval_env, tuple(notes))


def build_env(settings: Mapping[str, Any], tasks: Sequence[Task], team: Team | None) -> MathEnv:
    """The environment that the settings describe, on these tasks."""
    names = ("horizon", "workflow", "sees", "tool_turns", "judge", "routes", "tools", "sandbox")
    return MathEnv(tasks=tasks, team=team, **{name: settings[name] for name in names if name in settings})


def problems(settings: Mapping[str, Any]) -> tuple[Sequence[Task], Sequence[Task]]:
    """Problems to train on and held-out problems; there are none of the latter if the file is too small."""
    fields = {name: settings.get(name) for name in ("problem_field", "answer_field")}
    source, held_out = settings.get("dataset_path"), settings.get("eval_dataset_path")
    # The shipped records have fields of their own, so fields that are named belong to the user's files.
    tasks = load_tasks(source, **fields) if source is not None else load_tasks()
    if held_out is not None:
        return tasks, load_tasks(held_out, split="test", **fields)
    if source is None:
        return tasks, load_tasks(split="test")
    return hold_out(tasks)
