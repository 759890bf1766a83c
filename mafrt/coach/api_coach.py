"""A judge behind an API: many calls at once, none of them twice, none beyond the run's budget.

`judge` may be called from any thread. The calls run on an event loop in a thread of its own, which lives as long as
the coach, so that connections are kept.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

from mafrt.coach.api_errors import CallFailedError
from mafrt.coach.base import Case, Coach
from mafrt.coach.budget import Budget
from mafrt.coach.cache import VerdictCache, key_of
from mafrt.coach.judge_prompt import JudgeQuestion, make_ask
from mafrt.coach.parse_reply import UnreadableError, read_reply
from mafrt.coach.providers import Provider, Reply
from mafrt.coach.retry import Breaker, Retry
from mafrt.coach.rubric import Rubric
from mafrt.config.train_config import CoachConfig
from mafrt.core.errors import CoachDownError, CoachInterruptedError
from mafrt.core.progress import parts_done
from mafrt.core.types import Scored, Unscored, Verdict

log = logging.getLogger(__name__)

T = TypeVar("T")

REFUSED_MOST = 8
"""Calls that may be refused one after the other, from the first on, before the judge counts as set up wrongly."""


class RemoteCoach(Coach):
    """Asks a model behind an API.

    Args:
        provider: the judge's model.
        rubric: the criteria.
        settings: name, limits and concurrency. Its token limit is part of the cache's key, since the verdict may depend
            on it; its timeout is one call's.
        retry, breaker: when to try again.
        budget: limits of calls and money.
        cache: of verdicts, None for none.
    """

    bounded = True

    def __init__(
        self,
        provider: Provider,
        rubric: Rubric,
        settings: CoachConfig,
        *,
        retry: Retry,
        breaker: Breaker,
        budget: Budget,
        cache: VerdictCache | None = None,
    ) -> None:
        self.provider, self.rubric, self.cache = provider, rubric, cache
        self.name = f"{settings.coach}, rubric {rubric.name} {rubric.version}"
        self._short = settings.coach
        self._parameters = {"max_tokens": settings.coach_max_tokens}
        self._max_tokens, self._timeout_s = settings.coach_max_tokens, settings.coach_timeout
        self._concurrency = settings.coach_concurrency
        self._retry, self._breaker, self._budget = retry, breaker, budget
        self._slots: asyncio.Semaphore | None = None
        self._flights: dict[str, asyncio.Task[Verdict]] = {}
        self._structured = True
        self._cached = 0
        self._answered = 0
        self._refused = 0
        self._loop = _Loop()

    def judge(self, cases: Sequence[Case]) -> list[Verdict]:
        """Raises CoachDownError, BudgetSpentError or CoachInterruptedError."""
        judged = _Judged()
        return self._loop.run(self._judge(cases, judged), self.interrupted, lambda: parts_done(judged.taken()))

    def counts(self) -> dict[str, float]:
        return self._budget.counts() | {"cached": float(self._cached), "retries": float(self._retry.retries)}

    def restore(self, counts: Mapping[str, float]) -> None:
        self._budget.restore(counts)
        self._cached, self._retry.retries = int(counts.get("cached", 0)), int(counts.get("retries", 0))

    def close(self) -> None:
        self._loop.close(self.provider.close)
        if self.cache is not None:
            self.cache.close()

    async def _judge(self, cases: Sequence[Case], judged: _Judged) -> list[Verdict]:
        if self._slots is None:
            # Made within the loop's thread, since a semaphore belongs to the loop that waits on it.
            self._slots = asyncio.Semaphore(self._concurrency)
        tasks = [asyncio.ensure_future(self._one(case)) for case in cases]
        for task in tasks:
            task.add_done_callback(judged.add)
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()
            # Waited for, so that no call is under way when the budget is counted and saved.
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _one(self, case: Case) -> Verdict:
        """From the cache, from a call for an equal case that is under way, or from a call."""
        ask = make_ask(self.rubric, case)
        key = key_of(self._short, self.provider.where, self._parameters, self.rubric.version, ask.system, ask.user)
        flight = self._flights.get(key)
        # Equal cases of one batch (samples that say the same) cost one call.
        if flight is not None:
            self._cached += 1
            return await flight
        stored = self.cache.get(key) if self.cache is not None else None
        if stored is not None:
            self._cached += 1
            return stored
        flight = asyncio.ensure_future(self._kept(case, ask, key))
        self._flights[key] = flight
        flight.add_done_callback(lambda _: self._flights.pop(key, None))
        return await flight

    async def _kept(self, case: Case, ask: JudgeQuestion, key: str) -> Verdict:
        verdict = await self._asked(case, ask)
        # Failures are not kept, since the same question may be answered tomorrow.
        if self.cache is not None and isinstance(verdict, Scored):
            self.cache.put(key, verdict)
        return verdict

    async def _asked(self, case: Case, ask: JudgeQuestion) -> Verdict:
        """Ask, and once more where the reply cannot be read."""
        problem = ""
        # Once more with the reason: models often correct the form, and a third reply seldom differs from the second.
        for asked_again in (False, True):
            try:
                reply = await self._reply(case, ask.again(problem) if asked_again else ask)
            except CallFailedError as error:
                if error.kind == "dead":
                    raise CoachDownError(f"the coach {self._short} refuses: {error}") from error
                # One refusal may be about this text, such as a content filter; refusals from the start are about the
                # settings.
                if error.kind == "refused":
                    self._refuse(error)
                return Unscored(f"the call failed: {error}")
            try:
                if reply.problem is not None:
                    raise UnreadableError(reply.problem)
                verdict = read_reply(reply.text, cut=reply.cut, quoted=ask.quoted, analysis=ask.analysis)
            except UnreadableError as error:
                problem = str(error)
                continue
            self._answered += 1
            return verdict
        return Unscored(f"no verdict in two replies: {problem}")

    def _refuse(self, error: CallFailedError) -> None:
        self._refused += 1
        # With a single verdict the key, the model and the form are right, so later refusals are about texts.
        if not self._answered and self._refused >= REFUSED_MOST:
            raise CoachDownError(f"the coach {self._short} has refused every call so far: {error}") from error

    async def _reply(self, case: Case, ask: JudgeQuestion) -> Reply:
        """A reply in JSON; in the text form from a server that does not take a schema."""
        if self._structured:
            try:
                return await self._retry.run(lambda: self._call(ask))
            except CallFailedError as error:
                if error.kind != "refused":
                    raise
                # Perhaps it is the schema that is refused; the text form tells.
                reply = await self._retry.run(lambda: self._call(self._plain(case, ask)))
                # Later refusals are about the text and not about the schema, which was accepted before.
                if not self._answered and self._structured:
                    self._structured = False
                    log.warning("the coach %s takes no JSON schema (%s); it is asked for text", self._short, error)
                return reply
        return await self._retry.run(lambda: self._call(self._plain(case, ask)))

    def _plain(self, case: Case, ask: JudgeQuestion) -> JudgeQuestion:
        """The same question with the text form; the note of a second question stays."""
        return JudgeQuestion(make_ask(self.rubric, case, structured=False).system, ask.user, None)

    async def _call(self, ask: JudgeQuestion) -> Reply:
        """One call over the network: a place in the queue, a share of the budget, a limit on its time."""
        assert self._slots is not None
        try:
            await self._breaker.admit()
        except CoachDownError as error:
            raise CoachDownError(f"the coach {self._short} is down: {error}") from None
        async with self._slots:
            # Two bytes a token is more than any tokenizer needs for text, so the reservation is an upper bound.
            size = len(ask.system.encode("utf-8", "replace")) + len(ask.user.encode("utf-8", "replace"))
            share = await self._budget.reserve(size // 2 + 64, self._max_tokens)
            try:
                reply = await asyncio.wait_for(self.provider.ask(ask), self._timeout_s)
            except TimeoutError:
                share.unknown()
                why = f"no reply within {self._timeout_s:g} s"
                self._breaker.failed(why)
                raise CallFailedError("transient", why) from None
            except CallFailedError as error:
                # Without a status the request may have arrived and been paid for, so the most it can cost is counted.
                if error.status is None and error.kind == "transient":
                    share.unknown()
                else:
                    share.nothing()
                if error.kind == "transient":
                    self._breaker.failed(str(error))
                else:
                    self._breaker.succeeded()  # the judge is there, and answers
                raise
            # Cancelled amid the call: it may be paid for all the same.
            except BaseException:
                share.unknown()
                self._breaker.left()
                raise
            share.used(reply.tokens_in, reply.tokens_out)
            self._breaker.succeeded()
            return reply


class _Judged:
    """Number of verdicts since the last look; written by the coach's thread, read by the trainer's."""

    def __init__(self) -> None:
        self._all = self._seen = 0

    def add(self, task: asyncio.Task[Verdict]) -> None:
        self._all += 1

    def taken(self) -> int:
        before, self._seen = self._seen, self._all
        return self._seen - before


class _Loop:
    """An event loop in a thread of its own, begun when it is needed first."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def run(self, work: Coroutine[Any, Any, T], interrupted: Callable[[], bool], waiting: Callable[[], None]) -> T:
        """The result of `work`. When `interrupted()` becomes true it is cancelled: CoachInterruptedError.

        `waiting` is called five times a second until then.
        """
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(target=self._loop.run_forever, name="coach", daemon=True)
            self._thread.start()
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            # Woken five times a second: Ctrl-C must be noticed although a judge may think for minutes.
            while not concurrent.futures.wait([future], timeout=0.2).done:
                waiting()
                if interrupted():
                    raise CoachInterruptedError("the run was asked to stop while it was being judged")
            return future.result()
        finally:
            if not future.done():
                future.cancel()

    def close(self, last: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run `last`, then end the thread."""
        if self._loop is None or self._thread is None:
            return
        asyncio.run_coroutine_threadsafe(_quietly(last), self._loop).result(timeout=10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=10)
        if not self._thread.is_alive():
            self._loop.close()
        self._loop = self._thread = None


async def _quietly(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Closing a connection that broke may fail, which does no harm."""
    try:
        await work()
    except Exception as error:
        log.debug("closing the coach's connections: %s", error)
