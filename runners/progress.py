"""Progress of a run: a bar on a terminal or in a notebook, a line now and then elsewhere."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TextIO

from mafrt.core.progress import reporting
from mafrt.storage.report import duration

if TYPE_CHECKING:
    from mafrt.runners.loop import Progress

EVERY_S = 10.0
"""Seconds between two lines where there is no terminal."""

EARLY = 1 / 9
"""Completed parts per remaining part from which a stage's own speed tells the time that is left: a tenth is done."""

WIDTH = 100
"""Columns of a bar on a terminal of unknown size."""

Words = Callable[["Progress"], str]


class Terminal:
    """Shows iterations, and the stages within them and within evaluations, with the time that is left.

    Args:
        iterations: of the whole run; None where nothing but stages is shown (an evaluation by itself).
        words: short description of an iteration, such as its reward.
        stream: where to write; a bar is drawn only on a terminal.
    """

    def __init__(self, iterations: int | None = None, words: Words | None = None, stream: TextIO | None = None) -> None:
        self.iterations, self.words = iterations, words or on_policy_words
        self.stream = sys.stdout if stream is None else stream
        # A notebook is no terminal and draws bars all the same.
        self._terminal = (sys.stderr if stream is None else stream).isatty() or (stream is None and in_notebook())
        self._bar: Any = None
        self._shown_at = time.monotonic()
        self._done, self._seconds, self._counted = 0, 0.0, 0
        self._stage, self._began, self._before = "", 0.0, 0
        self._last = ""
        """words of the last iteration, and the time that is left after it"""
        self._took: dict[str, float] = {}
        """stage -> seconds that it took the last time"""

    def stage(self, name: str, done: int, total: int) -> None:
        """A stage has come to `done` of `total` parts (`mafrt.core.progress`)."""
        now = time.monotonic()
        if done == 0 or name != self._stage:
            self._stage, self._began, self._before = name, now, done
        left = _left(now - self._began, done - self._before, total - done, self._took.get(name))
        if done >= total:
            self._took[name] = now - self._began
        text = f"{name} {done}/{total}"
        if self._terminal:
            self._draw(text + left)
        elif now - self._shown_at >= EVERY_S and done < total:
            # A line of a log stands for itself: how the run is doing, and how long all of it will take.
            ended = self.iterations is not None and self._done >= self.iterations
            self._line(f"{self._place()}{text}{left if ended or not self._last else self._last}")

    def _place(self) -> str:
        if self.iterations is None:
            return ""
        # The last evaluation belongs to no iteration.
        return "at the end: " if self._done >= self.iterations else f"iteration {self._done + 1}/{self.iterations}: "

    def iteration(self, progress: Progress) -> None:
        """An iteration is complete."""
        self._done, self._counted = progress.iteration, self._counted + 1
        self._seconds += progress.seconds
        last = progress.iteration == progress.iterations
        left = self._seconds / self._counted * (progress.iterations - progress.iteration)
        self._last = f"  last {self.words(progress)}  {duration(left)} left in all"
        if self._terminal:
            self._draw(self.words(progress))
            if last:
                self.close()
        elif last or self._counted == 1 or time.monotonic() - self._shown_at >= EVERY_S:
            done = f"iteration {progress.iteration}/{progress.iterations}"
            self._line(f"{done}  {self.words(progress)}  {duration(left)} left")

    def close(self) -> None:
        """Leave the terminal as it was."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def _draw(self, text: str) -> None:
        if self._bar is None:
            from tqdm import tqdm

            whole = "{n_fmt}/{total_fmt} |{bar:20}| {elapsed}<{remaining}  {desc}"
            form = "{desc}" if self.iterations is None else whole
            # A terminal that does not know its size says 0, in which tqdm shows nothing.
            width = None if _columns() else WIDTH
            self._bar = tqdm(
                total=self.iterations,
                initial=self._done,
                ncols=width,
                dynamic_ncols=width is None,
                bar_format=form,
            )
        self._bar.set_description_str(text, refresh=False)
        self._bar.update(self._done - self._bar.n)
        if time.monotonic() - self._shown_at >= 0.1:
            self._shown_at = time.monotonic()
            self._bar.refresh()

    def _line(self, text: str) -> None:
        self._shown_at = time.monotonic()
        self.stream.write(f"{text}\n")
        self.stream.flush()


@contextmanager
def shown(iterations: int, wanted: bool | None) -> Iterator[Callable[[Progress], None] | None]:
    """Within it, progress is shown if `wanted`, and where that is None in a notebook; yields what to call."""
    if not (in_notebook() if wanted is None else wanted):
        yield None
        return
    terminal = Terminal(iterations)
    try:
        with reporting(terminal.stage):
            yield terminal.iteration
    finally:
        terminal.close()


def in_notebook() -> bool:
    """Whether this is the kernel of a notebook."""
    ipython = sys.modules.get("IPython")
    return ipython is not None and type(ipython.get_ipython()).__name__ == "ZMQInteractiveShell"


def _columns() -> int:
    """Columns of the terminal on stderr; 0 if it does not say."""
    try:
        return os.get_terminal_size(sys.stderr.fileno()).columns
    except (OSError, ValueError):
        return 0


def on_policy_words(progress: Progress) -> str:
    """Reward and speed of an iteration."""
    return f"reward {progress.metrics['score']:.3f}  {progress.timings['tokens_per_s']:.0f} tokens/s"


def offline_words(progress: Progress) -> str:
    """Losses and accuracies of an iteration."""
    return "  ".join(f"{k} {v:.3f}" for k, v in progress.metrics.items() if k.startswith(("loss/", "accuracy/")))


def _left(seconds: float, done: int, remaining: int, before: float | None) -> str:
    """The remaining time, `before` being the seconds of the same stage in the last iteration.

    Parts run side by side: the first one ends late, and the others soon after it, so a few parts tell nothing.
    """
    if remaining <= 0 or seconds < 1:
        return ""
    if before is not None and before > seconds:
        left = before - seconds
    elif done and done >= remaining * EARLY:
        left = seconds / done * remaining
    else:
        return ""
    return f", {duration(left)} left"
