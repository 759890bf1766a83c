"""What a person at the terminal sees while a run goes on."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

if TYPE_CHECKING:
    from mafrt.runners.on_policy import Progress

EVERY_S = 10.0
"""Seconds between two lines."""


class Step(Protocol):
    """How far a run has come."""

    @property
    def iteration(self) -> int:
        """iterations completed"""

    @property
    def iterations(self) -> int:
        """iterations in all"""

    @property
    def seconds(self) -> float:
        """that this iteration took"""


S = TypeVar("S", bound=Step)


def lines(words: Callable[[S], str]) -> Callable[[S], None]:
    """Prints what `words` say of a step, and the time that is left, now and then and at the end."""
    from mafrt.storage.report import duration

    last, spent, count = float("-inf"), 0.0, 0

    def line(step: S) -> None:
        nonlocal last, spent, count
        spent, count = spent + step.seconds, count + 1
        left = spent / count * (step.iterations - step.iteration)
        if not left or time.monotonic() - last >= EVERY_S:
            last = time.monotonic()
            print(f"{words(step)}  {duration(left)} left", flush=True)

    return line


def reporter(iterations: int) -> Callable[[Progress], None]:
    """A progress bar on a terminal; elsewhere a line now and then, which a log file can hold."""
    return _bar(iterations) if sys.stderr.isatty() else lines(_words)


def _words(progress: Progress) -> str:
    done = f"iteration {progress.iteration}/{progress.iterations}"
    return f"{done}  reward {progress.reward:.3f}  {progress.tokens_per_s:.0f} tokens/s"


def _bar(iterations: int) -> Callable[[Progress], None]:
    from tqdm import tqdm

    bar: Any = None

    def advance(progress: Progress) -> None:
        nonlocal bar
        if bar is None:
            bar = tqdm(total=iterations, initial=progress.iteration - 1, unit="it", dynamic_ncols=True)
            bar.start_t -= progress.seconds  # it is made when the first iteration is over, evaluations not counted
        bar.set_postfix_str(f"reward {progress.reward:.3f}, {progress.tokens_per_s:.0f} tokens/s", refresh=False)
        bar.update(progress.iteration - bar.n)
        if progress.iteration == iterations:
            bar.close()

    return advance
