"""Process rewards on DSBench (multiagent-coaching, 2601.23228): Data Engineer, Modeler, Analyst on held-out tasks.

The shipped base first imitates short programs, of which every second is a careless one (configs/dsbench_start.yaml).
From there the team is trained on the eighteen built-in tasks with the settings of configs/dsbench.yaml: with
`--coach rules`, with the outcome alone, and with every agent frozen. The eight held-out tasks are played along the way.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.reproduce._experiment import LearningCurve, by_episodes, parse, report, spread, trace
from bench.reproduce._figure import curves
from mafrt.config.team import Team
from mafrt.config.train_config import TrainConfig
from mafrt.core.seeding import seed_of
from mafrt.core.shipped import SHIPPED
from mafrt.envs.dsbench import DSBenchEnv
from mafrt.runners.evaluation import EvaluationPlan, evaluate
from mafrt.runners.identity import Provenance
from mafrt.runners.on_policy import OnPolicy
from mafrt.scripts import train_dsbench, train_sft
from mafrt.scripts.cli.values import read_yaml
from mafrt.storage import load_path

if TYPE_CHECKING:
    from mafrt.envs.dsbench import DSBenchEnv
    from mafrt.runners.on_policy import OnPolicy

CLAIM = (
    "Scores for every turn, from the environment's own checks, raise the success rate of the team on held-out tasks."
)
CONFIGS = SHIPPED / "configs"
ARMS: Mapping[str, Mapping[str, Any]] = {
    "rules": {},
    "outcome only": {"coach": "none"},
    "frozen": {"freeze": ("all",), "iterations": 1},
}
EVERY, SAMPLES = 4, 8
"""Iterations between evaluations, and episodes of each held-out task in one."""


@dataclass
class SuccessCurve(LearningCurve):
    """Learning curve on held-out tasks."""

    success: list[float] = field(default_factory=list)
    """share of held-out episodes with a valid submission"""
    score: list[float] = field(default_factory=list)
    """their mean normalised score"""
    cpu_seconds: float = 0.0
    """of this process and of the programs that it ran, evaluations included"""


def warm_start(folder: Path) -> Path:
    """The adapters that imitate; made if they are not there."""
    adapters = folder / "start" / "adapters"
    if not adapters.is_dir():
        records = folder / "demonstrations.jsonl"
        made = train_dsbench.main(["--config", str(CONFIGS / "dsbench.yaml"), "--demonstrations", str(records)])
        words = ["--config", str(CONFIGS / "dsbench_start.yaml"), "--records_path", str(records)]
        if made or train_sft.main([*words, "--run_dir", str(folder / "start")]):
            raise SystemExit(2)
    return adapters


def config() -> dict[str, Any]:
    """Content of configs/dsbench.yaml."""
    return dict(read_yaml(CONFIGS / "dsbench.yaml"))


def settings(iterations: int) -> dict[str, Any]:
    """Settings of configs/dsbench.yaml that the runner reads."""
    known = TrainConfig().flat()
    known_settings = {name: value for name, value in config().items() if name in known}
    return {**known_settings, "stratify": "data_type", "iterations": iterations, "eval_episodes": 0, "save_interval": 0}


def look(runner: OnPolicy, held_out: DSBenchEnv, tasks: int, seed: int, curve: SuccessCurve) -> None:
    """Play held-out tasks with fixed seeds and append the scores to `curve`."""
    plan = EvaluationPlan(tasks, SAMPLES, greedy=False, seed=seed_of(seed, "reproduce"))
    evaluation = evaluate(held_out, runner.player, plan)
    assert evaluation is not None and evaluation.avg is not None
    curve.success.append(evaluation.measures["success"])
    curve.score.append(evaluation.avg)


def train(
    args: argparse.Namespace, seed: int, arm: Mapping[str, Any], env: DSBenchEnv, held_out: DSBenchEnv, start: Path
) -> SuccessCurve:
    """Train once, evaluated before, along the way and after."""
    from mafrt.models.shared_base import SharedBase

    used = _cpu()
    team = Team.load(CONFIGS.parent / "profiles" / "dsbench_brief.json")
    chosen = TrainConfig.of(**{**settings(args.iterations), "seed": seed, **arm})
    initial = Provenance(load_path.resolve(start))
    runner = OnPolicy(env, team, SharedBase.load("teaching-base"), chosen, eval_env=held_out, provenance=initial)
    curve = SuccessCurve()
    trace(runner, curve, lambda: look(runner, held_out, args.tasks, seed, curve), EVERY)
    curve.cpu_seconds = _cpu() - used
    return curve


def _cpu() -> float:
    return sum(
        usage.ru_utime + usage.ru_stime
        for usage in (resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN))
    )


def table(arms: Mapping[str, Sequence[SuccessCurve]]) -> str:
    """Success rate and normalised score by episodes, mean and range over the seeds."""
    learning = {name: runs for name, runs in arms.items() if name != "frozen"}
    columns = {
        f"{name}: {what}": [getattr(run, what) for run in runs] for name, runs in learning.items() for what in SHOWN
    }
    lines = by_episodes(next(iter(learning.values()))[0].episodes, columns)
    if "frozen" in arms:
        cells = [spread([getattr(run, what)[-1] for run in arms["frozen"]]) for what in SHOWN]
        lines += ["", f"Frozen, the team stays at success {cells[0]}, score {cells[1]}."]
    return "\n".join(lines)


SHOWN = ("success", "score")


def verdict(arms: Mapping[str, Sequence[SuccessCurve]]) -> str:
    """Whether the claim holds, seed by seed."""
    rules, others = arms["rules"], arms["outcome only"]
    rises = [run.success[-1] - run.success[0] for run in rules]
    ahead = sum(
        statistics.fmean(a.success[1:]) > statistics.fmean(b.success[1:]) for a, b in zip(rules, others, strict=True)
    )
    seconds = [run.train_seconds for run in rules]
    return (
        f"{'Holds' if min(rises) > 0.1 else 'Does not hold for every seed'}: process rewards raise the success rate "
        f"by {spread(rises)}; over the whole of training it lies above that of the outcome alone in {ahead} of "
        f"{len(rules)} seeds. A run with process rewards took {spread([s / 60 for s in seconds])} minutes of training "
        f"and {spread([run.cpu_seconds / 60 for run in rules])} minutes of processor time in all but the sandbox."
    )


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv, __doc__ or "", iterations=12)
    start = warm_start(args.output / "dsbench")
    style, turns = config()["style"], config()["agent_turns"]
    env, held_out = DSBenchEnv(style=style, turns=turns), DSBenchEnv(split="eval", style=style, turns=turns)
    arms: dict[str, list[SuccessCurve]] = {name: [] for name in ARMS}
    for seed in args.seeds:
        for name, arm in ARMS.items():
            began = time.perf_counter()
            # Sibling environments share the results of programs, so later arms do not run them again.
            curve = train(args, seed, arm, env.spawn(), held_out.spawn(), start)
            arms[name].append(curve)
            shown = " ".join(f"{value:.2f}" for value in curve.success)
            print(
                f"{name}, seed {seed}: success {shown}; score {curve.score[0]:.2f} -> {curve.score[-1]:.2f} "
                f"({curve.train_seconds:.0f} s of training, {time.perf_counter() - began:.0f} s in all)",
                flush=True,
            )
    lines = {name: [run.success for run in runs] for name, runs in arms.items() if name != "frozen"}
    steps = arms["rules"][0].episodes
    figure = curves("DSBench, held-out tasks", lines, "success rate", xlabel="episodes played", steps=steps)
    facts = {name: [vars(curve) for curve in runs] for name, runs in arms.items()}
    report(args, "dsbench_process_rewards", CLAIM, table(arms), figure, verdict(arms), facts)
    return 0


if __name__ == "__main__":
    sys.exit(main())
