"""What the miniatures share: arms times seeds on the shipped base, a table, and a figure."""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mafrt.config import TrainConfig
from mafrt.seeding import seed_of

if TYPE_CHECKING:
    from mafrt.env import Env
    from mafrt.runners.on_policy import OnPolicy

BASE: Mapping[str, Any] = {
    "n_rollout_threads": 64,
    "max_new_tokens": 48,
    "lr": 3e-3,
    "ppo_epoch": 1,
    "eval_episodes": 0,
    "save_interval": 0,
}
COLOURS = ("#0b6e99", "#d9480f", "#5c7a29", "#7048a8")


@dataclass
class Run:
    """One arm with one seed."""

    before: float
    """mean held-out score, sampled"""
    after: float
    metrics: list[dict[str, float]] = field(default_factory=list)
    """of every iteration"""
    runner: OnPolicy | None = None


def parse(argv: Sequence[str] | None, doc: str, iterations: int) -> argparse.Namespace:
    """The arguments of a miniature."""
    parser = argparse.ArgumentParser(description=doc, allow_abbrev=False)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--iterations", type=int, default=iterations, help="of every run")
    parser.add_argument("--tasks", type=int, default=128, help="held-out tasks")
    parser.add_argument("--threads", type=int, default=0, help="threads of torch; 0 leaves its default")
    parser.add_argument("--output", type=Path, default=Path("runs/reproduce"), help="folder of table and figure")
    args = parser.parse_args(argv)
    import torch

    from mafrt.memory import keep_freed_memory

    keep_freed_memory()
    if args.threads:
        torch.set_num_threads(args.threads)
    return args


def worth(runner: OnPolicy, held_out: Env, tasks: int, seed: int) -> float:
    """Mean score of two sampled episodes per held-out task."""
    from mafrt.runners.evaluation import evaluate

    found = evaluate(held_out, runner.player, tasks=tasks, samples=2, greedy=False, seed=seed_of(seed, "reproduce"))
    assert found is not None and found.avg is not None
    return found.avg


def train(args: argparse.Namespace, seed: int, env: Env | None = None, **settings: Any) -> Run:
    """Train the Reasoner -> Actor team once, evaluated on held-out problems before and after."""
    from mafrt.envs.math import MathEnv
    from mafrt.policy import SharedBase
    from mafrt.runners.on_policy import OnPolicy, Progress
    from mafrt.signals import StopRequest
    from mafrt.team import Team

    team = Team.load(Path(__file__).parents[2] / "profiles" / "quickstart.json")
    config = TrainConfig.of(**{**BASE, "iterations": args.iterations, "seed": seed, **settings})
    runner = OnPolicy(env or MathEnv(team=team), team, SharedBase.load("teaching-base"), config)
    runner.stop = StopRequest()
    held_out = MathEnv(team=team, split="test")
    found = Run(worth(runner, held_out, args.tasks, seed), 0.0, runner=runner)

    def keep(progress: Progress) -> None:
        found.metrics.append(dict(progress.metrics))

    runner.progress = keep
    runner.run()
    found.after = worth(runner, held_out, args.tasks, seed)
    return found


def spread(values: Sequence[float]) -> str:
    """`mean (least to most)`."""
    return f"{statistics.fmean(values):.3f} ({min(values):.3f} to {max(values):.3f})"


def report(args: argparse.Namespace, name: str, claim: str, table: str, figure: str, verdict: str, facts: Any) -> None:
    """Write NAME.md, NAME.svg and NAME.json, and print the text."""
    args.output.mkdir(parents=True, exist_ok=True)
    text = f"# {name}\n\n**Claim.** {claim}\n\n{table}\n\n![{name}]({name}.svg)\n\n**Here.** {verdict}\n"
    (args.output / f"{name}.md").write_text(text, encoding="utf-8")
    (args.output / f"{name}.svg").write_text(figure, encoding="utf-8")
    (args.output / f"{name}.json").write_text(json.dumps(facts, indent=1), encoding="utf-8")
    print(f"{table}\n\n{verdict}\n\nTable, figure and numbers are in {args.output}/{name}.*")


def curves(title: str, arms: Mapping[str, Sequence[Sequence[float]]], ylabel: str) -> str:
    """An SVG line chart: per arm the curves of its seeds (thin) and their mean (thick), over iterations."""
    width, height, left, top, right, bottom = 640, 360, 60, 40, 20, 50
    every = [value for runs in arms.values() for run in runs for value in run]
    longest = max(len(run) for runs in arms.values() for run in runs)
    low, high = min(0.0, min(every)), max(every) or 1.0

    def x(step: int) -> float:
        return left + (width - left - right) * step / max(longest - 1, 1)

    def y(value: float) -> float:
        return height - bottom - (height - top - bottom) * (value - low) / (high - low or 1.0)

    def line(values: Sequence[float], colour: str, stroke: float, opacity: float) -> str:
        points = " ".join(f"{x(i):.1f},{y(v):.1f}" for i, v in enumerate(values))
        style = f'fill="none" stroke="{colour}" stroke-width="{stroke}" opacity="{opacity}"'
        return f'<polyline points="{points}" {style}/>'

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
        'font-size="12">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<text x="{left}" y="22" font-size="15">{title}</text>',
        f'<text x="{(width + left) / 2}" y="{height - 12}" text-anchor="middle">iteration</text>',
        f'<text x="16" y="{height / 2}" transform="rotate(-90 16 {height / 2})" text-anchor="middle">{ylabel}</text>',
    ]
    for tick in range(5):
        value = low + (high - low) * tick / 4
        parts.append(f'<line x1="{left}" x2="{width - right}" y1="{y(value):.1f}" y2="{y(value):.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{left - 6}" y="{y(value) + 4:.1f}" text-anchor="end">{value:.2f}</text>')
    for number, (name, runs) in enumerate(arms.items()):
        colour = COLOURS[number % len(COLOURS)]
        parts += [line(run, colour, 1, 0.35) for run in runs]
        shortest = min(map(len, runs))
        parts.append(line([statistics.fmean(run[i] for run in runs) for i in range(shortest)], colour, 2.5, 1))
        parts.append(
            f'<text x="{width - right}" y="{top + 4 + 16 * number}" text-anchor="end" fill="{colour}">{name}</text>'
        )
    return "\n".join([*parts, "</svg>\n"])


def compare(
    args: argparse.Namespace, arms: Mapping[str, Callable[[int], Run]], of: str = "score"
) -> tuple[dict[str, list[Run]], dict[str, list[list[float]]]]:
    """Run every arm with every seed; returns the runs, and per arm the metric `of` over iterations."""
    runs: dict[str, list[Run]] = {}
    for name, make in arms.items():
        runs[name] = []
        for seed in args.seeds:
            run = make(seed)
            run.runner = None
            runs[name].append(run)
            print(f"{name}, seed {seed}: {run.before:.3f} -> {run.after:.3f}", flush=True)
    return runs, {name: [[m[of] for m in run.metrics] for run in found] for name, found in runs.items()}


def before_after(runs: Mapping[str, Sequence[Run]]) -> str:
    """A Markdown table of the arms: held-out score before and after, mean and range over the seeds."""
    lines = ["| arm | seeds | before | after |", "|---|---|---|---|"]
    lines += [
        f"| {name} | {len(found)} | {spread([r.before for r in found])} | {spread([r.after for r in found])} |"
        for name, found in runs.items()
    ]
    return "\n".join(lines)
