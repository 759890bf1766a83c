"""Train a Verifier, a Search agent and an Answer agent on questions: generated ones, or NQ and HotpotQA files."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial

from mafrt.core.errors import ConfigError
from mafrt.envs.search import build
from mafrt.envs.search.build import SearchSettings
from mafrt.envs.search.demonstrations import demonstrations
from mafrt.envs.workflows.config import FieldSettings, WorkflowSettings
from mafrt.scripts.cli.command import Command, Settings
from mafrt.scripts.cli.demonstrations import demonstrations_file, save_demonstrations
from mafrt.scripts.cli.loading import load_team, prepared_run
from mafrt.scripts.cli.recorded_run import PreparedRun
from mafrt.scripts.cli.run_main import run_main
from mafrt.scripts.cli.settings import TRAIN, ModelSettings, PlaceSettings, ScaleSettings
from mafrt.scripts.cli.train import train

COMMAND = Command(
    "train_search",
    "Train a team of agents, each with its own LoRA adapter on one frozen base, to answer questions by search.",
    (SearchSettings, FieldSettings, WorkflowSettings, ModelSettings, PlaceSettings, ScaleSettings, *TRAIN),
    defaults={"profile_path": "profiles/search.json", "workflow": "search", "horizon": 4},
)


def prepare(settings: Settings) -> PreparedRun:
    """Questions, retriever, workflow and team, checked before the model is loaded."""
    return prepared_run(build.build, settings, load_team(settings), build.NAME)


def write_demonstrations(settings: Settings) -> int:
    """Play demonstrations, write them as JSON lines, and print the next command."""
    path = demonstrations_file(settings)
    episodes = settings["demonstration_episodes"]
    if settings["dataset_path"] is not None or settings["workflow"] != "search":
        raise ConfigError("demonstrations are of the generated questions; leave --dataset_path and --workflow out.")
    team = load_team(settings)
    given = {name: settings[name] for name in ("topk", "horizon", "sees") if settings[name] is not None}
    records = demonstrations(episodes, settings["seed"], team=team, **given)
    save_demonstrations(path, records)
    return 0


def run(argv: Sequence[str]) -> int:
    settings = COMMAND.read(argv)
    if settings["demonstrations"] is not None:
        return write_demonstrations(settings)
    return train(COMMAND, argv, prepare)


main = partial(run_main, run)

if __name__ == "__main__":
    sys.exit(main())
