"""Tasks with a reward function and their settings, from which flags and their help follow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mafrt.config.team import Team
from mafrt.core.errors import ConfigError
from mafrt.envs.construction import Construction, evaluated_split, held_out_note, hold_out, named_split, subset
from mafrt.envs.math.tasks import Task, load_tasks
from mafrt.envs.tasks.env import RewardEnv
from mafrt.envs.workflows.config import workflow_options


@dataclass(frozen=True)
class TaskSettings:
    """Tasks and their reward."""

    dataset_path: str | None = None
    """JSON, JSONL or Parquet with a problem in each record (a text, or chat messages), or a Hugging Face data set id"""
    reward: str | None = None
    """file.py:function or package.module:function that grades a text: function(text, record) -> number"""
    eval_dataset_path: str | None = None
    """held-out tasks; default: the last tenth (at most 200) of dataset_path"""


NAME = "tasks"


def build(settings: Mapping[str, Any], team: Team | None = None) -> Construction:
    """Tasks, workflow and environments.

    Args:
        settings: the fields of `TaskSettings` and `WorkflowSettings`, `sandbox` and `seed`, by name.
        team: who plays; None: one solver.

    Raises:
        DataError: the tasks cannot be read.
        ConfigError: no data or no function, or a setting that does not fit the workflow or the team.
    """
    source, held_out_source = settings.get("dataset_path"), settings.get("eval_dataset_path")
    if source is None:
        raise ConfigError("a reward function needs tasks; give --dataset_path, a file with one problem a record.")
    fields: dict[str, Any] = {name: settings.get(name) for name in ("problem_field", "answer_field")}
    tasks: Sequence[Task] = load_tasks(source, needs_answer=False, **fields)
    notes, split = [], evaluated_split(settings)
    if held_out_source is not None:
        held_out: Sequence[Task] = load_tasks(held_out_source, split=split, needs_answer=False, **fields)
    else:
        tasks, held_out = hold_out(tasks, split)
        notes.append(held_out_note(source, len(tasks), len(held_out)))
    tasks = subset(tasks, settings.get("train_limit"), settings.get("seed", 0))
    eval_env = build_env(settings, held_out, team) if held_out else None
    if eval_env is not None:
        eval_env.split = split if held_out_source is None else named_split(held_out_source)
    return Construction(build_env(settings, tasks, team), eval_env, tuple(notes))


def build_env(settings: Mapping[str, Any], tasks: Sequence[Task], team: Team | None) -> RewardEnv:
    """The environment that the settings describe, on these tasks."""
    return RewardEnv(tasks=tasks, reward=settings.get("reward"), team=team, **workflow_options(settings))
