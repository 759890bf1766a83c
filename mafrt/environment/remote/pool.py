"""The servers of one environment: which answer, which is the least busy, and which are set aside for a while.

A server that does not answer, answers too late or breaks the protocol is set aside, and tried again later; the episodes
that it held are played again on another one. The list may be a file, which is read again when it changes, so servers
can be exchanged while a run is going on.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from mafrt.core.errors import EnvDownError, EnvError
from mafrt.core.reading import read_list
from mafrt.core.text import clean_text, shortened
from mafrt.environment.contract import agents_problem
from mafrt.environment.remote import environment_pb2 as pb
from mafrt.environment.remote import rpc
from mafrt.environment.remote.messages import MOST_AGENTS, OPTIONS, PROTOCOL, TOKEN
from mafrt.environment.replayed import LostError

log = logging.getLogger(__name__)

CONNECT_S = 5.0
"""Seconds in which a server has to describe itself."""
MARGIN_S = 10.0
"""Seconds on top of a server's own deadline before a call counts as hanging."""
LOOK_S = 0.5
"""Seconds between two looks at the list of servers."""
MOST_BROKEN = 5
"""Broken replies after which a server is left for the rest of the run: a fault heals, a lie does not."""
LONGEST_CALL_S = 3600.0
"""Longest deadline that a server may ask for."""
MOST_COUNTED = 10**8
"""Tasks and steps that a server may claim: the order of all tasks is drawn in memory."""
_LONGEST_S = 60.0
"""Longest time for which a server is set aside before it is tried again."""


@dataclass(eq=False)
class Server:
    """One address."""

    address: str
    channel: grpc.Channel
    stub: rpc.EnvironmentStub
    described: pb.Description | None = None
    """None: it has not answered yet, or was set aside"""
    open: int = 0
    failures: int = 0
    """in a row"""
    again_at: float = 0.0
    """when it is tried again (`time.monotonic`)"""
    broken: int = 0
    """replies that broke the protocol or the contract, in all"""
    measures: set[str] = field(default_factory=set)
    """names of all that it has measured: each is a column of the run's metrics"""
    why: str = ""
    """why it was set aside"""


@dataclass(eq=False)
class ServerSession:
    """A session on a server."""

    server: Server
    session: str


