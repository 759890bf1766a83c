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


class Retry:
    """Tries a call until it succeeds, cannot succeed, or `deadline_s` is over.

    Args:
        deadline_s: for all tries and the waits between them; no wait is begun that would end after it.
        first_s: ceiling of the first wait; it doubles from one to the next.
        ceiling_s: of every wait.
        honour_s: longest `Retry-After` that is waited for; more than that is cut to it.
        clock: where the time comes from.
        jitter: draws from 0..1.
    """

    def __init__(
        self,
        deadline_s: float,
        *,
        first_s: float = 1.0,
        ceiling_s: float = 30.0,
        honour_s: float = 120.0,
        clock: Clock | None = None,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self.deadline_s, self.first_s, self.ceiling_s, self.honour_s = deadline_s, first_s, ceiling_s, honour_s
        self.clock = clock or Clock()
        self.jitter = jitter
        self.retries = 0
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


class Breaker:
    """Keeps callers from a judge that fails every time.

    Args:
        deadline_s: how long it may fail without a success before it counts as down.
        threshold: failures in a row that open the circuit.
        cool_s: time until the first probe; it doubles from one to the next, up to `coolest_s`.
        clock: where the time comes from.
    """

    def __init__(
        self,
        deadline_s: float,
        *,
        threshold: int = 8,
        cool_s: float = 1.0,
        coolest_s: float = 30.0,
        clock: Clock | None = None,
    ) -> None:
        self.deadline_s, self.threshold, self.first_cool_s, self.coolest_s = deadline_s, threshold, cool_s, coolest_s
        self.clock = clock or Clock()
        self.failures = 0
        self.since: float | None = None
        """when the failures in a row began"""
        self.last = ""
        self._cool_s, self._until, self._probing = cool_s, 0.0, False

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
        self.failures, self.since, self._cool_s, self._probing = 0, None, self.first_cool_s, False

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
