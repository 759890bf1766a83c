"""Seconds to save and to load a checkpoint.

- `load_base`: the base and fresh adapters, as a new run begins;
- `resume`: the same, then a checkpoint's adapters and optimizer states, all files verified by their hashes;
- `cold_load`, `cold_resume`: these two in a process of their own, from its start on;
- `save`: a checkpoint of all adapters and optimizer states, written durably.

Before timing, a resumed run's weights and optimizer states, and its weights after one more step, must equal those of
the uninterrupted run bit for bit. Adapters for another engine have a benchmark of their own (`handover`).

Bar: `cold_resume` takes at most 1.5 times `cold_load`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from bench import _measure
from bench._measure import positive
from bench._tables import table
from bench._training import Training
from mafrt.scripts.cli.loading import work_offline_if_unreachable
from mafrt.scripts.cli.strict_parser import StrictParser


def run(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure and return one JSON-able dict; raises `_measure.Disagreement` where a resumed run is another one."""
    args = _parser().parse_args(argv)
    work_offline_if_unreachable(args.model)
    torch.set_num_threads(args.threads)
    rows = []
    for count in args.adapters:
        with tempfile.TemporaryDirectory(dir=args.folder) as folder:
            rows.append(_measure_one(args, count, Path(folder)))
        print(_line(rows[-1]), flush=True)
    print("\n" + table([("", {"bench": "resume", "rows": rows})]))
    return {
        "bench": "resume",
        "shape": {k: getattr(args, k) for k in ("model", "rank", "rows", "tokens")},
        "clock": args.clock,
        "machine": _measure.machine(),
        "rows": rows,
        "bars": {
            "cold resume <= 1.5 cold load": all(row["cold_resume/cold_load"]["median"] <= 1.5 for row in rows),
        },
    }


def _parser() -> argparse.ArgumentParser:
    parser = StrictParser(prog="mafrt bench resume", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--adapters", type=positive, nargs="+", default=[1, 4, 16], help="numbers of adapters K")
    parser.add_argument("--model", default="teaching-base", help="name or folder of the base")
    parser.add_argument("--folder", help="where checkpoints are written; default: the system's folder for such files")
    parser.add_argument("--rank", type=positive, default=8, help="rank of every adapter, on all linear layers")
    parser.add_argument("--rows", type=positive, default=32, help="answers of the iteration before it")
    parser.add_argument("--tokens", type=positive, default=32, help="tokens of its prompts, and of its answers")
    parser.add_argument("--rounds", type=positive, default=5, help="timed rounds")
    parser.add_argument("--threads", type=positive, default=1, help="torch threads")
    parser.add_argument("--clock", choices=sorted(_measure.CLOCKS), default="wall", help="cpu: on a busy machine")
    return parser


def _training(args: argparse.Namespace, count: int) -> Training:
    return Training(args.model, count, args.rank, args.rows, args.tokens)


def _measure_one(args: argparse.Namespace, count: int, folder: Path) -> dict[str, Any]:
    training = _training(args, count)
    training.iterate()
    saved = training.save(folder, 1)
    _check(args, training, saved)
    number = iter(range(2, 10**6))

    def resume() -> None:
        _training(args, count).restore(saved)

    rivals: dict[str, Callable[[], object]] = {
        "load_base": lambda: _training(args, count),
        "resume": resume,
        # Checkpoint 1 is written elsewhere, so that it is not thinned out.
        "save": lambda: training.save(folder / "timed", next(number)),
    }
    times = _measure.interleave(rivals, rounds=args.rounds, warmup=1, clock=args.clock)
    cold = {
        "cold_load": lambda: _in_a_process(args, count, None),
        "cold_resume": lambda: _in_a_process(args, count, saved),
    }
    times |= _measure.interleave(cold, rounds=args.rounds, warmup=1)  # of a child no other clock tells
    size = sum(file.stat().st_size for file in saved.rglob("*") if file.is_file())
    return {
        "K": count,
        "checkpoint_mib": round(size / 2**20, 2),
        **{f"{name}_s": _measure.quartiles(own) for name, own in times.items()},
        "cold_resume/cold_load": _measure.ratio(times["cold_resume"], times["cold_load"]),
        "resume/load_base": _measure.ratio(times["resume"], times["load_base"]),
    }


def start(args: Mapping[str, Any], count: int, saved: str | None) -> None:
    """Load a base with fresh adapters, or resume: all that the process of a cold start does."""
    asked = argparse.Namespace(**args)
    work_offline_if_unreachable(asked.model)
    torch.set_num_threads(asked.threads)
    training = _training(asked, count)
    if saved is not None:
        training.restore(Path(saved))


_START = "import json, sys; from bench import resume; resume.start(*json.loads(sys.argv[1]))"


def _in_a_process(args: argparse.Namespace, count: int, saved: Path | None) -> None:
    told = json.dumps([vars(args), count, None if saved is None else str(saved)])
    subprocess.run([sys.executable, "-c", _START, told], check=True, capture_output=True)


def _check(args: argparse.Namespace, training: Training, saved: Path) -> None:
    """A resumed run is the same one, also one step later."""
    resumed = _training(args, len(training.names))
    resumed.restore(saved)
    _same("resumed", resumed, training)
    for one in (training, resumed):
        one.iterate()
    _same("one step after resuming", resumed, training)


def _same(name: str, ours: Training, theirs: Training) -> None:
    for mine, other in zip(ours.tensors(), theirs.tensors(), strict=True):
        _measure.agree(name, mine.float(), other.float(), tolerance=0.0)


def _line(row: Mapping[str, Any]) -> str:
    parts = ("cold_load", "cold_resume", "load_base", "resume", "save")
    return f"K={row['K']:<3} " + "  ".join(f"{part} {row[f'{part}_s']['median'] * 1e3:.0f} ms" for part in parts)
