"""Train a team to solve math problems: the shipped word problems, or MATH, GSM8K, AIME, AMC files as they are."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mafrt.scripts.cli.command import Command, Settings, run_main
from mafrt.scripts.cli.loading import hold_out, load_team, team_for
from mafrt.scripts.cli.settings import (
    TRAIN,
    MathSettings,
    ModelSettings,
    PlaceSettings,
    ScaleSettings,
    WorkflowSettings,
)
from mafrt.scripts.cli.stage import Stage
from mafrt.scripts.cli.train import train

if TYPE_CHECKING:
    from mafrt.config.team import Team
    from mafrt.envs.math import MathEnv, Task


COMMAND = Command(
    "train_math",
    "Train a team of agents, each with its own LoRA adapter on one frozen base, to solve math problems.",
    (MathSettings, WorkflowSettings, ModelSettings, PlaceSettings, ScaleSettings, *TRAIN),
    defaults={"profile_path": "profiles/quickstart.json"},
)


def prepare(settings: Settings) -> Stage:
    """Problems, workflow and team, checked before the model is loaded."""
    from mafrt.envs.math import find_leaks

    team = load_team(settings)
    source = settings["dataset_path"]
    tasks, held_out = problems(settings.values)
    notes = []
    if source is not None and settings["eval_dataset_path"] is None:
        kept = f"the last {len(held_out)} are held out" if held_out else "too few to hold any out: they serve for both"
        notes.append(f"Training on {len(tasks)} problems of {source}; for evaluation, {kept}.")
    leaks = find_leaks(tasks, held_out)
    if leaks.shared:
        notes.append(f"Careful: {leaks}, so the evaluation shows in part what was learnt by heart.")
    env = math_env(settings, tasks, team)
    eval_env = math_env(settings, held_out, team) if held_out else None
    return Stage(env, eval_env, team_for(env, team, settings["n_agents"]), "math", tuple(notes))


def math_env(settings: Settings, tasks: Sequence[Task], team: Team | None) -> MathEnv:
    """The environment that the settings describe, on these tasks."""
    from mafrt.envs.math import MathEnv

    names = ("horizon", "workflow", "sees", "tool_turns", "sandbox")
    return MathEnv(tasks=tasks, team=team, **{name: settings[name] for name in names})


def problems(settings: Mapping[str, Any]) -> tuple[Sequence[Task], Sequence[Task]]:
    """Problems to train on and held-out problems; there are none of the latter if the file is too small."""
    from mafrt.envs.math import load_tasks

    fields = {name: settings.get(name) for name in ("problem_field", "answer_field")}
    source, held_out = settings.get("dataset_path"), settings.get("eval_dataset_path")
    # The shipped records have fields of their own, so fields that are named belong to the user's files.
    tasks = load_tasks(source, **fields) if source is not None else load_tasks()
    if held_out is not None:
        return tasks, load_tasks(held_out, split="test", **fields)
    if source is None:
        return tasks, load_tasks(split="test")
    return hold_out(tasks)


def main(argv: Sequence[str] | None = None) -> int:
    return run_main(lambda words: train(COMMAND, words, prepare), argv)


if __name__ == "__main__":
    sys.exit(main())
