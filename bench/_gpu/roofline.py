"""The device's own limits, measured in the same run: bytes/s of a copy, FLOP/s of a matrix product."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from bench._measure import synchronize
from mafrt.cpu import onednn


@dataclass(frozen=True)
class Roofline:
    """Measured limits of a device."""

    bytes_s: float
    flop_s: float


def measure(device: str, dtype: torch.dtype, *, small: bool) -> Roofline:
    """The best of several passes, read and write counted for the copy."""
    size, count = (512, 2**24) if small else (8192, 2**30)
    source = torch.empty(count, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    copy = best_time(lambda: target.copy_(source), device)
    multiplied = best_time(lambda: onednn.product(left, right), device)
    if onednn.can_pack(right):  # as a CPU multiplies with weights that it has kernels for
        packed = onednn.pack(right)
        multiplied = min(multiplied, best_time(lambda: onednn.product(left, packed), device))
    return Roofline(2 * count / copy, 2 * size**3 / multiplied)


def best_time(call: Callable[[], object], device: str, passes: int = 8) -> float:
    """Seconds of the fastest of `passes` calls, after two to warm up."""
    best = float("inf")
    for number in range(passes + 2):
        synchronize(device)
        started = time.perf_counter()
        call()
        synchronize(device)
        if number >= 2:
            best = min(best, time.perf_counter() - started)
    return best
