"""The math environment and its settings, from which flags and their help follow."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from mafrt.config.team import Team
from mafrt.envs.construction import TEST, Construction, evaluated_split, held_out_note, hold_out, named_split, subset
from mafrt.envs.math.contamination import find_leaks
from mafrt.envs.math.env import MathEnv
from mafrt.envs.math.tasks import Task, load_tasks
from mafrt.envs.mixed import MixedTasks, named_sets, repeated, weights_of
from mafrt.envs.workflows.config import workflow_options


@dataclass(frozen=True)
class MathSettings:
    """Problems."""

    dataset_path: str | None = None
    """file, Hugging Face id, stories:train, arithmetic:train, or several as A@WEIGHT,B; default: shipped problems"""
    eval_dataset_path: str | None = None
    """held-out problems, or several sets as A,B; default: shipped ones, or the last tenth (at most 200) of yours"""
    score_answers_by: Literal["result", "plan"] = "result"
    """with --coach rules, an answer that carries out a wrong plan without a mistake: wrong (result) or right (plan)"""


NAME = "math"
_GENERATED = re.compile(r"\b(stories|arithmetic):validation\b")


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
    if evaluated_split(settings) == TEST and (chosen_by := settings.get("eval_dataset_path")) is not None:
        # Generated problems that a run chose its weights by have a test of the same kind.
        settings = {**settings, "eval_dataset_path": _GENERATED.sub(r"\1:test", os.fspath(chosen_by))}
    source = settings.get("dataset_path")
    tasks, held_out = problems(settings)
    notes = []
    if source is not None and settings.get("eval_dataset_path") is None:
        notes.append(held_out_note(source, len(tasks), len(held_out)))
    leaks = find_leaks(tasks, held_out)
    if leaks.shared:
        notes.append(f"Careful: {leaks}, so the evaluation shows in part what was learnt by heart.")
    if leaks.same_numbers:
        notes.append(f"{leaks.calculations}.")
    # After the search for leaks, which is about all of the data.
    tasks = subset(tasks, settings.get("train_limit"), settings.get("seed", 0))
    eval_env = evaluation_env(settings, held_out, team) if held_out else None
    if eval_env is not None:
        named = settings.get("eval_dataset_path")
        eval_env.split = evaluated_split(settings) if named is None else named_split(named)
    return Construction(build_env(settings, tasks, team), eval_env, tuple(notes))


def evaluation_env(settings: Mapping[str, Any], tasks: Sequence[Task], team: Team | None) -> MathEnv | MixedTasks:
    """The environment on held-out problems; several sets are played side by side, each with a score of its own."""
    sets = settings.get("eval_dataset_path")
    if sets is None or not several(sets):
        return build_env(settings, tasks, team)
    fields = {name: settings.get(name) for name in ("problem_field", "answer_field")}
    named = named_sets(sets)
    loaded = {name: load_sets(source, evaluated_split(settings), fields) for name, (source, _) in named.items()}
    return MixedTasks({name: build_env(settings, each, team) for name, each in loaded.items()})


def build_env(settings: Mapping[str, Any], tasks: Sequence[Task], team: Team | None) -> MathEnv:
    """The environment that the settings describe, on these tasks."""
    by = settings.get("score_answers_by", "result")
    return MathEnv(tasks=tasks, team=team, score_answers_by=by, **workflow_options(settings))


def problems(settings: Mapping[str, Any]) -> tuple[Sequence[Task], Sequence[Task]]:
    """Problems to train on and held-out problems; there are none of the latter if the file is too small."""
    fields = {name: settings.get(name) for name in ("problem_field", "answer_field")}
    source, held_out = settings.get("dataset_path"), settings.get("eval_dataset_path")
    # The shipped records have fields of their own, so fields that are named belong to the user's files.
    tasks = load_sets(source, "train", fields) if source is not None else load_tasks()
    split = evaluated_split(settings)
    if held_out is not None:
        return tasks, load_sets(held_out, split, fields)
    if source is None:
        return tasks, load_tasks(split=split)
    return hold_out(tasks, split)


def several(source: str) -> bool:
    """Whether a setting names several sets, or one with a weight: `a.jsonl@2,b.jsonl`."""
    text = os.fspath(source)
    # A file may have such a name, and then it is meant.
    return ("," in text or "@" in text) and not os.path.exists(text)


def load_sets(source: str, split: str, fields: Mapping[str, Any]) -> Sequence[Task]:
    """The problems of one set, or of several, those of a set as often as its weight asks for."""
    if not several(source):
        return load_tasks(source, split=split, **fields)
    sets = named_sets(source)
    loaded = {name: load_tasks(each, split=split, **fields) for name, (each, _) in sets.items()}
    weights = weights_of(sets)
    if weights is None:
        return [task for tasks in loaded.values() for task in tasks]
    return [loaded[name][number] for name, number in repeated({n: len(t) for n, t in loaded.items()}, weights)]
