"""Do rules learn when to stop? A search in which every further find costs, against the best policy, which is known.

Two agents take the best find so far, or pay for another one (`bench._parts.Search`). What the trained team gets, costs
included, is divided by what the best policy gets. A rule holds if its mean over seeds is at least .95 of that.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from bench import _measure
from bench._measure import positive
from bench._parts import Search
from bench._tables import seed_interval
from bench.parts import RulePart, score
from mafrt.scripts.cli.strict_parser import StrictParser

GROUPS: Mapping[str, Any] = {"n_samples": 8}
CRITIC: Mapping[str, Any] = {"critic_lr": 3e-3}
RULES: Mapping[str, Mapping[str, Any]] = {
    "rloo": GROUPS,
    "dr_grpo": GROUPS,
    "grpo": GROUPS,
    "dr_mas": GROUPS,
    "gdpo": GROUPS,
    "gigpo": GROUPS,
    "reinforce_pp": {},
    "reinforce_pp_baseline": GROUPS,
    "rae": {},
    "ppo": CRITIC,
    "mappo": CRITIC,
    "c3": {"tree_samples": 4, "n_rollout_threads": 16},
    "at_grpo": {"tree_samples": 4, "n_rollout_threads": 32},
    "maporl": {},
}
SETTINGS: Mapping[str, Any] = {"lr": 1e-3, "n_rollout_threads": 128}
"""chosen with `rloo` and `reinforce_pp` on seed 11: at three times this rate one agent soon never stops"""
BAR = 0.95


def run(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure and return one JSON-able dict."""
    args = _parser().parse_args(argv)
    torch.set_num_threads(1)
    world = Search()
    best = world.best()
    print(
        f"The best policy gets {best:.3f}; taking the first find {world.always(stop=True):.3f}, "
        f"never taking one {world.always(stop=False):.3f}.\n"
    )
    print("| rule | of the best (95% interval) | seeds | holds |\n|---|---|---|---|")
    rows = []
    for rule in args.rules:
        part = RulePart(rule, "", {}, {**SETTINGS, "algorithm": rule, **RULES[rule]}, of=Search)
        shares = [score(part, part.settings, seed, args.iterations, samples=1) / best for seed in args.seeds]
        low, high = seed_interval(shares) or (None, None)
        rows.append({"rule": rule, "shares": shares, "low": low, "high": high})
        print(_line(rows[-1]), flush=True)
    met = {f"{row['rule']} at least {BAR:g} of the best": statistics.fmean(row["shares"]) >= BAR for row in rows}
    return {"bench": "stopping", "seeds": args.seeds, "machine": _measure.machine(), "rows": rows, "bars": met}


def _parser() -> argparse.ArgumentParser:
    parser = StrictParser(prog="mafrt bench stopping", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rules", nargs="+", choices=list(RULES), default=list(RULES), help="default: all")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    parser.add_argument("--iterations", type=positive, default=60, help="of training")
    return parser


def _line(row: Mapping[str, Any]) -> str:
    mean = statistics.fmean(row["shares"])
    spread = "one seed" if row["low"] is None else f"{row['low']:.3f} to {row['high']:.3f}"
    each = ", ".join(f"{share:.3f}" for share in row["shares"])
    return f"| `{row['rule']}` | {mean:.3f} ({spread}) | {each} | {'yes' if mean >= BAR else 'no'} |"
