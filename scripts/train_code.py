"""Train a Coder, alone or with a Tester, to write programs that pass tests: HumanEval-, MBPP- or APPS-style JSONL."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mafrt.scripts.cli.command import Command, Settings, run_main
from mafrt.scripts.cli.loading import hold_out, load_team, team_for
from mafrt.scripts.cli.settings import TRAIN, CodeSettings, ModelSettings, PlaceSettings, ScaleSettings
from mafrt.scripts.cli.stage import Stage
from mafrt.scripts.cli.train import train

if TYPE_CHECKING:
    from mafrt.config.team import Team
    from mafrt.envs.code import CodeEnv, CodeTask


COMMAND = Command(
    "train_code",
    "Train a Coder, alone or with a Tester, to write programs; the outcome is the fraction of tests that pass.",
    (CodeSettings, ModelSettings, PlaceSettings, ScaleSettings, *TRAIN),
    defaults={"profile_path": "profiles/code_single.json"},
)


def prepare(settings: Settings) -> Stage:
    """Problems, team and sandbox, checked before the model is loaded."""
    from mafrt.envs.code.tasks import SETS

    team = load_team(settings)
    assert team is not None
    tasks, held_out = problems(settings.values)
    notes = []
    if settings["dataset_path"] not in SETS and settings["eval_dataset_path"] is None:
        kept = f"the last {len(held_out)} are held out" if held_out else "too few to hold any out: they serve for both"
        notes.append(f"Training on {len(tasks)} problems of {settings['dataset_path']}; for evaluation, {kept}.")
    shared = {task.statement for task in tasks} & {task.statement for task in held_out}
    if shared:
        notes.append(
            f"Careful: {len(shared)} statements stand in both sets, so the evaluation shows in part what was learnt by "
            "heart."
        )
    env = code_env(settings.values, tasks, team)
    eval_env = code_env(settings.values, held_out, team) if held_out else None
    return Stage(env, eval_env, team_for(env, team, settings["n_agents"]), "code", tuple(notes))


def code_env(settings: Mapping[str, Any], tasks: Sequence[CodeTask], team: Team | None) -> CodeEnv:
    """The environment that the settings describe, on these tasks."""
    from mafrt.envs.code import CodeEnv

    return CodeEnv(
        tasks=tasks,
        team=team,
        turns=settings["coder_turns"],
        reviews=settings["reviews"],
        sandbox=settings["sandbox"],
        timeout_s=settings["program_timeout"],
        memory_mib=settings["program_memory"],
    )


def problems(settings: Mapping[str, Any]) -> tuple[Sequence[CodeTask], Sequence[CodeTask]]:
    """Problems to train on and held-out problems; there are none of the latter if the file is too small."""
    from mafrt.envs.code.tasks import SETS, load_tasks

    source, held_out = settings["dataset_path"], settings.get("eval_dataset_path")
    tasks = load_tasks(source)
    if held_out is not None:
        return tasks, load_tasks(held_out, split="test")
    if source in SETS:
        return tasks, load_tasks(source, split="test")
    return hold_out(tasks)


def main(argv: Sequence[str] | None = None) -> int:
    return run_main(lambda words: train(COMMAND, words, prepare), argv)


if __name__ == "__main__":
    sys.exit(main())
