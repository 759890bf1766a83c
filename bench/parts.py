"""Does the part that makes a rule decide anything? The same run with the part alive, and switched off.

Each part has a task on which it should matter (`bench._parts`), the same settings, iterations and
seeds on both sides, and one setting that differs. Score is the share of right words in 8 boxes x 16 sampled episodes
after training; the difference has a 95% interval by Student's t over seeds. A part decides if the interval lies above
0. Both sides sample about as many words. Fresh tasks for flat groups and replays without an agent cost more: those
sides play more.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from bench import _measure
from bench._measure import positive
from bench._parts import BOXES, Both, Helpers, Lazy, Search, Unpaid, Words, team
from mafrt.config.train_config import TrainConfig
from mafrt.core.seeding import seed_of
from mafrt.core.signals import StopRequest
from mafrt.models.shared_base import SharedBase
from mafrt.runners.evaluation import EvaluationPlan, evaluate
from mafrt.runners.intervals import seed_interval
from mafrt.runners.on_policy import OnPolicy
from mafrt.scripts.cli.strict_parser import StrictParser

COMMON: Mapping[str, Any] = {
    "n_rollout_threads": 64,
    "max_new_tokens": 1,
    "lr": 3e-3,
    "ppo_epoch": 1,
    "eval_episodes": 0,
    "save_interval": 0,
    "log_episodes": False,
}
DEAD = 1e-12
"""learning rate of a critic that does not learn"""


@dataclass(frozen=True)
class RulePart:
    """One part of a rule, its task, and the settings with and without it."""

    name: str
    task: str
    """of the table"""
    world: Mapping[str, Any]
    """arguments of `of`"""
    settings: Mapping[str, Any]
    alive: Mapping[str, Any] = field(default_factory=dict)
    dead: Mapping[str, Any] = field(default_factory=dict)
    iterations: int = 20
    of: type[Words] | type[Helpers] | type[Unpaid] | type[Lazy] | type[Both] | type[Search] = Words


CHAIN = {"size": 2, "rounds": 2}
LONG = {"size": 2, "rounds": 4}
SWAYED = {**CHAIN, "offset": 8.0}
SIX = {"size": 6, "rounds": 1, "together": True}
SWAYED_TEXT = "4 turns, paid at the end; half of the boxes add 8 whatever is said"
SIX_TEXT = "6 agents at once, told only their mean"
OWN = {"algorithm": "maporl", "round_gamma": 0.0, "outcome_weight": 0.0}
SHAKY = {"algorithm": "maporl", "outcome_weight": 1.0}
SHAKY_TEXT = "4 turns at once in 2 rounds, each paid by itself; half of the boxes add 8 to the outcome of all"
LAZY_TEXT = "6 turns, told their share of right words at the end; one word ends after 2 turns for half of it"
BOTH_TEXT = "2 agents at once, paid if both are right, and less if one alone is than if neither is"
AT_ONCE = {"size": 2, "rounds": 2, "together": True}
PARTS = {
    part.name: part
    for part in (
        RulePart("ppo: critic", SWAYED_TEXT, SWAYED, {"algorithm": "ppo"}, {"critic_lr": 3e-3}, {"critic_lr": DEAD}),
        RulePart(
            "mappo: critic", SWAYED_TEXT, SWAYED, {"algorithm": "mappo"}, {"critic_lr": 3e-3}, {"critic_lr": DEAD}
        ),
        RulePart(
            "reinforce_pp_baseline: mean of the problem",
            SWAYED_TEXT,
            SWAYED,
            {"outcome_to": "all"},
            {"algorithm": "reinforce_pp_baseline", "n_samples": 8},
            {"algorithm": "reinforce_pp"},
        ),
        RulePart(
            "reward of each turn",
            "8 turns; each paid by itself, or their mean at the end",
            LONG,
            {"algorithm": "reinforce_pp"},
            {"outcome_weight": 0.0},
            {"reward_weight": 0.0, "outcome_to": "all"},
        ),
        RulePart(
            "gigpo: turns from the same state",
            "8 turns, each paid by itself",
            LONG,
            {"algorithm": "gigpo", "n_samples": 8, "outcome_weight": 0.0},
            {"step_weight": 1.0},
            {"step_weight": 0.0},
        ),
        RulePart(
            "dapo: fresh tasks for flat groups",
            "4 turns; in 6 of 8 boxes every word is right",
            {**CHAIN, "fixed": 6},
            {"algorithm": "dapo", "n_samples": 4},
            {"dynamic_sampling_rounds": 4},
            {"dynamic_sampling_rounds": 0},
        ),
        RulePart(
            "c3: alternatives of a turn, played to the end",
            "6 turns, told only their mean at the end",
            {"size": 2, "rounds": 3},
            {},
            # About 84 words an episode against 6.
            {"algorithm": "c3", "tree_samples": 4, "n_rollout_threads": 8},
            {"algorithm": "grpo", "n_samples": 8, "n_rollout_threads": 112},
        ),
        RulePart(
            "at_grpo: alternatives from the same state",
            "8 turns, each paid by itself",
            LONG,
            {"algorithm": "at_grpo", "outcome_weight": 0.0},
            {"tree_samples": 4, "n_rollout_threads": 24},
            {"tree_samples": 1, "n_samples": 4, "n_rollout_threads": 96},
        ),
        RulePart(
            "ccpo: contribution of an agent",
            SIX_TEXT,
            SIX,
            {"algorithm": "ccpo", "n_samples": 8},
            {"contribution_weight": 1.0},
            {"contribution_weight": 0.0},
        ),
        RulePart(
            "cory: sum of both rewards",
            "2 turns; the second agent is paid for the first one's word",
            {"size": 2, "rounds": 1, "relay": True},
            {"algorithm": "cory", "outcome_weight": 0.0},
            {"share": "sum"},
            {"share": "own"},
        ),
        RulePart(
            "maporl: alpha2, wrong but useful",
            "a word that earns its speaker nothing makes the other agent right in the next round",
            {"own": 0.0},
            OWN,
            {"alpha2": 1.0},
            {"alpha2": 0.0},
            of=Helpers,
        ),
        RulePart(
            "maporl: alpha3, right and useful",
            "the same, and the speaker is paid whatever it says",
            {"own": 1.0},
            OWN,
            {"alpha3": 1.0},
            {"alpha3": 0.0},
            of=Helpers,
        ),
        RulePart(
            "maporl: alpha0, change that agrees with the peers",
            SHAKY_TEXT,
            {**AT_ONCE, "offset": 8.0},
            SHAKY,
            {"alpha0": 4.0},
            {"alpha0": 0.0},
        ),
        RulePart(
            "maporl: alpha1, change against the peers",
            SHAKY_TEXT,
            {**AT_ONCE, "offset": 8.0},
            SHAKY,
            {"alpha1": 4.0},
            {"alpha1": 0.0},
        ),
        RulePart(
            "dr_mas: baseline of each agent",
            "6 turns; each paid by itself, the last agent 30 times as much",
            {"size": 3, "rounds": 2, "scale": 30.0},
            {"n_samples": 8, "outcome_weight": 0.0},
            {"algorithm": "dr_mas"},
            {"algorithm": "grpo"},
        ),
        RulePart(
            "dapo: higher clip above",
            "4 turns, 4 passes over each batch",
            CHAIN,
            {"algorithm": "dapo", "n_samples": 8, "ppo_epoch": 4, "dynamic_sampling_rounds": 0},
            {"clip_high": 0.28},
            {"clip_high": 0.2},
        ),
        RulePart(
            "happo: ratios of the agents before",
            "6 agents at once, told only their mean; 4 passes over each batch",
            SIX,
            {"ppo_epoch": 4, "critic_lr": 3e-3, "normalize_advantages": "batch"},
            {"algorithm": "happo"},
            {"algorithm": "mappo"},
        ),
        RulePart(
            "vdn: values of the agents",
            SIX_TEXT,
            SIX,
            {"algorithm": "vdn", "n_samples": 8},
            {"critic_lr": 3e-3},
            {"critic_lr": DEAD},
            iterations=30,
        ),
        RulePart(
            "qmix: mixer",
            SIX_TEXT,
            SIX,
            {"algorithm": "qmix", "n_samples": 8},
            {"critic_lr": 3e-3},
            {"critic_lr": DEAD},
            iterations=30,
        ),
        RulePart(
            "rae: running mean of each role",
            SWAYED_TEXT,
            SWAYED,
            {"algorithm": "rae", "outcome_to": "all"},
            {"baseline_decay": 0.95},
            {"baseline_decay": 1.0},  # the mean stays 0
        ),
        RulePart(
            "gspo: narrow clip of a turn's ratio",
            "4 turns, 4 passes over each batch",
            CHAIN,
            {"n_samples": 8, "ppo_epoch": 4},
            {"algorithm": "gspo"},
            {"algorithm": "grpo"},
        ),
        RulePart(
            "cispo: clipped weights in place of clipped tokens",
            "4 turns, 4 passes over each batch",
            CHAIN,
            {"n_samples": 8, "ppo_epoch": 4},
            {"algorithm": "cispo"},
            {"algorithm": "grpo"},
        ),
        RulePart(
            "maxrl: division by the mean",
            "4 turns, told their mean; 4 of 8 boxes are always right",
            {**CHAIN, "fixed": 4},
            {"n_samples": 8},
            {"algorithm": "maxrl"},
            {"algorithm": "dr_grpo"},
        ),
        RulePart(
            "KL to the base",
            "1 turn; 8 boxes are paid, 8 calculations are not; score of both, with other numbers",
            {},
            {"algorithm": "reinforce_pp", "kl_in": "loss"},
            {"kl_coef": 0.3},
            {"kl_coef": 0.0},
            of=Unpaid,
        ),
        RulePart(
            "dr_mamr: no division by turns",
            LAZY_TEXT,
            {},
            {"n_samples": 8, "outcome_to": "last"},
            {"algorithm": "dr_mamr", "influence_weight": 0.0},
            {"algorithm": "grpo", "level": "action"},
            of=Lazy,
        ),
        RulePart(
            "dr_mamr: influence on the next turn",
            LAZY_TEXT,
            {},
            {"algorithm": "dr_mamr", "n_samples": 8},
            {"influence_weight": 0.1},
            {"influence_weight": 0.0},
            of=Lazy,
        ),
        RulePart(
            "round robin: one agent at a time",
            BOTH_TEXT,
            {},
            {"algorithm": "reinforce_pp"},
            {"agent_iteration_interval": 5},
            {"agent_iteration_interval": 0},
            iterations=40,
            of=Both,
        ),
    )
}


def run(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure and return one JSON-able dict."""
    args = _parser().parse_args(argv)
    torch.set_num_threads(1)
    print("| part | task | alive | switched off | difference (95% interval) | decides |\n|---|---|---|---|---|---|")
    rows = []
    for name in args.parts:
        rows.append(_measure_part(PARTS[name], args.seeds, args.iterations))
        print(_line(rows[-1]), flush=True)
    return {"bench": "parts", "seeds": args.seeds, "machine": _measure.machine(), "rows": rows}


