"""Does the part that makes a rule decide anything? The same run with the part alive, and switched off.

Each part has a task on which it should matter (`bench._parts`), the same settings, iterations and seeds on both sides,
and one setting that differs. Score is the share of right words in 128 sampled episodes after training, over all boxes
where words differ; the difference has a 95% interval by Student's t over seeds. A part decides if it helps with a
p-value, corrected for the number of rows by Holm's method, below .05. Both sides sample about as many words, where the
table does not say otherwise. Fresh tasks for flat groups and replays without an agent cost more: those sides play more.
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
from bench._parts import BOXES, RARE, Both, Helpers, Lazy, Peers, Search, Unpaid, Words, team
from bench._tables import seed_interval
from mafrt.config.train_config import TrainConfig
from mafrt.core.seeding import seed_of
from mafrt.core.signals import StopRequest
from mafrt.models.shared_base import SharedBase
from mafrt.runners.evaluation import EvaluationPlan, evaluate
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
    seeds: int = 5
    """1 to this are the seeds where none are asked for"""
    of: type[Words] | type[Helpers] | type[Unpaid] | type[Lazy] | type[Both] | type[Peers] | type[Search] = Words


CHAIN = {"size": 2, "rounds": 2}
LONG = {"size": 2, "rounds": 4}
SWAYED = {**CHAIN, "offset": 8.0}
SIX = {"size": 6, "rounds": 1, "together": True}
SWAYED_TEXT = "4 turns, paid at the end; half of the boxes add 8 whatever is said"
SIX_TEXT = "6 agents at once, told only their mean"
OWN = {"algorithm": "maporl", "round_gamma": 0.0, "outcome_weight": 0.0}
SHAKY = {"algorithm": "maporl", "outcome_weight": 1.0}
SHAKY_TEXT = "2 rounds of 2 at once, each paid by itself; half of the boxes add 8 to the outcome of all"
LAZY_TEXT = "6 turns, told their share of right words at the end; one word ends after 2 turns for a tenth more"
BOTH_TEXT = "2 agents at once, paid if both are right, and less if one alone is than if neither is"
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
            "8 turns, numbered in the prompt, each paid by itself and with a right word of its own",
            {**LONG, "numbered": True},
            {"algorithm": "gigpo", "n_samples": 8, "outcome_weight": 0.0},
            {"step_weight": 1.0},
            {"step_weight": 0.0},
        ),
        RulePart(
            "dapo: fresh tasks for flat groups",
            "4 turns; in 30 of 32 boxes every word is right",
            {**CHAIN, "boxes": 32, "fixed": 30},
            {"algorithm": "dapo", "n_samples": 4},
            {"dynamic_sampling_rounds": 4},
            {"dynamic_sampling_rounds": 0},
            iterations=40,
            seeds=10,
        ),
        RulePart(
            "c3: alternatives of a turn, played to the end",
            "6 turns, told only their mean at the end; equal starts, 14 times the words with the part",
            {"size": 2, "rounds": 3},
            {"n_rollout_threads": 32},
            {"algorithm": "c3", "tree_samples": 4},
            {"algorithm": "grpo", "n_samples": 8},
        ),
        RulePart(
            "at_grpo: alternatives from the same state",
            "8 turns, each paid by itself, and 8 more where the word before has an even number of letters",
            {**LONG, "echo": 8.0},
            {"algorithm": "at_grpo", "outcome_weight": 0.0},
            {"tree_samples": 4, "n_rollout_threads": 24},
            {"tree_samples": 1, "n_samples": 4, "n_rollout_threads": 96},
        ),
        RulePart(
            "gdpo: each reward normalised by itself",
            "4 turns, each paid by itself; 40 more at the end for an even number of letters in all",
            {**CHAIN, "even": 40.0},
            {"n_samples": 8},
            {"algorithm": "gdpo"},
            {"algorithm": "dr_mas"},
        ),
        RulePart(
            "reinforce_pp: critic",
            SWAYED_TEXT,
            SWAYED,
            {"algorithm": "reinforce_pp", "outcome_to": "all"},
            {"critic": True, "critic_lr": 3e-3},
            {"critic": False},
        ),
        RulePart(
            "ppo: value_norm",
            "4 turns, paid at the end; half of the boxes add 800 whatever is said, and a right word is worth 100",
            {**CHAIN, "offset": 8.0},
            {"algorithm": "ppo", "outcome_weight": 100.0, "critic_lr": 3e-3},
            {"value_norm": True},
            {"value_norm": False},
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
            f"{SHAKY_TEXT}; the peer is right in 9 of 10",
            {"right": 0.9},
            SHAKY,
            {"alpha0": 4.0},
            {"alpha0": 0.0},
            of=Peers,
            seeds=10,
        ),
        RulePart(
            "maporl: alpha1, change against the peers",
            f"{SHAKY_TEXT}; the peer is wrong in 9 of 10",
            {"right": 0.1},
            SHAKY,
            {"alpha1": 4.0},
            {"alpha1": 0.0},
            of=Peers,
            seeds=10,
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
            "4 turns, 8 passes over each batch; the right word is said once in a thousand turns",
            {**CHAIN, "words": RARE},
            {
                "algorithm": "dapo",
                "n_samples": 8,
                "n_rollout_threads": 256,
                "dynamic_sampling_rounds": 0,
                "ppo_epoch": 8,
                "lr": 1e-3,
            },
            {"clip_high": 0.28},
            {"clip_high": 0.2},
            iterations=16,
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
            "qmix: mixer in place of the sum of the same values",
            SIX_TEXT,
            SIX,
            {"n_samples": 8, "critic_lr": 3e-3},
            {"algorithm": "qmix"},
            {"algorithm": "vdn"},
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
            "6 turns, each paid by itself, a sixth for a right word; one word ends after 2 turns for a tenth",
            {"by_turn": True},
            {"n_samples": 8, "outcome_weight": 0.0},
            {"algorithm": "dr_mamr", "influence_weight": 0.0},
            {"algorithm": "grpo", "level": "action", "turn_credit": "own"},
            iterations=30,
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
    print("Settings of all: " + _shown(COMMON))
    print("| part | task | alive | switched off | difference (95% interval) | settings |\n|---|---|---|---|---|---|")
    rows = []
    for name in args.parts:
        part = PARTS[name]
        seeds = args.seeds or list(range(1, part.seeds + 1))
        rows.append(_measure_part(part, seeds, args.iterations))
        print(_line(rows[-1]), flush=True)
    for row, decides in zip(rows, holm([row["p"] for row in rows]), strict=True):
        row["decides"] = decides
    named = [row["part"] for row in rows if row["decides"]]
    print(f"Corrected for {len(rows)} rows, {len(named)} decide: {'; '.join(named) or 'none'}.")
    return {"bench": "parts", "machine": _measure.machine(), "rows": rows}


def holm(values: Sequence[float], level: float = 0.05) -> list[bool]:
    """Which p-values hold when all are looked at together (Holm 1979, Scand. J. Statist. 6)."""
    holds = [False] * len(values)
    for rank, place in enumerate(sorted(range(len(values)), key=lambda k: values[k])):
        if values[place] > level / (len(values) - rank):
            break
        holds[place] = True
    return holds


def _parser() -> argparse.ArgumentParser:
    parser = StrictParser(prog="mafrt bench parts", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--parts", nargs="+", choices=sorted(PARTS), default=list(PARTS), help="default: all")
    parser.add_argument("--seeds", type=int, nargs="+", help="default: 1 to 5, or to 10 for a part that says so")
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
        "seeds": list(seeds),
        "settings": f"{_shown(part.settings)}; alive: {_shown(part.alive)}; off: {_shown(part.dead)}",
        **scores,
        "difference": statistics.fmean(gains),
        "low": low,
        "high": high,
        "p": _p_value(gains),
    }


def _p_value(gains: Sequence[float]) -> float:
    """Of no difference, to both sides; 1 where the part does harm, or nothing can be said."""
    if len(gains) < 2 or statistics.fmean(gains) <= 0.0 or max(gains) == min(gains):
        return 1.0
    from scipy.stats import ttest_1samp

    return float(ttest_1samp(gains, 0.0).pvalue)


def _shown(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in settings.items()) or "-"


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
    tasks = held_out.num_tasks or BOXES
    plan = EvaluationPlan(
        tasks, samples=max(samples, 16 * BOXES // tasks), greedy=False, seed=seed_of(seed, "bench parts")
    )
    evaluation = evaluate(held_out, runner.player, plan)
    assert evaluation is not None
    return statistics.fmean(value for scores in evaluation.scores.values() for value in scores)


def _line(row: Mapping[str, Any]) -> str:
    alive, dead = statistics.fmean(row["alive"]), statistics.fmean(row["dead"])
    spread = "one seed" if row["low"] is None else f"{row['low']:+.3f} to {row['high']:+.3f}"
    return (
        f"| {row['part']} | {row['task']} | {alive:.3f} | {dead:.3f} | "
        f"{row['difference']:+.3f} ({spread}) | {row['settings']} |"
    )
