"""Train a Data Engineer, a Modeler and an Analyst on tabular tasks: built-in ones, or DSBench as it lies on disk."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from mafrt.core.errors import ConfigError
from mafrt.envs.dsbench import build
from mafrt.envs.dsbench.build import DsbenchSettings
from mafrt.envs.dsbench.builtin import builtin_tasks
from mafrt.envs.dsbench.demonstrations import demonstrations
from mafrt.envs.dsbench.env import REFUSED
from mafrt.envs.dsbench.records import Loaded
from mafrt.envs.dsbench.roles import ROLES
from mafrt.scripts.cli.command import Command, Settings
from mafrt.scripts.cli.demonstrations import demonstrations_file, save_demonstrations
from mafrt.scripts.cli.loading import load_team, prepared_run
from mafrt.scripts.cli.recorded_run import PreparedRun
from mafrt.scripts.cli.run_main import run_main
from mafrt.scripts.cli.settings import TRAIN, ModelSettings, PlaceSettings, ScaleSettings
from mafrt.scripts.cli.train import train

COMMAND = Command(
    "train_dsbench",
    "Train three agents to solve tabular modelling tasks by programs that run in one workspace.",
    (DsbenchSettings, ModelSettings, PlaceSettings, ScaleSettings, *TRAIN),
    defaults={"profile_path": "profiles/dsbench.json", "stratify": "data_type", "max_new_tokens": 4096},
    refused=REFUSED,
    epilog="Without --data_root or --dataset_path, 26 built-in tasks are made: 18 to train on, 8 held out.",
)


def prepare(settings: Settings) -> PreparedRun:
    """Tasks, sandbox and team, checked before the model is loaded."""
    team = load_team(settings)
    if team is not None and set(team.names) != set(ROLES):  # building the tasks takes seconds
        raise ConfigError(
            f"The team file has the agents {', '.join(team.names)}, but dsbench is played by {', '.join(ROLES)}; use "
            "the same names."
        )
    return prepared_run(build.build, settings, team, build.NAME)


def _told(name: str) -> None:
    print(f"reading {name}", file=sys.stderr)


def check(settings: Settings) -> int:
    """Validate the data and print a summary. Exit code 0, unless no task can be used."""
    values = settings.values
    if build.own_records(values) is None:
        sets = {split: (Path("built-in"), Loaded(builtin_tasks(split), ())) for split in ("train", "eval")}
    else:
        sets = build.load_all(values, _told if sys.stderr.isatty() else lambda name: None)
    usable = 0
    for split, (path, loaded) in sets.items():
        good, problems = build.fitting(loaded, values["workspace_mib"])
        usable += len(good)
        print(f"{split}: {path}: {len(good)} of {len(good) + len(problems)} tasks can be used")
        for task in good:
            answers = task.answers
            against = f"baseline {answers.baseline:.4g}"
            against += "" if answers.reference is None else f", reference {answers.reference:.4g}"
            targets = ", ".join(answers.targets[:3]) + (" ..." if len(answers.targets) > 3 else "")
            print(
                f"  {task.id}: {task.data_type or 'no data_type'}, {answers.metric.name} of {targets}, "
                f"{len(answers.ids)} test rows, {task.size_mib:.1f} MiB, {against}"
            )
            left_out = [name for index, name in enumerate(answers.targets) if index not in answers.scored]
            if left_out:
                print(f"    not scored, constant in the answers: {', '.join(left_out)}")
        for problem in problems:
            print(f"  PROBLEM {problem}")
        counted = {"data_type": [t.data_type or "none" for t in good], "metric": [t.answers.metric.name for t in good]}
        for what, names in counted.items() if good else ():
            print(f"  {what}: " + ", ".join(f"{name} {count}" for name, count in sorted(Counter(names).items())))
    return 0 if usable else 2


def write_programs(settings: Settings) -> int:
    """Play demonstrations, write them as JSON lines, and print the next command."""
    path = demonstrations_file(settings)
    episodes, seed = settings["demonstration_episodes"], settings["seed"]
    tasks, _, _ = build.read_tasks(settings.values)
    records = demonstrations(tasks, episodes, seed, settings["sandbox"], settings["agent_turns"])
    save_demonstrations(path, records)
    return 0


def run(argv: Sequence[str]) -> int:
    settings = COMMAND.read(argv)
    if settings["check"]:
        return check(settings)
    if settings["demonstrations"] is not None:
        return write_programs(settings)
    return train(COMMAND, argv, prepare)


main = partial(run_main, run)

if __name__ == "__main__":
    sys.exit(main())
