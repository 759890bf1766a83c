"""One loop around every call: when to retry, when all callers wait, when to give up.

The SDKs' own retries are off. A call is tried again only where that may help, after a wait drawn evenly from 0 to a
ceiling that doubles (full jitter; Brooker 2015, "Exponential backoff and jitter"), or after `Retry-After`, up
to a cap; never beyond a total deadline. When many calls in a row fail, the circuit opens: only one probe is sent
after each cool-down, until one succeeds. If none does within the deadline, the coach is down.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import KW_ONLY, dataclass, field
from typing import TypeVar

from tenacity import AsyncRetrying, RetryCallState, retry_if_exception

from mafrt.coach.api_errors import CallFailedError
from mafrt.core.errors import CoachDownError

T = TypeVar("T")


class Clock:
    """Time; tests have one of their own."""

    def now(self) -> float:
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


@dataclass(eq=False)
class Retry:
    """Tries a call until it succeeds, cannot succeed, or `deadline_s` is over."""

    deadline_s: float
    """for all tries and the waits between them; a wait that would end after it is not started"""
    _: KW_ONLY
    first_s: float = 1.0
    """ceiling of the first wait; doubles with every wait"""
    ceiling_s: float = 30.0
    """max of every ceiling"""
    honour_s: float = 120.0
    """max wait for a `Retry-After`"""
    clock: Clock = field(default_factory=Clock)
    jitter: Callable[[], float] = random.random
    """draws from 0..1"""
    retries: int = field(default=0, init=False)
    """tries beyond the first, of all calls"""

    async def run(self, call: Callable[[], Awaitable[T]]) -> T:
        """The result of the first try that succeeds. Raises the last CallFailedError, or any other error at once."""
        started = self.clock.now()

        def stop(state: RetryCallState) -> bool:
            return self.clock.now() - started + state.upcoming_sleep > self.deadline_s

        def count(_: RetryCallState) -> None:
            self.retries += 1

        trying = AsyncRetrying(
            sleep=self.clock.sleep,
            wait=self._wait,
            stop=stop,
            retry=retry_if_exception(lambda error: isinstance(error, CallFailedError) and error.kind == "transient"),
            before_sleep=count,
            reraise=True,
        )

        async def once() -> T:  # tenacity awaits coroutine functions only
            return await call()

        return await trying(once)

    def _wait(self, state: RetryCallState) -> float:
        error = state.outcome.exception() if state.outcome is not None else None
        asked = error.retry_after_s if isinstance(error, CallFailedError) else None
        if asked is not None:
            # All callers got the same `Retry-After`; the jitter keeps them from coming back at the same moment.
            return min(asked, self.honour_s) + self.first_s * self.jitter()
        return min(self.first_s * 2.0 ** (state.attempt_number - 1), self.ceiling_s) * self.jitter()


@dataclass(eq=False)
class Breaker:
    """Circuit breaker: keeps callers from a judge that fails every time."""

    deadline_s: float
    """max seconds of failures without a success before the judge counts as down"""
    _: KW_ONLY
    threshold: int = 8
    """failures in a row that open the circuit"""
    cool_s: float = 1.0
    """time until the first probe; doubles with every probe"""
    coolest_s: float = 30.0
    """max time between probes"""
    clock: Clock = field(default_factory=Clock)
    failures: int = field(default=0, init=False)
    since: float | None = field(default=None, init=False)
    """start of the failures in a row"""
    last: str = field(default="", init=False)

    def __post_init__(self) -> None:
        self._cool_s, self._until, self._probing = self.cool_s, 0.0, False

    @property
    def open(self) -> bool:
        return self.failures >= self.threshold

    async def admit(self) -> None:
        """Wait until one may call. Raises CoachDownError if the circuit stays open past the deadline."""
        while self.open:
            now = self.clock.now()
            if self.since is not None and now - self.since >= self.deadline_s:
                raise CoachDownError(
                    f"it has failed {self.failures} times in a row within {now - self.since:.0f} s, the last time by "
                    f"{self.last}"
                )
            if now >= self._until and not self._probing:
                self._probing = True  # this one finds out for all others
                return
            # The others look again when the probe may be back; short, since nothing wakes them.
            await self.clock.sleep(min(max(self._until - now, 0.05), 1.0))

    def succeeded(self) -> None:
        self.failures, self.since, self._cool_s, self._probing = 0, None, self.cool_s, False

    def failed(self, why: str) -> None:
        now = self.clock.now()
        self.since = now if self.since is None else self.since
        self.failures += 1
        self.last, self._probing = why, False
        if self.open:
            self._until = now + self._cool_s
            self._cool_s = min(2 * self._cool_s, self.coolest_s)

    def left(self) -> None:
        """A call ended without saying anything about the judge: it was cancelled."""
        self._probing = False
