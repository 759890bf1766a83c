"""Teams of other frameworks, trained as they are: LangGraph and the OpenAI Agents SDK, an adapter per agent.

Each example of `examples/` is trained with the quickstart's base and problems, unchanged but for `base_url`, and
evaluated on held-out problems before and after. A run that is in the output folder is not made again.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import mafrt.envs.math
from bench._tables import over_seeds
from bench.reproduce._commands import run, tabled
from mafrt.core.errors import ConfigError
from mafrt.core.shipped import SHIPPED
from mafrt.scripts import train

COLUMNS = ("before", "after", "greedy_before", "greedy_after")
"""Of summary.json: mean held-out score of two sampled answers, and of the greedy one."""
SETTINGS = ("--n_rollout_threads", 64, "--max_new_tokens", 48, "--lr", 0.003, "--eval_samples", 2)
"""Of every run; those of the command in each example."""


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--examples", type=Path, default=Path("examples"), help="folder of the programs")
    parser.add_argument("--programs", nargs="+", default=["langgraph_team", "openai_agents"], help="their names")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--iterations", type=int, default=10, help="of every run")
    parser.add_argument("--tasks", type=int, default=50, help="held-out problems")
    parser.add_argument("--threads", type=int, default=1, help="torch threads")
    parser.add_argument("--output", type=Path, default=Path("runs/reproduce/programs"))
    args = parser.parse_args(argv)
    for name in args.programs:
        if not (args.examples / f"{name}.py").is_file():
            raise ConfigError(f"There is no {args.examples / name}.py; give the folder of the programs by --examples.")
    return args


def trained(args: argparse.Namespace, program: str, seed: int) -> dict[str, float]:
    """The summary of one run."""
    folder: Path = args.output / f"{program}_{seed}"
    if not (folder / "summary.json").is_file():
        data = Path(mafrt.envs.math.__file__).parent / "data"
        run(
            train.main, "--program", f"{args.examples / program}.py:run_episode", *SETTINGS,
            "--profile_path", SHIPPED / "profiles" / "quickstart_math.json", "--iterations", args.iterations,
            "--tasks_path", data / "word_problems_train.jsonl",
            "--eval_tasks_path", data / "word_problems_test.jsonl", "--eval_episodes", args.tasks,
            "--seed", seed, "--threads", args.threads, "--run_dir", folder, "--set_aside",
        )  # fmt: skip
    summary: dict[str, float] = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    return summary


def table(results: Mapping[str, Sequence[Mapping[str, float]]]) -> str:
    """Markdown: a row for each program; in `gain`, differences within a seed."""
    heads = ("example", "seeds", "sampled before", "sampled after", "greedy before", "greedy after", "gain, sampled")
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for name, summaries in results.items():
        cells = [over_seeds([summary[column] for summary in summaries]) for column in COLUMNS]
        gain = over_seeds([summary["after"] - summary["before"] for summary in summaries])
        lines.append(f"| {name}.py | {len(summaries)} | {' | '.join(cells)} | {gain} |")
    return "\n".join(lines)


def experiment(args: argparse.Namespace) -> str:
    return table({program: [trained(args, program, seed) for seed in args.seeds] for program in args.programs})


main = partial(tabled, parse=parse, make=experiment)


if __name__ == "__main__":
    sys.exit(main(None))
