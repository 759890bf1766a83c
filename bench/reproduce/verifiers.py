"""Environments of the package `verifiers`, trained as they are: two of one agent, and a team of two.

Each trains the shipped base on the taskset's training tasks, and plays its test tasks before and after. The package
has its own interpreter (docs/verifiers.md). A run that is in the output folder is not made
again; one that was stopped or killed goes on.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from bench.reproduce._commands import run, tabled
from bench.reproduce.programs import table
from mafrt.core.errors import ConfigError
from mafrt.scripts import train

ENVIRONMENTS = ("tests/verifiers_envs/one_turn.py", "tests/verifiers_envs/second_try.py", "examples/verifiers_team.py")
SETTINGS = (
    *("--algorithm", "dr_mas", "--n_rollout_threads", 64, "--n_samples", 8, "--max_new_tokens", 48, "--lr", 0.003),
    *("--eval_samples", 2, "--save_interval", 2),
)
"""Of every run; those of the command in the example."""


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--environments", type=Path, nargs="+", default=[Path(each) for each in ENVIRONMENTS])
    parser.add_argument("--env_python", default="vf/bin/python", help="interpreter with verifiers 0.4")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--iterations", type=int, default=12, help="of every run")
    parser.add_argument("--tasks", type=int, default=128, help="held-out tasks")
    parser.add_argument("--threads", type=int, default=1, help="torch threads")
    parser.add_argument("--output", type=Path, default=Path("runs/reproduce/verifiers"))
    args = parser.parse_args(argv)
    for path in args.environments:
        if not path.is_file():
            raise ConfigError(f"There is no {path}; give files of environments by --environments.")
    return args


def trained(args: argparse.Namespace, environment: Path, seed: int) -> dict[str, float]:
    """The summary of one run."""
    folder: Path = args.output / f"{environment.stem}_{seed}"
    summary = folder / "summary.json"
    if not summary.is_file():
        begun = (folder / "checkpoints").is_dir()
        new = (
            *("--env", f"verifiers:{environment}", *SETTINGS, "--iterations", args.iterations),
            *("--eval_episodes", args.tasks, "--seed", seed, "--run_dir", folder),
        )
        words = ("--load_path", folder) if begun else new
        run(train.main, *words, "--env_python", args.env_python, "--threads", args.threads, makes=summary)
    found: dict[str, float] = json.loads(summary.read_text(encoding="utf-8"))
    return found


def experiment(args: argparse.Namespace) -> str:
    return table({each.stem: [trained(args, each, seed) for seed in args.seeds] for each in args.environments})


main = partial(tabled, parse=parse, make=experiment)


if __name__ == "__main__":
    sys.exit(main(None))
