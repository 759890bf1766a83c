"""A deadline for calls of the user's code that cannot be ended: the thread of one that hangs is left behind."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

from mafrt.core.errors import EnvError

T = TypeVar("T")

MOST_LEFT = 16
"""Calls that may hang at the same time; with more, the user's code has to be mended."""

_hanging: list[threading.Thread] = []
_lock = threading.Lock()


class LateError(TimeoutError):
    """A call that did not end in time. The text names it."""


def call_within(timeout_s: float, name: str, function: Callable[..., T], *arguments: Any) -> T:
    """`function(*arguments)` in a thread of its own. When it is late, it may still change shared objects.

    Args:
        timeout_s: seconds that it may take.
        name: noun for the error, such as `the tool lookup`.

    Raises:
        LateError: it did not end in time.
        EnvError: `MOST_LEFT` earlier calls still hang.
        BaseException: whatever the function raises.
    """
    with _lock:
        _hanging[:] = [thread for thread in _hanging if thread.is_alive()]
        if len(_hanging) >= MOST_LEFT:
            raise EnvError(f"{name} is not called: {len(_hanging)} earlier calls of such code still hang; mend it")
    result: list[T] = []
    raised: list[BaseException] = []

    def run() -> None:
        try:
            result.append(function(*arguments))
        except BaseException as error:  # raised again in the caller
            raised.append(error)

    thread = threading.Thread(target=run, daemon=True, name=name)
    thread.start()
    thread.join(timeout_s)
    if raised:
        raise raised[0]
    if result:
        return result[0]
    with _lock:
        _hanging.append(thread)
    raise LateError(f"{name} did not answer within {timeout_s:g} s")
