"""One engine for many callers: requests that arrive together are sampled as one batch, mixed over agents."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future

from mafrt.core.types import Completion, Request
from mafrt.engines import Engine

Job = tuple[Request, "Future[Completion]"]


class EngineQueue:
    """An engine in a thread of its own; itself an engine for threads that wait.

    Args:
        engine: samples; only this thread calls it.
        rows: max requests of one batch.
        settle_s: seconds to wait for further requests after the first.
    """

    def __init__(self, engine: Engine, *, rows: int = 256, settle_s: float = 0.003) -> None:
        self.engine, self.rows, self.settle_s = engine, rows, settle_s
        self._jobs: queue.Queue[Job | None] = queue.Queue()
        self._thread = threading.Thread(target=self._run, daemon=True, name="mafrt-engine")
        self._thread.start()

    def submit(self, request: Request) -> Future[Completion]:
        """The completion to come."""
        future: Future[Completion] = Future()
        self._jobs.put((request, future))
        return future

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """Completions of several requests, which may share a batch with those of other callers."""
        return [future.result() for future in [self.submit(request) for request in requests]]

    def close(self) -> None:
        self._jobs.put(None)
        self._thread.join(timeout=30)

    def _run(self) -> None:
        going = True
        while going:
            batch, going = self._batch()
            if batch:
                self._answer(batch)

    def _batch(self) -> tuple[list[Job], bool]:
        """The next batch, and whether more may come."""
        first = self._jobs.get()
        if first is None:
            return [], False
        batch, deadline = [first], time.monotonic() + self.settle_s
        while len(batch) < self.rows:
            try:
                job = self._jobs.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                break
            if job is None:
                return batch, False
            batch.append(job)
        return batch, True

    def _answer(self, batch: list[Job]) -> None:
        live = [(request, future) for request, future in batch if future.set_running_or_notify_cancel()]
        try:
            completions = self.engine.generate([request for request, _ in live]) if live else []
        except Exception as error:  # the callers get it; the queue goes on
            for _, future in live:
                future.set_exception(error)
            return
        for (_, future), completion in zip(live, completions, strict=True):
            future.set_result(completion)
