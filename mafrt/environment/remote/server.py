"""Serves environments to trainers elsewhere: sessions of them behind gRPC, with a health check (grpc.health.v1).

Every session has an environment of its own; their number is bounded, and one that no client has used for a while is
closed, sooner where another client needs its place: a client that still wants it plays its episode again. User code
keeps the deadline of a worker process (`mafrt.environment.workers`), so a call always returns. A call gets a thread
when its request is there: calls that send none, or send it slowly, hold up nobody.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import secrets
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import grpc
import grpc.aio
from google.protobuf.message import DecodeError
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health

from mafrt.core.errors import ConfigError, EnvError, MafrtError
from mafrt.core.text import error_line
from mafrt.environment.remote import environment_pb2 as pb
from mafrt.environment.remote import rpc
from mafrt.environment.remote.messages import (
    LARGEST,
    LARGEST_REQUEST,
    PROTOCOL,
    pack_failure,
    pack_reset,
    pack_result,
    unpack_actions,
)
from mafrt.environment.session import Session, session_of

log = logging.getLogger(__name__)

LOOPBACK = ("127.0.0.1", "localhost", "::1")
SERVICE = "mafrt.environment.v1.Environment"
_THREADS = 32
_SPARE_S = 30.0
"""time without use after which a session may make room for another client's; below a client's patience"""
_LOOK_S = 0.1
"""interval in which a call that waits for its session looks whether its client is still there"""


_OPTIONS = (
    ("grpc.max_send_message_length", LARGEST),
    ("grpc.max_receive_message_length", LARGEST_REQUEST),
    # For a connection that says nothing, and for one without calls, whose client opens another.
    ("grpc.server_handshake_timeout_ms", 10_000),
    ("grpc.max_connection_idle_ms", 900_000),
)

Left = Callable[[], bool]
"""whether the client of a call has left it"""


class _RefusedError(Exception):
    """The call ends with this status and text."""

    def __init__(self, code: grpc.StatusCode, why: str) -> None:
        super().__init__(why)
        self.code, self.why = code, why


@dataclass(frozen=True)
class ServedEnv:
    """An environment of a server."""

    name: str
    env: Session
    held_out: Session | None
    """instances of evaluations; None: there are none of its own"""
    identity: str
    """hash of class, arguments and source"""
    timeout_s: float
    """longest duration of a call"""


@dataclass
class _Open:
    """A client's session."""

    session: Session
    used: float
    steps: int = 0
    last: pb.StepReply | None = None
    """reply of the last step, for a request that comes twice"""
    lock: threading.Lock = field(default_factory=threading.Lock)


