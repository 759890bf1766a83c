"""Progress within an iteration: stages report their completed parts to a reporter.

Like `logging`, it is off until a reporter is installed; without one it costs almost nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

Reporter = Callable[[str, int, int], None]
"""`(stage, done, total)`: called when a stage begins (done 0) and after every part of it."""

_REPORTER: ContextVar[Reporter | None] = ContextVar("reporter", default=None)
_ADVANCE: ContextVar[Callable[[int], None] | None] = ContextVar("advance", default=None)
"""Of the innermost stage."""


@contextmanager
def reporting(reporter: Reporter | None) -> Iterator[None]:
    """Within it, stages of this thread report to `reporter`."""
    token = _REPORTER.set(reporter)
    try:
        yield
    finally:
        _REPORTER.reset(token)


@contextmanager
def stage(name: str, total: int) -> Iterator[Callable[[int], None]]:
    """A stage of `total` parts, shown by its name; the yielded function takes the number of newly completed parts."""
    reporter, done = _REPORTER.get(), 0

    def advance(parts: int = 1) -> None:
        nonlocal done
        done = min(done + parts, total)
        if reporter is not None:
            reporter(name, done, total)

    advance(0)
    token = _ADVANCE.set(advance)
    try:
        yield advance
    finally:
        _ADVANCE.reset(token)


def parts_done(parts: int) -> None:
    """Report completed parts of the innermost stage of this thread, from code that did not begin it."""
    if parts and (advance := _ADVANCE.get()) is not None:
        advance(parts)
