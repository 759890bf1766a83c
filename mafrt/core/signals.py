"""SIGTERM and Ctrl-C as a flag that the loop looks at when it is safe to stop."""

from __future__ import annotations

import logging
import signal
import threading
import time
from types import FrameType
from typing import Any

log = logging.getLogger(__name__)

_ECHO_S = 0.2
"""A second signal within this time is the same one: launchers pass on what the terminal sent to everybody."""


class StopRequest:
    """`with StopRequest() as stop:` ... `if stop.requested: checkpoint, leave with 0`.

    The first SIGTERM or SIGINT only sets the flag; the runner looks at it between iterations and between generation
    batches. The second raises KeyboardInterrupt at once. Handlers that were there before come back on exit. Outside
    the main thread Python allows no handlers: the flag then stays down unless `request` is called.
    """

    def __init__(self, signals: tuple[signal.Signals, ...] = (signal.SIGTERM, signal.SIGINT)) -> None:
        self._signals = signals
        self._previous: dict[signal.Signals, Any] = {}
        self._since: float | None = None
        self.reason: str | None = None
        """What asked to stop ("SIGTERM"), None while nothing has."""

    @property
    def requested(self) -> bool:
        return self.reason is not None

    def request(self, reason: str) -> None:
        """Ask to stop from within, as a signal would (a spent budget, a dead coach)."""
        self._since = time.monotonic()
        self.reason = reason

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            for one in self._signals:
                self._previous[one] = signal.signal(one, self._handle)
        else:
            log.debug("not in the main thread, so signals are left alone")
        return self

    def __exit__(self, *_: object) -> None:
        for one, previous in self._previous.items():
            # None: the handler was not installed from Python and cannot be put back by it.
            signal.signal(one, signal.SIG_DFL if previous is None else previous)
        self._previous.clear()

    def _handle(self, number: int, _: FrameType | None) -> None:
        # Runs between any two bytecodes of the main thread: no logging, no files, no locks.
        if self._since is None:
            self.request(signal.Signals(number).name)
        elif time.monotonic() - self._since > _ECHO_S:
            raise KeyboardInterrupt
