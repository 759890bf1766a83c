"""One engine for many callers: requests that wait together are sampled as one batch, mixed over agents.

The local engine steps its batch here, so requests that come later enter while it runs, and answers leave as they end.
Any other engine samples a batch to its end, and requests that come meanwhile make the next batch.
"""

from __future__ import annotations

import itertools
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mafrt.core.errors import ModelError
from mafrt.core.types import Completion, Request
from mafrt.engines import Engine, forget

if TYPE_CHECKING:
    from mafrt.engines.local.engine import LocalEngine
    from mafrt.engines.local.running_batch import RunningBatch

log = logging.getLogger(__name__)

JOIN_STEPS = 8
"""Steps between two times at which requests enter a running batch: entering costs about as much as a step."""
WAIT_SHARE = 0.1
"""Longest wait for further requests, as a share of the time that the last batch took."""


class Answer(Future[Completion]):
    """A completion to come."""

    left = False
    """whether its caller has gone"""

    def leave(self) -> None:
        """The caller has gone: it is not begun, or ends with the next token."""
        self.left = True
        self.cancel()


@dataclass(eq=False)
class Job:
    """A request that waits, and the completion to come."""

    request: Request
    said: Callable[[Sequence[int]], None] | None = None
    """called in the engine's thread with all tokens so far, whenever there are more"""
    future: Answer = field(default_factory=Answer)


class EngineQueue:
    """An engine in a thread of its own; itself an engine for threads that wait.

    Args:
        engine: samples; only this thread calls it.
        rows: max requests of one batch.
        settle_s: a batch begins when no request has come for so many seconds.
    """

    def __init__(self, engine: Engine, *, rows: int = 256, settle_s: float = 0.003) -> None:
        self.engine, self.rows, self.settle_s = engine, rows, settle_s
        self._jobs: queue.Queue[Job | None] = queue.Queue()
        self._last_s = 0.0
        """seconds of the last batch"""
        self._numbers = itertools.count()
        self._again: list[Job] = []
        """for which there was no memory beside others"""
        self._closing = False
        self._thread = threading.Thread(target=self._run, daemon=True, name="mafrt-engine")
        self._thread.start()

    def submit(self, request: Request, on_tokens: Callable[[Sequence[int]], None] | None = None) -> Answer:
        """The completion to come. `on_tokens` is called with the tokens so far by an engine that can be stepped."""
        job = Job(request, on_tokens)
        self._jobs.put(job)
        return job.future

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """Completions of several requests, which may share a batch with those of other callers."""
        return [future.result() for future in [self.submit(request) for request in requests]]

    def close(self) -> None:
        self._jobs.put(None)
        self._thread.join(timeout=30)

    def _run(self) -> None:
        while not self._closing:
            if not (jobs := self._gathered()):
                continue
            started = time.monotonic()
            if getattr(self.engine, "joins", False):
                self._step_through(self.engine, jobs)  # type: ignore[arg-type]
            else:
                self._sample(jobs)
            self._last_s = time.monotonic() - started

    # ------------------------------------------------------------------------------------------------- gathering

    def _gathered(self) -> list[Job]:
        """The requests of the next batch: as long as they come in quick succession, and there is room."""
        if self._again:
            jobs, self._again = self._again[: self.rows], self._again[self.rows :]
            return jobs
        jobs = self._waiting(self.rows, block=True)
        deadline = time.monotonic() + max(self.settle_s, WAIT_SHARE * self._last_s)
        while jobs and len(jobs) < self.rows and not self._closing:
            left = min(self.settle_s, deadline - time.monotonic())
            if left <= 0 or not (more := self._waiting(self.rows - len(jobs), block=True, timeout=left)):
                break
            jobs += more
        return jobs

    def _waiting(self, most: int, *, block: bool, timeout: float | None = None) -> list[Job]:
        """Up to `most` requests that have come; those whose callers have gone are left out."""
        jobs: list[Job] = []
        while len(jobs) < most:
            try:
                job = self._jobs.get(block and not jobs, timeout)
            except queue.Empty:
                break
            if job is None:
                self._closing = True
                break
            if job.future.set_running_or_notify_cancel():
                jobs.append(job)
        return jobs

    # -------------------------------------------------------------------------------------------------- sampling

    def _sample(self, jobs: Sequence[Job]) -> None:
        """Sample a batch to its end."""
        try:
            completions = self.engine.generate([job.request for job in jobs])
        except Exception as error:  # the callers get it; the queue goes on
            for job in jobs:
                job.future.set_exception(error)
            return
        for job, completion in zip(jobs, completions, strict=True):
            job.future.set_result(completion)

    def _step_through(self, engine: LocalEngine, jobs: Sequence[Job]) -> None:
        """Sample step by step until nothing is left; requests that come meanwhile enter."""
        running: dict[int, Job] = {}
        try:
            if not (first := self._entering(engine, jobs, running)):
                return
            batch = engine.begin(first)
            for step in itertools.count(1):
                for number, completion in engine.step(batch):
                    running.pop(number).future.set_result(completion)
                _tell(batch, running)
                _end_left(batch, running)
                if step % JOIN_STEPS == 0 and batch.live and not self._closing:
                    more = self._entering(engine, self._waiting(self.rows - batch.live, block=False), running)
                    if more:
                        engine.join(batch, more)
                if not batch.live:
                    return
        except Exception as error:
            self._fail(list(running.values()), error)

    def _fail(self, jobs: Sequence[Job], error: Exception) -> None:
        """Give callers the error. Where memory ran out, those who have heard nothing yet wait for half as many rows."""
        from mafrt.models.out_of_memory import let_go, out_of_memory

        again: list[Job] = []
        if out_of_memory(error):
            let_go(error)
            forget(self.engine)
            error = ModelError("there was no memory for this answer; ask again, for fewer tokens if it stays so")
            if len(jobs) > 1:
                again = [job for job in jobs if job.said is None]
                self.rows = len(jobs) // 2
                log.warning("Out of memory while sampling; %d requests run together from now on.", self.rows)
        self._again += again
        for job in jobs:
            if job not in again:
                job.future.set_exception(error)

    def _entering(self, engine: LocalEngine, jobs: Sequence[Job], running: dict[int, Job]) -> dict[int, Request]:
        """Number the requests; one that cannot be sampled fails alone."""
        entering: dict[int, Request] = {}
        for job in jobs:
            try:
                engine.check(job.request)
            except Exception as error:
                job.future.set_exception(error)
                continue
            number = next(self._numbers)
            running[number], entering[number] = job, job.request
        return entering


def _end_left(batch: RunningBatch, running: dict[int, Job]) -> None:
    """Have the rows end whose callers have gone."""
    left = {number for number, job in running.items() if job.future.left}
    for row in batch.rows if left else ():
        if row.member in left:
            row.limit = min(row.limit, len(row.ids) + 1)


def _tell(batch: RunningBatch, running: dict[int, Job]) -> None:
    """Hand the tokens so far to those who want to hear them."""
    listening = {number: job.said for number, job in running.items() if job.said is not None}
    for row in batch.rows if listening else ():
        on_tokens = listening.get(row.member)
        if on_tokens is not None:
            on_tokens(row.ids)
