"""One event loop for all coroutine programs.

A client that a program keeps belongs to the loop in which it was first used, so a loop for each episode would break it
("Event loop is closed"). A program that blocks its loop would hold up all others; those that come then get another.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any

RESPONDS_S = 1.0
"""in which a loop that is not blocked takes a call; the processor may be busy"""
RESPONDS_AGAIN_S = 0.1
"""the same, once a program was found that blocks"""


class _Loop:
    """An event loop in a thread, for ever."""

    def __init__(self, number: int) -> None:
        self.loop = asyncio.new_event_loop()
        self._answered = threading.Event()
        self._answered.set()
        threading.Thread(target=self._run, daemon=True, name=f"mafrt-programs-{number}").start()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()

    def responds(self, within_s: float) -> bool:
        """Whether the loop takes calls. One that has not answered the last question is still blocked."""
        if not self._answered.is_set():
            return False
        self._answered.clear()
        self.loop.call_soon_threadsafe(self._answered.set)
        return self._answered.wait(within_s)


class ProgramLoops:
    """Runs coroutines in the first loop that responds."""

    def __init__(self) -> None:
        self._loops: list[_Loop] = []
        self._lock = threading.Lock()

    def submit(self, coroutine: Coroutine[Any, Any, Any]) -> Future[Any]:
        """Start a coroutine; cancelling the future cancels it. May be called in any thread."""
        with self._lock:
            within_s = RESPONDS_S if len(self._loops) < 2 else RESPONDS_AGAIN_S
            free = next((each for each in self._loops if each.responds(within_s)), None)
            if free is None:
                free = _Loop(len(self._loops))
                self._loops.append(free)
        return asyncio.run_coroutine_threadsafe(coroutine, free.loop)


LOOPS = ProgramLoops()
