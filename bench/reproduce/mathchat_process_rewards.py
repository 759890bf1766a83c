"""Process rewards against the outcome alone (multiagent-coaching, 2601.23228): MathChat with a sandbox and a judge.

Both arms train the same team from the shipped base on the same problems, in the same order, with the settings of
configs/mathchat.yaml; one has `--coach rules`, the other `--coach none`. The team is evaluated on held-out problems
along the way.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from bench.reproduce._experiment import LearningCurve, by_episodes, parse, report, spread, trace
from bench.reproduce._figure import curves
from mafrt.config.team import Team
from mafrt.config.train_config import TrainConfig
from mafrt.core.seeding import seed_of
from mafrt.core.shipped import SHIPPED
from mafrt.envs.math import MathEnv
from mafrt.rollout.player import Start
from mafrt.runners.on_policy import OnPolicy
from mafrt.scripts.cli.values import read_yaml

if TYPE_CHECKING:
    from mafrt.environment.base import Env
    from mafrt.runners.on_policy import OnPolicy

CLAIM = "Scores for every turn teach the team faster than the verdict on its answer alone."
CONFIG = SHIPPED / "configs" / "mathchat.yaml"
ARMS: Mapping[str, Mapping[str, Any]] = {"rules": {}, "outcome only": {"coach": "none"}}
EVERY, SAMPLES = 2, 2
"""Iterations between evaluations, and episodes of each held-out task in one."""


@dataclass
class AccuracyCurve(LearningCurve):
    """Learning curve on held-out problems."""

    accuracy: list[float] = field(default_factory=list)
    """of the team, on held-out problems, sampled"""
    scores: list[dict[str, float]] = field(default_factory=list)
    """mean score that the rules give the turns of each agent there; they are asked in both arms, and paid in one"""
    wall_seconds: float = 0.0


def settings(iterations: int) -> dict[str, Any]:
    """Settings of configs/mathchat.yaml that the runner reads."""
    known = TrainConfig().flat()
    known_settings = {name: value for name, value in read_yaml(CONFIG).items() if name in known}
    return {**known_settings, "iterations": iterations, "eval_episodes": 0, "save_interval": 0}


def look(runner: OnPolicy, held_out: Env, tasks: int, seed: int, curve: AccuracyCurve) -> None:
    """Play the same held-out problems with fixed seeds and append the scores to `curve`."""
    queue = iter(
        Start(f"{task:04d}-{n}", f"{task:04d}", task, seed_of(seed, "reproduce", task, n), task=task)
        for task in range(tasks)
        for n in range(SAMPLES)
    )
    envs = [held_out.spawn() for _ in range(64)]
    episodes, stats = runner.player.play(envs, lambda slot, finished: next(queue, None))
    if stats.env_errors:
        raise stats.last_error or RuntimeError("episodes were lost")
    curve.accuracy.append(statistics.fmean(episode.outcome or 0.0 for episode in episodes))
    scores_by_agent: dict[str, list[float]] = {}
    for turn in (turn for episode in episodes for turn in episode.turns):
        if turn.evidence is not None and turn.evidence.rules is not None:
            scores_by_agent.setdefault(turn.agent, []).append(turn.evidence.rules.score)
    curve.scores.append({agent: statistics.fmean(scores) for agent, scores in scores_by_agent.items()})


def train(args: argparse.Namespace, seed: int, arm: Mapping[str, Any], every: int = EVERY) -> AccuracyCurve:
    """Train once, evaluated before, `every` so many iterations and after."""
    from mafrt.models.shared_base import SharedBase

    started = time.perf_counter()
    team = Team.load(CONFIG.parents[1] / "profiles" / "mathchat.json")
    config = TrainConfig.of(**{**settings(args.iterations), "seed": seed, **arm})
    held_out = MathEnv(team=team, split="test", workflow="mathchat")
    env = MathEnv(team=team, workflow="mathchat")
    runner = OnPolicy(env, team, SharedBase.load("teaching-base"), config)
    curve = AccuracyCurve()
    trace(runner, curve, lambda: look(runner, held_out, args.tasks, seed, curve), every)
    curve.wall_seconds = time.perf_counter() - started
    return curve


def table(arms: Mapping[str, Sequence[AccuracyCurve]]) -> str:
    """Accuracy by episodes, mean and range over the seeds, and the difference seed by seed."""
    rules, _ = arms.values()
    columns = {name: [curve.accuracy for curve in curves] for name, curves in arms.items()}
    pairs = zip(columns["rules"], columns["outcome only"], strict=True)
    columns["difference"] = [[a - b for a, b in zip(*pair, strict=True)] for pair in pairs]
    lines = by_episodes(rules[0].episodes, columns)
    lines += ["", f"| rules' score of the agent's turns | {' | '.join(arms)} |", "|---|---|---|"]
    for agent in rules[0].scores[0]:
        ends = (
            f"{spread([c.scores[0][agent] for c in curves])} -> {spread([c.scores[-1][agent] for c in curves])}"
            for curves in arms.values()
        )
        lines.append(f"| {agent} | {' | '.join(ends)} |")
    return "\n".join(lines)


def verdict(arms: Mapping[str, Sequence[AccuracyCurve]], iterations: int) -> str:
    """Whether the claim holds: by the mean height of the curve above its start, seed by seed."""
    rises = {name: [statistics.fmean(c.accuracy[1:]) - c.accuracy[0] for c in curves] for name, curves in arms.items()}
    ends = {name: [c.accuracy[-1] - c.accuracy[0] for c in curves] for name, curves in arms.items()}
    rules, outcome = rises.values()
    better = sum(a > b for a, b in zip(rules, outcome, strict=True))
    holds = better == len(rules) and min(ends["rules"]) > 0
    minutes = max(curve.wall_seconds for curves in arms.values() for curve in curves) / 60
    return (
        f"{'Holds' if holds else 'Does not hold for every seed'}: over the whole of training the accuracy lies "
        f"{statistics.fmean(rules):.3f} above its start with process rewards and {statistics.fmean(outcome):.3f} with "
        f"the outcome alone ({better} of {len(rules)} seeds rise more with them); at the end it has risen by "
        f"{statistics.fmean(ends['rules']):.3f} and {statistics.fmean(ends['outcome only']):.3f}. A run of "
        f"{iterations} iterations took at most {minutes:.1f} minutes, evaluations included."
    )


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv, __doc__ or "", iterations=10)
    arms: dict[str, list[AccuracyCurve]] = {name: [] for name in ARMS}
    for seed in args.seeds:
        for name, arm in ARMS.items():
            curve = train(args, seed, arm)
            arms[name].append(curve)
            shown = " ".join(f"{value:.3f}" for value in curve.accuracy)
            print(f"{name}, seed {seed}: {shown} ({curve.train_seconds:.0f} s of training)", flush=True)
    lines = {name: [curve.accuracy for curve in runs] for name, runs in arms.items()}
    steps = arms["rules"][0].episodes
    figure = curves("MathChat on held-out problems", lines, "team accuracy", xlabel="episodes played", steps=steps)
    facts = {name: [vars(curve) for curve in runs] for name, runs in arms.items()}
    report(args, "mathchat_process_rewards", CLAIM, table(arms), figure, verdict(arms, args.iterations), facts)
    return 0


if __name__ == "__main__":
    sys.exit(main())
