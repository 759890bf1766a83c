"""Train a team on tasks of your own: a data file, a reward function and a workflow. No class is needed."""

from __future__ import annotations

import sys
from functools import partial

from mafrt.envs.tasks import build
from mafrt.envs.tasks.build import TaskSettings
from mafrt.envs.workflows.config import FieldSettings, WorkflowSettings
from mafrt.scripts.cli.command import Command, Settings
from mafrt.scripts.cli.loading import guarded_run, load_team, prepared_run
from mafrt.scripts.cli.recorded_run import PreparedRun
from mafrt.scripts.cli.run_main import run_main
from mafrt.scripts.cli.settings import TRAIN, ModelSettings, PlaceSettings, ScaleSettings
from mafrt.scripts.cli.train import train

COMMAND = Command(
    "train_tasks",
    "Train a team of agents, each with its own LoRA adapter on one frozen base, on tasks that a function grades.",
    (TaskSettings, FieldSettings, WorkflowSettings, ModelSettings, PlaceSettings, ScaleSettings, *TRAIN),
)


def prepare(settings: Settings) -> PreparedRun:
    """Tasks, reward function, workflow and team, checked before the model is loaded."""
    run = prepared_run(build.build, settings, load_team(settings), build.NAME)
    return guarded_run(run, settings["env_timeout_s"])


main = partial(run_main, lambda words: train(COMMAND, words, prepare))

if __name__ == "__main__":
    sys.exit(main())