class EnvironmentServer:
    """Listens from construction on.

    Args:
        served: the environment, or several of different names.
        host, port: address; port 0 takes a free one.
        token: that clients give; None only on loopback.
        max_sessions: sessions at a time.
        idle_s: seconds after which an unused session is closed.

    Raises:
        ConfigError: the address cannot be used, or others can reach it and there is no token.
    """

    def __init__(
        self,
        served: ServedEnv | Sequence[ServedEnv],
        *,
        host: str,
        port: int,
        token: str | None,
        max_sessions: int,
        idle_s: float = 900.0,
    ) -> None:
        if host not in LOOPBACK and token is None:
            raise ConfigError(f"host {host} can be reached from other machines; set a token in MAFRT_ENV_TOKEN.")
        self.served = {each.name: each for each in ([served] if isinstance(served, ServedEnv) else served)}
        self.max_sessions, self.idle_s = max_sessions, idle_s
        self._sessions: dict[str, _Open] = {}
        self._lock = threading.Lock()
        # Environments that do not wait for something outside are written for one thread.
        self._turn: Any = threading.Lock()
        self._threads = ThreadPoolExecutor(_THREADS)
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="environment-server", daemon=True).start()
        try:
            self.port = self._wait_for(self._start(f"{host}:{port}", token))
        except RuntimeError:
            self._end()
            raise ConfigError(f"{host}:{port} cannot be listened on; choose another port, or 0.") from None
        self.address = f"{host}:{self.port}"

    async def _start(self, address: str, token: str | None) -> int:
        """Listen; returns the port."""
        self._server = grpc.aio.server(interceptors=[_Token(token)] if token else [], options=_OPTIONS)
        rpc.serve(self, self._server, self._in_thread)
        self._health = health.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        await self._health.set(SERVICE, health_pb2.HealthCheckResponse.SERVING)
        port: int = self._server.add_insecure_port(address)
        await self._server.start()
        return port

    def _wait_for(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def _in_thread(
        self, method: Callable[[Any, Left], Any], read: Callable[[bytes], Any]
    ) -> Callable[[bytes, Any], Awaitable[Any]]:
        """A method as a coroutine of gRPC, which runs it in a thread."""

        def answer(request: bytes, left: Left) -> Any:
            try:
                asked = read(request)
            except DecodeError:
                raise _RefusedError(
                    grpc.StatusCode.INVALID_ARGUMENT, "the request is no message of this protocol"
                ) from None
            return method(asked, left)

        async def call(request: bytes, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
            left = threading.Event()
            try:
                return await self._loop.run_in_executor(self._threads, answer, request, left.is_set)
            except _RefusedError as refused:
                await context.abort(refused.code, refused.why)
            finally:
                left.set()

        return call

    def wait(self) -> None:
        """Block until the server is closed."""
        self._wait_for(self._server.wait_for_termination())

    def close(self) -> None:
        """Say that it is going, let calls in progress end, and close all sessions."""
        self._wait_for(self._health.enter_graceful_shutdown())
        self._wait_for(self._server.stop(grace=2.0))
        with self._lock:
            for opened in self._sessions.values():
                opened.session.close()
            self._sessions.clear()
        self._end()

    def _end(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._threads.shutdown(wait=False, cancel_futures=True)

    # ----------------------------------------------------------------------------------------------------- calls

    def Describe(self, request: pb.DescribeRequest, left: Left) -> pb.Description:
        # Of an environment that is not here the first is described, so that the client can tell what is.
        served = self.served.get(request.name) or next(iter(self.served.values()))
        env = served.env
        return pb.Description(
            protocol=PROTOCOL,
            name=served.name,
            names=self.served,
            agents=env.agents,
            num_tasks=-1 if env.num_tasks is None else env.num_tasks,
            max_steps=-1 if env.max_steps is None else env.max_steps,
            identity=served.identity,
            timeout_s=served.timeout_s,
            costly_reset=env.costly_reset,
            opponents=env.opponents,
            held_out=served.held_out is not None,
            max_sessions=self.max_sessions,
        )

    def Open(self, request: pb.OpenRequest, left: Left) -> pb.Session:
        served = self.served.get(request.name) if request.name else next(iter(self.served.values()))
        if served is None or request.identity not in ("", served.identity):
            raise _RefusedError(grpc.StatusCode.FAILED_PRECONDITION, "this server has other environments than it had")
        env = served.held_out if request.held_out else served.env
        if env is None:
            raise _RefusedError(grpc.StatusCode.INVALID_ARGUMENT, "this server has no held-out instances")
        with self._lock:
            if left():
                raise _RefusedError(grpc.StatusCode.CANCELLED, "the client has left")
            self._expire(self.idle_s)
            if len(self._sessions) >= self.max_sessions:
                self._expire(_SPARE_S, most=1)  # such as those of a client that was killed
            if len(self._sessions) >= self.max_sessions:
                raise _RefusedError(grpc.StatusCode.RESOURCE_EXHAUSTED, f"all {self.max_sessions} sessions are taken")
            name = secrets.token_hex(8)
            self._sessions[name] = _Open(session_of(env.spawn()), time.monotonic())
        return pb.Session(id=name)

    def Reset(self, request: pb.ResetRequest, left: Left) -> pb.ResetReply:
        with self._using(request.session, left) as opened:
            options = {"task": request.task} if request.HasField("task") else None
            opened.steps, opened.last = 0, None

            def reset() -> pb.ResetReply:
                return pack_reset(*opened.session.reset(seed=request.seed, options=options))

            return cast(pb.ResetReply, self._answer(opened.session, "reset", reset, pb.ResetReply, left))

    def Step(self, request: pb.StepRequest, left: Left) -> pb.StepReply:
        with self._using(request.session, left) as opened:
            if request.number == opened.steps - 1 and opened.last is not None:
                return opened.last
            if request.number != opened.steps:
                raise _RefusedError(
                    grpc.StatusCode.FAILED_PRECONDITION, f"step {request.number} after {opened.steps} steps"
                )

            try:
                actions = unpack_actions(request.actions)
            except ValueError as error:
                raise _RefusedError(grpc.StatusCode.INVALID_ARGUMENT, str(error)) from None

            def step() -> pb.StepReply:
                return pack_result(opened.session.step(actions))

            opened.last = self._answer(opened.session, "step", step, pb.StepReply, left)
            opened.steps += 1
            return opened.last

    def Close(self, request: pb.Session, left: Left) -> pb.Closed:
        with self._lock:
            opened = self._sessions.pop(request.id, None)
        if opened is not None:
            with opened.lock:
                opened.session.close()
        return pb.Closed()

    # --------------------------------------------------------------------------------------------------- sessions

    @contextmanager
    def _using(self, name: str, left: Left) -> Iterator[_Open]:
        with self._lock:
            opened = self._sessions.get(name)
        if opened is None:
            raise _RefusedError(grpc.StatusCode.NOT_FOUND, "no such session: idle for too long, or of another server")
        with _held(opened.lock, left):
            opened.used = time.monotonic()
            yield opened
            opened.used = time.monotonic()

    def _answer(
        self,
        session: Session,
        method: str,
        call: Callable[[], Any],
        reply: Callable[..., Any],
        left: Left,
    ) -> Any:
        """The reply of a call; an error of the environment is a reply too."""
        try:
            if session.blocking:
                return call()
            with _held(self._turn, left):
                return call()
        except MafrtError as error:
            return reply(failure=pack_failure(error))
        except (TypeError, ValueError, RecursionError) as error:
            failure = EnvError(
                f"{session.class_name}.{method}() returned a value that cannot be sent as JSON ({error_line(error)}); "
                "keep observations and info to texts, numbers, lists and dicts with text keys"
            )
            return reply(failure=pack_failure(failure))

    def _expire(self, unused_s: float, most: int | None = None) -> None:
        """Close sessions that no client has used for so many seconds, the oldest `most`. Called with the lock held."""
        old = time.monotonic() - unused_s
        unused = sorted((opened.used, name) for name, opened in self._sessions.items() if opened.used < old)
        for _, name in unused[:most]:
            opened = self._sessions[name]
            if opened.lock.acquire(blocking=False):
                del self._sessions[name]
                opened.session.close()
                opened.lock.release()


class _Token(grpc.aio.ServerInterceptor):
    """Refuses calls without the token; health checks need none."""

    def __init__(self, token: str) -> None:
        self._expected = f"Bearer {token}"

        async def refuse(_: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "the token is missing or wrong")

        self._refused = grpc.unary_unary_rpc_method_handler(refuse)

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Any]], details: Any) -> Any:
        if details.method.startswith("/grpc.health.v1.Health/"):
            return await continuation(details)
        given = dict(details.invocation_metadata).get("authorization", "")
        given = given if isinstance(given, str) else ""
        if hmac.compare_digest(given.encode(), self._expected.encode()):
            return await continuation(details)
        return self._refused


@contextmanager
def _held(lock: threading.Lock, left: Left) -> Iterator[None]:
    """Hold a lock, unless the client leaves before it is free: its call must not hold a thread, nor be made."""
    while not lock.acquire(timeout=_LOOK_S):
        if left():
            raise _RefusedError(grpc.StatusCode.CANCELLED, "the client has left")
    try:
        if left():
            raise _RefusedError(grpc.StatusCode.CANCELLED, "the client has left")
        yield
    finally:
        lock.release()
