"""Seconds that vLLM needs to have a team's adapters after an update, against an iteration.

vLLM runs in a process of its own and samples; this process learns. After every update the changed adapters are written
as PEFT folders in memory, vLLM drops the old ones and loads the new ones: `hand_over`. `iteration` is all three: the
hand-over, the answers by vLLM, and a gradient with an optimizer step of every adapter.

Before timing, vLLM's log-probabilities must agree with the trainer's, with two versions of every adapter.

Bar: the hand-over is at most 5% of an iteration.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from bench import _measure
from bench._measure import positive
from bench._tables import table
from bench._training import Training
from mafrt.config.train_config import EngineConfig
from mafrt.engines.logprob_check import self_check
from mafrt.scripts.cli.loading import work_offline_if_unreachable
from mafrt.scripts.cli.strict_parser import StrictParser

SHARE = 0.05
"""of an iteration that the hand-over takes at most"""


def run(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure and return one JSON-able dict; raises ModelError where vLLM and the trainer do not agree."""
    args = _parser().parse_args(argv)
    work_offline_if_unreachable(args.model)
    torch.set_num_threads(args.threads)
    rows = []
    for count in args.adapters:
        rows.append(_measure_one(args, count))
        print(_line(rows[-1]), flush=True)
    print("\n" + table([("", {"bench": "handover", "rows": rows})]))
    return {
        "bench": "handover",
        "shape": {k: getattr(args, k) for k in ("model", "rank", "answers", "tokens")},
        "clock": "wall",
        "machine": _measure.machine(),
        "rows": rows,
        "bars": {"hand-over <= .05 iteration": all(row["hand_over/iteration"]["median"] <= SHARE for row in rows)},
    }


def _parser() -> argparse.ArgumentParser:
    parser = StrictParser(prog="mafrt bench handover", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--adapters", type=positive, nargs="+", default=[1, 4, 16], help="numbers of adapters K")
    parser.add_argument("--model", default="teaching-base", help="name or folder of the base")
    parser.add_argument("--rank", type=positive, default=8, help="rank of every adapter, on all linear layers")
    parser.add_argument("--answers", type=positive, default=8, help="answers of every agent in an iteration")
    parser.add_argument("--tokens", type=positive, default=32, help="tokens of a prompt, and of an answer")
    parser.add_argument("--rounds", type=positive, default=5, help="timed iterations, after two that are not")
    parser.add_argument("--threads", type=positive, default=1, help="torch threads of the trainer")
    return parser


def _measure_one(args: argparse.Namespace, count: int) -> dict[str, Any]:
    from mafrt.engines.vllm.in_process import VllmEngine

    training = Training(args.model, count, args.rank, count * args.answers, args.tokens)
    engine = VllmEngine(training.base, EngineConfig(engine="vllm"), window=2 * args.tokens + 64)
    requests = training.requests()
    times: dict[str, list[float]] = {"hand_over": [], "play": [], "learn": []}
    try:
        checked = self_check(engine, training.base)
        for turn in range(args.rounds + 2):
            marks = [time.perf_counter()]
            engine.hand_over(requests)
            marks.append(time.perf_counter())
            answers = engine.generate(requests)
            marks.append(time.perf_counter())
            training.learn(requests, answers)
            marks.append(time.perf_counter())
            if turn >= 2:
                for own, first, last in zip(times.values(), marks, marks[1:], strict=False):
                    own.append(last - first)
    finally:
        engine.close()
    iteration = [sum(parts) for parts in zip(*times.values(), strict=True)]
    return {
        "K": count,
        "answers": count * args.answers,
        "parity": checked.adapter_nats,
        **{f"{name}_s": _measure.quartiles(own) for name, own in {**times, "iteration": iteration}.items()},
        "hand_over/iteration": _measure.ratio(times["hand_over"], iteration),
    }


def _line(row: Mapping[str, Any]) -> str:
    parts = ("hand_over", "play", "learn", "iteration")
    return f"K={row['K']:<3} " + "  ".join(f"{part} {row[f'{part}_s']['median'] * 1e3:.0f} ms" for part in parts)
