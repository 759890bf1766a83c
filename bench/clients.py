"""What many training clients of the Tinker server cost, an adapter each, against one client with all of their rows.

Both are one forward and backward of the same rows in one micro-batch, by the server's own trainer. The base's products
are the same; what differs is that gradients are of several adapters. It asks little where rows are long, and more where
each client has one short row: then an adapter's gradient, which is as large as the adapter, is made for a few tokens.

All adapters begin equal, so the clients' gradients must add up to the one client's before anything is timed.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from bench import _measure
from bench._measure import positive
from mafrt.cpu.malloc import keep_freed_memory
from mafrt.models.shared_base import SharedBase
from mafrt.scripts.cli.strict_parser import StrictParser
from mafrt.scripts.tinker_server.adapter_slots import AdapterSlots, Shape
from mafrt.scripts.tinker_server.limits import Limits
from mafrt.scripts.tinker_server.losses import LOSSES
from mafrt.scripts.tinker_server.messages import Example, PassRequest
from mafrt.scripts.tinker_server.trainer import Adapter, Job, Trainer


def run(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure and return one JSON-able dict; raises `_measure.Disagreement` where the gradients do not agree."""
    args = _parser().parse_args(argv)
    torch.set_num_threads(args.threads)
    keep_freed_memory()  # as `mafrt serve_tinker` does
    slots = AdapterSlots(SharedBase.load(args.model_name_or_path), Limits())
    shape = Shape(args.rank, attention=True, mlp=True)
    adapters = [Adapter(shape, slots.take(shape)) for _ in range(args.clients)]
    for adapter in adapters:
        slots.begin(adapter.slot, "one seed")
    trainer = Trainer(slots)
    try:
        rows = [_measure_one(args, trainer, adapters, tokens) for tokens in args.tokens]
    finally:
        trainer.close()
    return {
        "bench": "clients",
        "shape": {name: getattr(args, name) for name in ("model_name_or_path", "clients", "rows", "rank")},
        "clock": args.clock,
        "machine": _measure.machine(),
        "rows": rows,
    }


def _parser() -> argparse.ArgumentParser:
    parser = StrictParser(prog="mafrt bench clients", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model_name_or_path", default="teaching-base", help="base, such as smollm2")
    parser.add_argument("--clients", type=positive, default=16, help="training clients")
    parser.add_argument("--rows", type=positive, default=1, help="rows of each")
    parser.add_argument("--tokens", type=positive, nargs="+", default=[24, 95], help="tokens of a row")
    parser.add_argument("--rank", type=positive, default=32, help="rank of every adapter, on all linear layers")
    parser.add_argument("--rounds", type=positive, default=5, help="timed rounds")
    parser.add_argument("--threads", type=positive, default=1, help="torch threads")
    parser.add_argument("--clock", choices=sorted(_measure.CLOCKS), default="wall", help="cpu: on a busy machine")
    return parser


def _measure_one(args: argparse.Namespace, trainer: Trainer, adapters: list[Adapter], tokens: int) -> dict[str, Any]:
    draw = random.Random(0)
    rows = [_row([draw.randrange(100, 300) for _ in range(tokens + 1)]) for _ in range(args.clients * args.rows)]
    parts = [rows[place :: args.clients] for place in range(args.clients)]

    def passes(*work: tuple[Adapter, list[Example]]) -> Callable[[], None]:
        def call() -> None:
            for adapter in adapters:
                adapter.gradient = None
            jobs = [
                Job(adapter.slot, PassRequest(LOSSES["cross_entropy"], {}, own, True), adapter) for adapter, own in work
            ]
            for future in [trainer.submit(job) for job in jobs]:
                future.result()

        return call

    def gradient(call: Callable[[], None]) -> torch.Tensor:
        call()
        return torch.stack([adapter.gradient for adapter in adapters if adapter.gradient is not None]).sum(0)

    rivals = {"many": passes(*zip(adapters, parts, strict=True)), "one": passes((adapters[0], rows))}
    whole = gradient(rivals["one"])
    # Of sums over all rows in another order, in float32.
    worst = _measure.agree("gradient", gradient(rivals["many"]), whole, tolerance=1e-4 * float(whole.abs().max()))
    times = _measure.interleave(rivals, rounds=args.rounds, warmup=1, clock=args.clock)
    row: dict[str, Any] = {"tokens": tokens, "parity": worst, "many/one": _measure.ratio(times["many"], times["one"])}
    print(f"{tokens} tokens: {args.clients} clients cost {row['many/one']['median']:.2f} of one", flush=True)
    return row


def _row(tokens: list[int]) -> Example:
    weights = {"weights": np.ones(len(tokens) - 1, np.float32)}
    return Example(tokens[:-1], np.array(tokens[1:], np.int64), weights)


if __name__ == "__main__":
    run()
