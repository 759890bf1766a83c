"""Shared code of the miniature experiments: arms times seeds on the shipped base, a table, result files."""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.learn import COMMON, whole_or_nothing
from bench.reproduce._figure import need_matplotlib
from mafrt.config.team import Team
from mafrt.config.train_config import TrainConfig
from mafrt.core.seeding import seed_of
from mafrt.core.shipped import SHIPPED
from mafrt.core.signals import StopRequest
from mafrt.cpu.malloc import keep_freed_memory
from mafrt.envs.math import MathEnv
from mafrt.runners.evaluation import EvaluationPlan, evaluate
from mafrt.runners.loop import Progress
from mafrt.runners.on_policy import OnPolicy

if TYPE_CHECKING:
    from mafrt.config.team import Team
    from mafrt.environment.base import Env
    from mafrt.runners.on_policy import OnPolicy


@dataclass
class SeedRun:
    """One arm with one seed."""

    before: float
    """mean held-out score, sampled"""
    after: float
    metrics: list[dict[str, float]] = field(default_factory=list)
    """of every iteration"""
    runner: OnPolicy | None = None


@dataclass
class LearningCurve:
    """One arm with one seed, at each evaluation; subclasses add the measured values."""

    episodes: list[int] = field(default_factory=list)
    """played before each evaluation"""
    train_seconds: float = 0.0
    """without evaluations"""


def trace(runner: OnPolicy, curve: LearningCurve, look: Callable[[], None], every: int) -> None:
    """Train to the end, and call `look` before, every `every` iterations, and after."""
    iterations, episodes = runner.config.run.iterations, runner.config.play.n_rollout_threads

    def follow(progress: Progress) -> None:
        curve.train_seconds += progress.seconds
        if progress.iteration % every == 0 or progress.iteration == iterations:
            curve.episodes.append(progress.iteration * episodes)
            look()

    curve.episodes.append(0)
    look()
    runner.stop = StopRequest()
    whole_or_nothing(runner.run(follow), iterations)


def parse(argv: Sequence[str] | None, doc: str, iterations: int) -> argparse.Namespace:
    """The arguments of a miniature."""
    parser = argparse.ArgumentParser(description=doc, allow_abbrev=False)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--iterations", type=int, default=iterations, help="of every run")
    parser.add_argument("--tasks", type=int, default=128, help="held-out tasks")
    parser.add_argument("--threads", type=int, default=0, help="threads of torch; 0 leaves its default")
    parser.add_argument("--output", type=Path, default=Path("runs/reproduce"), help="folder of table and figure")
    args = parser.parse_args(argv)
    need_matplotlib()
    import torch

    keep_freed_memory()
    if args.threads:
        torch.set_num_threads(args.threads)
    return args


def worth(runner: OnPolicy, held_out: Env, tasks: int, seed: int) -> float:
    """Mean score of two sampled episodes per held-out task."""
    plan = EvaluationPlan(tasks, samples=2, greedy=False, seed=seed_of(seed, "reproduce"))
    evaluation = evaluate(held_out, runner.player, plan)
    assert evaluation is not None and evaluation.avg is not None
    return evaluation.avg


def train(
    args: argparse.Namespace,
    seed: int,
    env: Env | None = None,
    *,
    team: Team | None = None,
    held_out: Env | None = None,
    **settings: Any,
) -> SeedRun:
    """Train a team once, evaluated on held-out problems before and after; by default Reasoner -> Actor, a chain."""
    from mafrt.models.shared_base import SharedBase

    team = team or Team.load(SHIPPED / "profiles" / "quickstart_math.json")
    config = TrainConfig.of(**{**COMMON, "iterations": args.iterations, "seed": seed, **settings})
    runner = OnPolicy(env or MathEnv(team=team), team, SharedBase.load("teaching-base"), config)
    runner.stop = StopRequest()
    held_out = held_out or MathEnv(team=team, split="test")
    result = SeedRun(worth(runner, held_out, args.tasks, seed), 0.0, runner=runner)

    def keep(progress: Progress) -> None:
        result.metrics.append(dict(progress.metrics))

    whole_or_nothing(runner.run(keep), config.run.iterations)
    result.after = worth(runner, held_out, args.tasks, seed)
    return result


def spread(values: Sequence[float]) -> str:
    """`mean (least to most)`."""
    return f"{statistics.fmean(values):.3f} ({min(values):.3f} to {max(values):.3f})"


def by_episodes(episodes: Sequence[int], columns: Mapping[str, Sequence[Sequence[float]]]) -> list[str]:
    """Lines of a Markdown table: of each column, a curve per seed, mean and range at every evaluation."""
    lines = [f"| episodes | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    for at, played in enumerate(episodes):
        cells = [spread([curve[at] for curve in seeds]) for seeds in columns.values()]
        lines.append(f"| {played} | {' | '.join(cells)} |")
    return lines


def report(args: argparse.Namespace, name: str, claim: str, table: str, figure: str, verdict: str, facts: Any) -> None:
    """Write NAME.md, NAME.svg and NAME.json, and print the text."""
    args.output.mkdir(parents=True, exist_ok=True)
    text = f"# {name}\n\n**Claim.** {claim}\n\n{table}\n\n![{name}]({name}.svg)\n\n**Here.** {verdict}\n"
    (args.output / f"{name}.md").write_text(text, encoding="utf-8")
    (args.output / f"{name}.svg").write_text(figure, encoding="utf-8")
    (args.output / f"{name}.json").write_text(json.dumps(facts, indent=1), encoding="utf-8")
    print(f"{table}\n\n{verdict}\n\nTable, figure and numbers are in {args.output}/{name}.*")


def compare(
    args: argparse.Namespace, arms: Mapping[str, Callable[[int], SeedRun]], of: str = "score"
) -> tuple[dict[str, list[SeedRun]], dict[str, list[list[float]]]]:
    """Run every arm with every seed; returns the runs, and per arm the metric `of` over iterations."""
    runs: dict[str, list[SeedRun]] = {}
    for name, make in arms.items():
        runs[name] = []
        for seed in args.seeds:
            run = make(seed)
            run.runner = None
            runs[name].append(run)
            print(f"{name}, seed {seed}: {run.before:.3f} -> {run.after:.3f}", flush=True)
    return runs, {name: [[m[of] for m in run.metrics] for run in arm_runs] for name, arm_runs in runs.items()}


def before_after(runs: Mapping[str, Sequence[SeedRun]]) -> str:
    """A Markdown table of the arms: held-out score before and after, mean and range over the seeds."""
    lines = ["| arm | seeds | before | after |", "|---|---|---|---|"]
    lines += [
        f"| {name} | {len(arm_runs)} | {spread([r.before for r in arm_runs])} | {spread([r.after for r in arm_runs])} |"
        for name, arm_runs in runs.items()
    ]
    return "\n".join(lines)
