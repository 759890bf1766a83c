"""A number of slots that are given out in the order in which they were asked for."""

from __future__ import annotations

import threading
from collections import deque
from types import TracebackType


class Slots:
    """Like `threading.BoundedSemaphore`, but first come, first served: a returning thread overtakes no waiter."""

    def __init__(self, count: int) -> None:
        self._free = count
        self._waiting: deque[threading.Lock] = deque()
        self._lock = threading.Lock()

    def __enter__(self) -> Slots:
        turn = threading.Lock()
        with self._lock:
            if self._free:
                self._free -= 1
                return self
            turn.acquire()
            self._waiting.append(turn)
        try:
            turn.acquire()  # until another thread hands its slot over
        # Ctrl-C included: a waiter that leaves would otherwise take a slot with it for ever.
        except BaseException:
            self._give_up(turn)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._lock:
            self._hand_on()

    def _hand_on(self) -> None:
        if self._waiting:
            self._waiting.popleft().release()
        else:
            self._free += 1

    def _give_up(self, turn: threading.Lock) -> None:
        """Interrupted while waiting; perhaps the slot had come already."""
        with self._lock:
            if turn in self._waiting:
                self._waiting.remove(turn)
            else:
                self._hand_on()
