"""The number of torch threads on a CPU: measured at the start, and lowered where other work makes threads wait.

Two threads on two busy cores spend most of their time waiting for each other at the barriers between small products:
on one such machine 1,100 tokens/s fell to 14. So the choice is a measurement of the very machine, at the very moment.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass

GAIN = 1.1
"""More threads are taken only if they are faster than fewer by this factor."""

COLLAPSE = 0.7
"""Speed, relative to one thread, below which the threads of a running process are given up."""


@dataclass(frozen=True)
class ThreadChoice:
    """The number of threads, and the reason for the log."""

    threads: int
    reason: str


def wait_passively() -> None:
    """Let waiting OpenMP threads sleep instead of spin; the user's own setting wins. Call it before importing torch."""
    if "GOMP_SPINCOUNT" not in os.environ:
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def cores() -> int:
    """Cores that this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity is not None else os.cpu_count() or 1


def choose_threads(asked: int | None = None, recorded: int | None = None) -> ThreadChoice:
    """Set the number of torch threads.

    Args:
        asked: by the user; it wins.
        recorded: by the run that goes on, so that it stays repeatable.
    """
    import torch

    if asked is not None:
        choice = ThreadChoice(asked, "as asked")
    elif os.environ.get("OMP_NUM_THREADS"):
        return ThreadChoice(torch.get_num_threads(), "OMP_NUM_THREADS")
    elif recorded is not None and recorded <= cores():
        choice = ThreadChoice(recorded, "as before")
    else:
        speeds = {count: speed(count) for count in candidates(cores())}
        best = fastest(speeds)
        choice = ThreadChoice(best, ", ".join(f"{count}: {value:.0f}/s" for count, value in speeds.items()))
    torch.set_num_threads(choice.threads)
    return choice


def candidates(count: int) -> list[int]:
    """Powers of two up to `count`, and `count` itself."""
    return sorted({count, *(2**power for power in range(count.bit_length()) if 2**power <= count)})


def fastest(speeds: dict[int, float]) -> int:
    """The fewest threads that no larger number beats by the factor `GAIN`."""
    chosen = min(speeds)
    for count in sorted(speeds):
        if speeds[count] > GAIN * speeds[chosen]:
            chosen = count
    return chosen


def speed(threads: int, seconds: float = 0.06) -> float:
    """Passes per second through a few products of the size of a small model's layers, the best of three tries."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with torch.inference_mode():
            rows, weight = torch.ones(48, 256), torch.ones(256, 256)
            best = 0.0
            for _ in range(3):
                passes, started = 0, time.perf_counter()
                while (spent := time.perf_counter() - started) < seconds / 3 or passes < 2:
                    for _ in range(4):
                        torch.nn.functional.silu(rows @ weight)
                    passes += 1
                best = max(best, passes / max(spent, 1e-9))
            return best
    finally:
        torch.set_num_threads(before)


class ThreadWatch:
    """Steps down to one thread when the threads of a run collapse because other work has begun on the machine."""

    def __init__(self, patience: int = 2) -> None:
        self._patience, self._slow = patience, 0

    def look(self, speeds: Sequence[float] | None = None) -> str | None:
        """Compare one thread with the present number; the sentence for the log if they were just given up.

        `speeds` (of one thread, of the present number) are measured unless given.
        """
        import torch

        threads = torch.get_num_threads()
        if threads == 1 or os.environ.get("OMP_NUM_THREADS"):
            return None
        alone, together = speeds if speeds is not None else (speed(1), speed(threads))
        self._slow = self._slow + 1 if together < COLLAPSE * alone else 0
        if self._slow < self._patience:
            return None
        torch.set_num_threads(1)
        return (
            f"{threads} threads were slower than one ({together:.0f} against {alone:.0f} passes/s: other work is on "
            "the machine), so one is used from now on; --threads chooses."
        )
