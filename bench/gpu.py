"""Everything that runs on a GPU, in one command within minutes: parity, learning, speed, memory, kernels.

`bash scripts/gpu_check.sh` runs it where only torch and transformers are installed. With `--device cpu --small` the
same stages run on a CPU, on a model of two layers. Results are written after every stage. `--pretend` needs no GPU: it
counts launches, waits and bytes on a pretended one, and models the speed.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from bench import _measure
from bench._gpu import against_trl, capacity, measured, modelled, models, parity, quickstart, roofline, speed
from bench._gpu.stages import GpuStage, run_stages
from mafrt.models.pretrained import check_device
from mafrt.models.shared_base import SharedBase
from mafrt.scripts.cli.strict_parser import StrictParser


def run(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Run the stages; one JSON-able dict. Raises `_measure.Disagreement` after the last one if any failed."""
    args = _parser().parse_args(argv)
    if args.pretend:
        return pretended(args.models)
    check_device(args.device)  # --device cpu --small runs the stages without a GPU
    if args.small:
        torch.set_num_threads(1)
    results = {"bench": "gpu", "machine": _measure.machine()}
    chosen = [stage for stage in _stages(args) if not args.stages or any(word in stage.name for word in args.stages)]
    results["stages"] = stages = run_stages(chosen, args.minutes, args.output)
    print(table(stages))
    if failed := [name for name, entry in stages.items() if entry["state"] == "failed"]:
        raise _measure.Disagreement(f"failed: {', '.join(failed)}; {stages[failed[0]]['why']}")
    return results


def _parser() -> argparse.ArgumentParser:
    parser = StrictParser(prog="mafrt bench gpu", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--device", default="cuda", help="cuda, cuda:N or cpu")
    parser.add_argument("--minutes", type=float, default=9.0, help="stages that would not end in time are left out")
    parser.add_argument("--output", type=Path, help="JSON file, written after every stage")
    parser.add_argument("--small", action="store_true", help="a model of two layers, and a few iterations")
    parser.add_argument("--pretend", action="store_true", help="count launches and bytes on a pretended GPU")
    parser.add_argument("--stages", nargs="+", default=[], metavar="WORD", help="only stages whose names hold a word")
    parser.add_argument("--models", nargs="+", default=["qwen3-0.6b", "qwen3-4b"], choices=tuple(models.NAMES))
    return parser


def pretended(names: Sequence[str], adapters: Sequence[int] = (1, 4, 16)) -> dict[str, Any]:
    """Decoding and updates on the pretended GPU, modelled and not measured; prints the tables of BENCHMARKS.md."""
    results: dict[str, Any] = {"bench": "gpu", "modelled": True}
    for title, row in (("decoding", modelled.decode_row), ("updates", modelled.update_row)):
        results[title] = [row(name, count) for name in names for count in adapters]
        print(table({f"{title}, modelled, not measured": {"state": "ok", "result": results[title]}}))
    return results


def _stages(args: argparse.Namespace) -> list[GpuStage]:
    small, device = args.small, args.device
    dtype = torch.float32 if device == "cpu" else torch.bfloat16

    @functools.cache
    def limit() -> roofline.Roofline:
        return roofline.measure(device, dtype, small=small)

    base_of = PresentBase(device, dtype)
    dtypes = (torch.float32,) if device == "cpu" else (torch.float32, torch.bfloat16)
    stages = [
        GpuStage("limits", 5, lambda: vars(limit())),
        GpuStage("parity", 10, lambda: parity.check(device, dtypes)),
        GpuStage("attention", 10, lambda: parity.attention(device)),
        GpuStage("every stage", 15, lambda: quickstart.every_stage(device)),
        GpuStage("quantised", 10, lambda: parity.quantised(device)),
    ]
    names = ("small",) if small else args.models
    for name in names:
        stages += _timed(name, base_of, limit, device, small)
    stages.append(
        GpuStage(
            "quickstart",
            20 if small else 45,
            lambda: quickstart.learn(device, 1 if small else 30, 8 if small else 200),
        )
    )
    # Last, since torch's profiler makes every launch after it slower.
    for name in names:
        stages += _profiled(name, base_of, device)
    return stages


class PresentBase:
    """The present random base; asking for another shape frees it first, since two might not fit."""

    def __init__(self, device: str, dtype: torch.dtype) -> None:
        self.device, self.dtype = device, dtype
        self._name = ""
        self._base: SharedBase | None = None

    def free(self) -> None:
        self._base = None

    def __call__(self, name: str) -> SharedBase:
        if self._base is None or self._name != name:
            self.free()
            self._base = models.random_base(models.NAMES[name], 16, device=self.device, dtype=self.dtype)
            self._name = name
        return self._base


def _timed(
    name: str, base_of: PresentBase, limit: Callable[[], roofline.Roofline], device: str, small: bool
) -> list[GpuStage]:
    shape, seconds = models.NAMES[name], 5 if small else 45
    sizes: dict[str, Any] = {"adapters": (1, 4, 16), "rows": (16, 64), "contexts": (1024,), "steps": 64}
    tokens: dict[str, Any] = {"adapters": (1, 4, 16), "tokens": (512, 2048)}
    if small:
        sizes = {"adapters": (2,), "rows": (4,), "contexts": (16,), "steps": 4}
        tokens = {"adapters": (2,), "tokens": (64,)}

    def iterations() -> Any:
        base_of.free()
        return against_trl.iterations(shape, device, base_of.dtype, (1,) if small else (1, 4), small=small)

    return [
        GpuStage(f"decode {name}", seconds, lambda: speed.decode(base_of(name), shape, limit(), **sizes)),
        GpuStage(f"update {name}", seconds, lambda: speed.update(base_of(name), shape, limit(), **tokens)),
        GpuStage(f"iteration {name}", seconds, iterations),
        GpuStage(f"agents {name}", seconds / 2, lambda: capacity.agents_that_fit(base_of(name), shape, (16, 24))),
    ]


def _profiled(name: str, base_of: PresentBase, device: str) -> list[GpuStage]:
    shape, counts = models.NAMES[name], (1, 4, 16)
    stages = [GpuStage(f"kernels {name}", 20, lambda: speed.kernels(base_of(name), shape))]
    if device != "cpu":
        stages += [
            GpuStage(f"counted decoding {name}", 60, lambda: measured.decode_rows(name, base_of(name), counts)),
            GpuStage(f"counted updates {name}", 20, lambda: measured.update_rows(name, base_of(name), shape, counts)),
        ]
    return stages


def table(stages: dict[str, dict[str, Any]]) -> str:
    """Markdown: a line a stage, then the rows of the sweeps."""
    lines = ["", "| stage | state | seconds |", "|---|---|---|"]
    lines += [f"| {name} | {entry['state']} | {entry.get('seconds', '')} |" for name, entry in stages.items()]
    for name, entry in stages.items():
        result = entry.get("result")
        if isinstance(result, list) and result:
            lines += ["", f"{name}", "", "| " + " | ".join(result[0]) + " |", "|---" * len(result[0]) + "|"]
            lines += ["| " + " | ".join(str(value) for value in row.values()) + " |" for row in result]
    return "\n".join(lines)
