"""Turns SIGINT, SIGTERM and SIGHUP into a flag polled at safe points, and elsewhere into an exception."""

from __future__ import annotations

import atexit
import logging
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, ClassVar

log = logging.getLogger(__name__)

HANDLED = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGHUP") if hasattr(signal, name))
SIGNALS = tuple(number.name for number in HANDLED)
_ECHO_S = 0.2
"""A second signal within this time echoes the first: the terminal signals all processes, and launchers forward it."""


class EndedError(KeyboardInterrupt):
    """SIGTERM or SIGHUP outside a `StopRequest`: what is open is closed as after Ctrl-C."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name


def source_of(error: KeyboardInterrupt) -> tuple[str, int]:
    """What ended a command, in words, and its exit code: 128 and the signal's number."""
    name = error.name if isinstance(error, EndedError) else "SIGINT"
    return "Ctrl-C" if name == "SIGINT" else name, 128 + signal.Signals[name]


@contextmanager
def ending() -> Iterator[None]:
    """Raise `EndedError` where SIGTERM or SIGHUP comes outside a `StopRequest` and has no handler; once a second."""
    last = -1.0

    def end(number: int, _: FrameType | None) -> None:
        nonlocal last
        earlier, last = last, time.monotonic()
        if earlier < 0 or last - earlier > 1.0:
            raise EndedError(signal.Signals(number).name)

    main = threading.current_thread() is threading.main_thread()
    taken = [one for one in HANDLED if main and signal.getsignal(one) == signal.SIG_DFL]
    for number in taken:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number in taken:
            # One that has been obeyed makes no failure of what is closed now.
            if signal.getsignal(number) is end:
                signal.signal(number, signal.SIG_DFL if last < 0 else signal.SIG_IGN)


class StopRequest:
    """`with StopRequest() as stop:` ... `if stop.requested: checkpoint, leave with 0`.

    The first signal only sets the flag; the runner polls it between iterations and between generation batches. A second
    Ctrl-C raises KeyboardInterrupt at once; a further SIGTERM changes nothing, since schedulers send several before
    they kill. SIGHUP, of a terminal that is closed, is left alone where it is ignored, as under `nohup`. Earlier
    handlers are restored on exit, but where a signal has asked for the stop of a process that `ends` with it only
    Ctrl-C's: another would make a failure of what has been saved. Outside the main thread Python allows no handlers:
    the flag then stays down unless `request` is called.
    """

    ends: ClassVar[bool] = False
    """Whether the process is a command, which prints what was saved and ends."""

    _coming = False
    """Whether the signal that another process has had is still on its way to this one."""

    def __init__(self) -> None:
        self._previous: dict[signal.Signals, Any] = {}
        self._since: float | None = None
        self._signalled = False
        self.reason: str | None = None
        """Source of the request, such as "SIGTERM"; None if there was none."""
        self.requested = False

    def request(self, reason: str) -> None:
        """Request a stop from inside the program (a spent budget, a dead coach), or since another process has one.

        A signal that was another process's reason is on its way to this one too, and may come when all is saved.
        """
        self._since = time.monotonic()
        self._coming = reason in SIGNALS
        self._signalled = self._signalled or self._coming
        self.reason, self.requested = reason, True

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            for number in HANDLED:
                if number.name == "SIGHUP" and signal.getsignal(number) == signal.SIG_IGN:
                    continue
                self._previous[number] = signal.signal(number, self._handle)
        else:
            log.debug("not in the main thread, so signals are left alone")
        return self

    def __exit__(self, *_: object) -> None:
        for number, previous in self._previous.items():
            # Ctrl-C stays: what still has to be closed may hang.
            if self._signalled and self.ends and number != signal.SIGINT:
                previous = signal.SIG_IGN
            # None: the handler was not installed from Python and cannot be put back by it.
            signal.signal(number, signal.SIG_DFL if previous is None else previous)
        self._previous.clear()
        if self._signalled:
            # Taking an interpreter with torch apart takes a second, in which a further signal would make a failure
            # (exit code -15, or a traceback) of a run that has ended as asked. A program that goes on is left as it is.
            atexit.unregister(_ignore_signals)
            atexit.register(_ignore_signals)

    def _handle(self, number: int, _: FrameType | None) -> None:
        # Runs between any two bytecodes of the main thread: no logging, no files, no locks.
        if self._since is None:
            self.request(signal.Signals(number).name)
            self._coming = False
        elif self._coming:  # the signal that was another process's reason, however late
            self._coming = False
        elif number == signal.SIGINT and time.monotonic() - self._since > _ECHO_S:
            raise KeyboardInterrupt


def _ignore_signals() -> None:
    if threading.current_thread() is threading.main_thread():
        for number in HANDLED:
            signal.signal(number, signal.SIG_IGN)