def _parser() -> argparse.ArgumentParser:
    parser = StrictParser(prog="mafrt bench parts", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--parts", nargs="+", choices=sorted(PARTS), default=list(PARTS), help="default: all")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    parser.add_argument("--iterations", type=positive, help="of training; default: the part's own")
    return parser


def _measure_part(part: RulePart, seeds: Sequence[int], iterations: int | None) -> dict[str, Any]:
    rounds = part.iterations if iterations is None else iterations
    scores = {
        side: [score(part, {**part.settings, **own}, seed, rounds) for seed in seeds]
        for side, own in (("alive", part.alive), ("dead", part.dead))
    }
    gains = [alive - dead for alive, dead in zip(scores["alive"], scores["dead"], strict=True)]
    low, high = seed_interval(gains) or (None, None)
    return {
        "part": part.name,
        "task": part.task,
        **scores,
        "difference": statistics.fmean(gains),
        "low": low,
        "high": high,
    }


def score(part: RulePart, settings: Mapping[str, Any], seed: int, iterations: int, samples: int = 16) -> float:
    """Mean score after training with these settings, of so many sampled episodes of every task."""
    world = part.of(**part.world)
    agents = team(len(world.agents))
    torch.manual_seed(seed)
    config = TrainConfig.of(**{**COMMON, **settings, "seed": seed, "iterations": iterations})
    runner = OnPolicy(world, agents, SharedBase.load("teaching-base"), config)
    runner.stop = StopRequest()
    for _ in range(iterations):
        runner.learn(runner.collect())
    runner.assign_adapters()
    held_out = world.evaluated()
    plan = EvaluationPlan(held_out.num_tasks or BOXES, samples=samples, greedy=False, seed=seed_of(seed, "bench parts"))
    evaluation = evaluate(held_out, runner.player, plan)
    assert evaluation is not None
    return statistics.fmean(value for scores in evaluation.scores.values() for value in scores)


def _line(row: Mapping[str, Any]) -> str:
    alive, dead = statistics.fmean(row["alive"]), statistics.fmean(row["dead"])
    decides = "yes" if row["low"] is not None and row["low"] > 0 else "not shown"
    spread = "one seed" if row["low"] is None else f"{row['low']:+.3f} to {row['high']:+.3f}"
    return (
        f"| {row['part']} | {row['task']} | {alive:.3f} | {dead:.3f} | "
        f"{row['difference']:+.3f} ({spread}) | {decides} |"
    )
