"""Is the gain of the quickstart of word problems more than a better way to read the untrained base?

Trains it, and compares it on its held-out problems with the rivals of `mafrt evaluate --baselines`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from bench.reproduce._commands import run
from mafrt.core.shipped import SHIPPED
from mafrt.scripts import evaluate, train_math

CONFIG = SHIPPED / "configs" / "quickstart_math.yaml"


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--tasks", type=int, default=256, help="held-out problems")
    parser.add_argument("--iterations", type=int, default=30, help="128 episodes each")
    parser.add_argument("--votes", type=int, default=32, help="sampled answers of the majority vote")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--output", type=Path, default=Path("runs/reproduce/quickstart_math_baselines"))
    return parser.parse_args(argv)


def measured(args: argparse.Namespace) -> list[Mapping[str, str | float | None]]:
    """The rows of `--baselines` for the quickstart's run, which is trained if it is not there."""
    folder, numbers = args.output / "trained", args.output / "numbers.json"
    if not (folder / "summary.json").is_file():
        words = ("--config", CONFIG, "--iterations", args.iterations, "--seed", args.seed, "--eval_episodes", 0)
        run(train_math.main, *words, "--run_dir", folder, makes=folder / "summary.json")
    if not numbers.is_file():
        words = ("--load_path", folder, "--tasks", args.tasks, "--k", 4, "--seed", args.seed)
        run(evaluate.main, *words, "--baselines", "--baseline_votes", args.votes, "--output", numbers)
    rows: list[Mapping[str, str | float | None]] = json.loads(numbers.read_text(encoding="utf-8"))["baselines"]
    return rows


def table(rows: Sequence[Mapping[str, str | float | None]]) -> str:
    def cell(value: str | float | None) -> str:
        return "" if value is None else f"{value:.3f}" if isinstance(value, float) else str(value)

    lines = ["| team | sampled | greedy |", "|---|---|---|"]
    return "\n".join(lines + [f"| {' | '.join(cell(value) for value in row.values())} |" for row in rows])


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    args.output.mkdir(parents=True, exist_ok=True)
    text = table(measured(args))
    (args.output / "table.md").write_text(text + "\n", encoding="utf-8")
    print(text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
