"""Answers to requests of the Tinker API, which clients fetch later: kept until then, within bounds for each key."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

from mafrt.core.errors import CheckpointError, ConfigError, MafrtError, PromptTooLongError
from mafrt.core.text import error_line, shortened
from mafrt.environment.local_server import RefusedError
from mafrt.scripts.tinker_server.checkpoints import dumps
from mafrt.scripts.tinker_server.limits import Limits, refused

log = logging.getLogger(__name__)


def digest_of(request: bytes) -> bytes:
    return hashlib.sha256(request).digest()


@dataclass(eq=False)
class Result:
    """The answer to a request, or the promise of it."""

    id: str
    owner: str
    digest: bytes
    """of the request, by which a repetition is known"""
    work: int = 1
    """samples that it waits for, or 1"""
    request_bytes: int = 0
    ready: asyncio.Event = field(default_factory=asyncio.Event)
    content: bytes = b""
    binary: bool = False
    """whether the content is a protocol buffer"""
    failed: bool = False
    refusal: RefusedError | None = None
    """why it was refused at once"""
    forget: Callable[[], None] = lambda: None
    """removes it from where it is known by number"""
    cancel: Callable[[], None] = lambda: None


class Results:
    """The results of all clients."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.by_id: dict[str, Result] = {}
        self._kept: dict[str, OrderedDict[Result, None]] = defaultdict(OrderedDict)
        """owner -> results that are ready, those that go first in front"""
        self._kept_bytes: dict[str, int] = defaultdict(int)
        self._work: dict[str, int] = defaultdict(int)
        """owner -> samples and requests that wait"""
        self._request_bytes: dict[str, int] = defaultdict(int)
        """owner -> bytes of these requests"""
        self._polls: dict[str, list[asyncio.Future[bool]]] = {}
        """owner -> connections on which it waits, the oldest first"""

    def new(self, owner: str, name: str, request: bytes, work: int = 1) -> Result:
        """The promise of the result of a request. Raises RefusedError (429) for an owner that waits for too many."""
        if self._work[owner] + work > self.limits.waiting:
            raise refused(f"{self.limits.waiting} of your requests and samples wait; ask again later", 429)
        if self._request_bytes[owner] + len(request) > self.limits.waiting_mib * 2**20:
            raise refused(f"{self.limits.waiting_mib:g} MiB of your requests wait; ask again later", 429)
        result = Result(name, owner, digest_of(request), work, len(request))
        self.by_id[name] = result
        self._work[owner] += work
        self._request_bytes[owner] += len(request)
        return result

    async def wait(self, owner: str, event: asyncio.Event, timeout_s: float) -> None:
        """Wait on a connection of an owner, until `make_room` needs it at the latest."""
        poll: asyncio.Future[bool] = asyncio.ensure_future(event.wait())
        self._polls.setdefault(owner, []).append(poll)
        try:
            await asyncio.wait([poll], timeout=timeout_s)
        finally:
            poll.cancel()
            self._polls[owner].remove(poll)
            if not self._polls[owner]:
                del self._polls[owner]

    def make_room(self) -> bool:
        """Answer the oldest wait of the owner that has most, who then asks again; False: nobody waits."""
        polls = max(self._polls.values(), key=len, default=[])
        waiting = next((poll for poll in polls if not poll.done()), None)
        return waiting is not None and waiting.cancel()

    def finish(self, result: Result, content: bytes, *, binary: bool = False, failed: bool = False) -> None:
        """A result is there; of too many that nobody fetches the oldest are dropped."""
        result.content, result.binary, result.failed = content, binary, failed
        self._work[result.owner] -= result.work
        self._request_bytes[result.owner] -= result.request_bytes
        result.ready.set()
        if self.by_id.get(result.id) is not result:  # its session has ended
            return
        of_owner = self._kept[result.owner]
        of_owner[result] = None
        self._kept_bytes[result.owner] += len(content)
        most = self.limits.kept_mib * 2**20
        while len(of_owner) > 1 and (len(of_owner) > self.limits.kept or self._kept_bytes[result.owner] > most):
            self.drop(next(iter(of_owner)))

    def fail(self, result: Result, error: BaseException) -> None:
        """The result is an error, told as the client's or as the server's."""
        if isinstance(error, OSError) and not isinstance(error, MafrtError):  # whose text names the server's folders
            log.error("a request failed, since the server's disk refuses it: %s", error)
            error = CheckpointError(
                f"the disk of the server refuses to write ({error.strerror or 'no reason given'}); what it holds is as "
                "it was: ask again once there is room"
            )
        user = isinstance(
            error, (RefusedError, CheckpointError, ConfigError, PromptTooLongError, asyncio.CancelledError)
        )
        if not user:
            log.error("a request failed", exc_info=error)
        message = "the request was cancelled" if isinstance(error, asyncio.CancelledError) else error_line(error)
        self.finish(result, dumps({"error": message, "category": "user" if user else "server"}), failed=True)

    def drop(self, result: Result) -> None:
        """Forget a result."""
        self.by_id.pop(result.id, None)
        result.forget()
        if result in (of_owner := self._kept[result.owner]):
            del of_owner[result]
            self._kept_bytes[result.owner] -= len(result.content)

    def of(self, owner: str, name: str) -> Result:
        """Raises RefusedError for one that is not there, or somebody else's."""
        found = self.by_id.get(name)
        if found is None or found.owner != owner:
            raise refused(f"there is no request {shortened(name)} of yours whose result is kept", 404)
        return found

    def fetched(self, result: Result) -> None:
        """The client has the result: it is the first to be dropped."""
        if result in (of_owner := self._kept[result.owner]):
            of_owner.move_to_end(result, last=False)
