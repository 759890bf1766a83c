"""Train a Coder, a Coder and a Tester, or any team, to write programs: HumanEval-, MBPP- or APPS-style JSONL."""

from __future__ import annotations

import sys
from functools import partial

from mafrt.envs.code import build
from mafrt.envs.code.build import CodeSettings
from mafrt.envs.code.by_workflow import CODER_TESTER
from mafrt.envs.workflows.config import WorkflowSettings
from mafrt.scripts.cli.command import Command, Settings
from mafrt.scripts.cli.loading import load_team, prepared_run
from mafrt.scripts.cli.recorded_run import PreparedRun
from mafrt.scripts.cli.run_main import run_main
from mafrt.scripts.cli.settings import TRAIN, ModelSettings, PlaceSettings, ScaleSettings
from mafrt.scripts.cli.train import train

COMMAND = Command(
    "train_code",
    "Train a team to write programs; the outcome is the fraction of tests that pass.",
    (CodeSettings, WorkflowSettings, ModelSettings, PlaceSettings, ScaleSettings, *TRAIN),
    defaults={"profile_path": "profiles/code_single.json", "workflow": CODER_TESTER},
)


def prepare(settings: Settings) -> PreparedRun:
    """Problems, team and sandbox, checked before the model is loaded."""
    return prepared_run(build.build, settings, load_team(settings), build.NAME)


main = partial(run_main, lambda words: train(COMMAND, words, prepare))

if __name__ == "__main__":
    sys.exit(main())