class Servers:
    """All servers of one environment; shared by its sessions, also between threads.

    Args:
        addresses: `host:port`, or `@FILE` with one a line.
        name: the environment that they must serve; empty: any.
        patience_s: seconds to wait for a server when none is left.

    Raises:
        EnvError: no server answers, or one has another protocol, environment or token.
    """

    def __init__(self, addresses: list[str], name: str, patience_s: float = 60.0) -> None:
        self.name, self.patience_s = name, patience_s
        self._file = Path(addresses[0][1:]).expanduser() if addresses[0].startswith("@") else None
        self._looked = 0.0
        self._stamp: tuple[int, int] | None = None
        token = os.environ.get(TOKEN)
        self._metadata = (("authorization", f"Bearer {token}"),) if token else ()
        self._lock = threading.RLock()
        self._dropped: deque[ServerSession] = deque()
        self._closing: set[Any] = set()
        self.servers: dict[str, Server] = {}
        self.description: pb.Description | None = None
        self._set(addresses if self._file is None else self._listed())
        self._begin()

    def _begin(self) -> None:
        """Reach every server once; a wrong one is an error now, one that is down is not."""
        for server in self.servers.values():
            self._reach(server, strict=True)
        if self.description is None:
            told = "; ".join(f"{server.address}: {server.why}" for server in self.servers.values())
            raise EnvError(f"no environment server can be reached ({told}); start one with mafrt serve --env NAME")

    def _listed(self) -> list[str]:
        """Addresses of the file. Raises EnvError if it cannot be read or names none."""
        assert self._file is not None
        try:
            stat = self._file.stat()
            addresses = read_list(self._file)
        except (OSError, UnicodeDecodeError) as error:
            raise EnvError(f"the list of servers {self._file} cannot be read ({error})") from None
        self._stamp = (stat.st_mtime_ns, stat.st_size)
        if not addresses:
            raise EnvError(f"the list of servers {self._file} is empty; put one host:port on a line")
        return addresses

    def _set(self, addresses: list[str]) -> None:
        """Use exactly these servers; those that stay keep their sessions."""
        for address in addresses:
            if address not in self.servers:
                channel = grpc.insecure_channel(address, options=[*OPTIONS, ("grpc.enable_retries", 0)])
                self.servers[address] = Server(address, channel, rpc.EnvironmentStub(channel))
        for address in [known for known in self.servers if known not in addresses]:
            del self.servers[address]  # its channel closes when the last session on it has ended

    def _reach(self, server: Server, *, strict: bool) -> None:
        """Have a server describe itself, and check that it is one of ours."""
        try:
            reply = server.stub.Describe(
                pb.DescribeRequest(protocol=PROTOCOL, name=self.name), timeout=CONNECT_S, metadata=self._metadata
            )
        except grpc.RpcError as error:
            if error.code() == grpc.StatusCode.UNAUTHENTICATED:
                raise EnvError(f"the environment server {server.address} refuses the token; set {TOKEN}") from None
            self._aside(server, _said(error))
            return
        if problem := self._problem(reply):
            if strict:
                raise EnvError(f"the environment server {server.address} {problem}")
            self._aside(server, problem)
            return
        server.described, server.why = reply, ""
        self.description = self.description or reply

    def _problem(self, reply: pb.Description) -> str | None:
        """Why a server that answers cannot be used; None if it can."""
        if reply.protocol != PROTOCOL:
            return f"speaks version {reply.protocol} of the protocol, and this client version {PROTOCOL}; update one"
        if self.name and reply.name != self.name:
            return f"serves {_listed(reply.names or [reply.name])}, and {self.name!r} was asked for"
        if not self.name and len(reply.names) > 1:
            return f"serves {_listed(reply.names)}; name one of them, as in grpc://HOST:PORT/{shortened(reply.name)}"
        if not reply.agents:
            return "names no agents, so it is no environment of mafrt"
        if len(reply.agents) > MOST_AGENTS:
            return f"names {len(reply.agents)} agents; expected at most {MOST_AGENTS}"
        if wrong := agents_problem(tuple(reply.agents)):
            return f"names agents that are none: {shortened(wrong, 200)}"
        for name, count in (("tasks", reply.num_tasks), ("steps", reply.max_steps)):
            if count != -1 and not 1 <= count <= MOST_COUNTED:
                return f"has {count} {name}; expected 1 to {MOST_COUNTED}, or -1 for no number"
        if not 0 <= reply.timeout_s <= LONGEST_CALL_S:
            return f"asks for {reply.timeout_s:g} s for a call; expected at most {LONGEST_CALL_S:g} s (--env_timeout_s)"
        if self.description is not None and reply.identity != self.description.identity:
            return f"serves another {shortened(reply.name)!r} (other arguments or source); serve the same everywhere"
        return None

    def _aside(self, server: Server, why: str) -> None:
        with self._lock:
            wait_s = min(1.0 * 2 ** min(server.failures, 10), _LONGEST_S)
            if server.broken >= MOST_BROKEN:
                wait_s = math.inf
            server.failures += 1
            server.described, server.why, server.again_at = None, why, time.monotonic() + wait_s
        long = "for good" if math.isinf(wait_s) else f"for {wait_s:g} s"
        log.warning("the environment server %s is set aside %s: %s", server.address, long, why)

    # ----------------------------------------------------------------------------------------------------- sessions

    def open_session(self, held_out: bool) -> ServerSession:
        """A session on the least busy server.

        Raises:
            EnvDownError: no server has answered for `patience_s` seconds.
        """
        assert self.description is not None  # a server has been reached
        until = time.monotonic() + self.patience_s
        while True:
            self._clear()
            self._reread()
            with self._lock:
                for server in self.servers.values():
                    if server.described is None and server.again_at <= time.monotonic():
                        self._reach(server, strict=False)
                free = sorted(
                    (server for server in self.servers.values() if server.described is not None),
                    key=lambda server: server.open,
                )
            for server in free:
                try:
                    reply = server.stub.Open(
                        pb.OpenRequest(held_out=held_out, name=self.name, identity=self.description.identity),
                        timeout=self._deadline_s(server),
                        metadata=self._metadata,
                    )
                except grpc.RpcError as error:
                    if error.code() != grpc.StatusCode.RESOURCE_EXHAUSTED:
                        self._aside(server, _said(error))
                    else:
                        server.why = "all its sessions are taken"
                    continue
                with self._lock:
                    server.open += 1
                return ServerSession(server, reply.id)
            # A list in a file may still get others.
            hopeless = self._file is None and all(server.broken >= MOST_BROKEN for server in self.servers.values())
            if hopeless or time.monotonic() >= until:
                told = "; ".join(f"{server.address}: {server.why}" for server in self.servers.values())
                raise EnvDownError(f"no environment server is left ({told}); start them again, and go on with the run")
            time.sleep(0.2)

    def _reread(self) -> None:
        """Take over a list of servers that has changed; one that cannot be read leaves the old list."""
        if self._file is None or time.monotonic() < self._looked + LOOK_S:
            return
        self._looked = time.monotonic()
        try:
            stat = self._file.stat()
            if (stat.st_mtime_ns, stat.st_size) != self._stamp:
                with self._lock:
                    self._set(self._listed())
        except (OSError, EnvError) as error:
            log.warning("the servers stay as they are: %s", error)

    def call(self, seat: ServerSession, method: str, request: Any) -> Any:
        """A call of a session. Raises LostError if the session is gone, with its server or without it."""
        self._reread()
        server = seat.server
        if self.servers.get(server.address) is not server or server.described is None:
            raise LostError(server.address)
        try:
            reply = getattr(server.stub, method)(request, timeout=self._deadline_s(server), metadata=self._metadata)
        except grpc.RpcError as error:
            if error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED:  # a reply larger than any that is taken
                self.mark_broken(seat, _said(error))
            elif error.code() not in (grpc.StatusCode.NOT_FOUND, grpc.StatusCode.FAILED_PRECONDITION):
                self._aside(server, _said(error))
            late = error.code() == grpc.StatusCode.DEADLINE_EXCEEDED
            raise LostError(f"{server.address}: {_said(error)}", late=late) from None
        server.failures = 0
        return reply

    def mark_broken(self, seat: ServerSession, why: str) -> None:
        """Set a server aside whose reply breaks the protocol or the contract; after `MOST_BROKEN`, for good."""
        with self._lock:
            seat.server.broken += 1
        self._aside(seat.server, why)

    def leave(self, seat: ServerSession) -> None:
        """Give a session up; its server is told before the next one is opened. Safe in a finaliser."""
        self._dropped.append(seat)

    def _clear(self) -> None:
        while self._dropped:
            try:
                seat = self._dropped.popleft()
            except IndexError:
                return
            with self._lock:
                seat.server.open -= 1
            if seat.server.described is not None:
                close = seat.server.stub.Close
                call = close.future(pb.Session(id=seat.session), timeout=CONNECT_S, metadata=self._metadata)
                self._closing.add(call)  # gRPC cancels a call that nobody holds: the session would stay taken
                call.add_done_callback(self._closing.discard)

    @staticmethod
    def _deadline_s(server: Server) -> float:
        return (server.described.timeout_s if server.described is not None else CONNECT_S) + MARGIN_S


def _listed(names: Iterable[str]) -> str:
    """Names that a server gives, of which a line can hold so many characters."""
    return shortened(", ".join(repr(clean_text(name)) for name in names), 300)


def _said(error: Any) -> str:
    """One line about a failed call."""
    if error.code() == grpc.StatusCode.DEADLINE_EXCEEDED:
        return "it has not answered in time"
    text = " ".join(clean_text(str(error.details())).split())
    return f"{error.code().name.lower()}: {text[:200]}"
