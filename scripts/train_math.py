"""Train a team to solve math problems: the shipped word problems, or MATH, GSM8K, AIME, AMC files as they are."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import partial
from typing import Any

from mafrt.envs.math import build
from mafrt.envs.math.build import MathSettings
from mafrt.envs.workflows.config import FieldSettings, WorkflowSettings
from mafrt.envs.workflows.registry import team_file
from mafrt.scripts.cli.command import Command, Settings
from mafrt.scripts.cli.loading import load_team, prepared_run
from mafrt.scripts.cli.recorded_run import PreparedRun
from mafrt.scripts.cli.run_main import run_main
from mafrt.scripts.cli.settings import TRAIN, ModelSettings, PlaceSettings, ScaleSettings
from mafrt.scripts.cli.train import train


def _team(given: Mapping[str, Any]) -> dict[str, Any]:
    """The team that the workflow brings, unless one is named."""
    path = team_file(given["workflow"]) if "workflow" in given and "profile_path" not in given else None
    return {} if path is None else {"profile_path": path}


COMMAND = Command(
    "train_math",
    "Train a team of agents, each with its own LoRA adapter on one frozen base, to solve math problems.",
    (MathSettings, FieldSettings, WorkflowSettings, ModelSettings, PlaceSettings, ScaleSettings, *TRAIN),
    defaults={"profile_path": "profiles/quickstart_math.json"},
    follows=_team,
)


def prepare(settings: Settings) -> PreparedRun:
    """Problems, workflow and team, checked before the model is loaded."""
    return prepared_run(build.build, settings, load_team(settings), build.NAME)


main = partial(run_main, lambda words: train(COMMAND, words, prepare))

if __name__ == "__main__":
    sys.exit(main())
