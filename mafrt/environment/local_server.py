"""The checks of every local HTTP server before it answers: caller, content type, size and time.

A server on loopback can be reached by any page that the user's browser shows: a page may point its own name at this
machine (DNS rebinding), or send a request whose answer it does not need. So the names of host and origin, and the type
of a body, are checked here, in one place for all servers. Bodies are read within a size and a time, and connections are
bounded in number, so that a client which does nothing holds no place.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import re
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from mafrt.core.errors import ConfigError
from mafrt.core.text import clean_deep, shortened

LOOPBACK = ("127.0.0.1", "localhost", "::1")
_HOST = re.compile(r"(\[[0-9a-fA-F:.]+\]|[A-Za-z0-9._-]+)(?::[0-9]{1,5})?")

BODY_S = 30.0
"""for a whole body"""
HEAD_BYTES = 65536
"""of the head of a request"""
HEAD_S = 30.0
"""for the head of a connection's first request"""
STALLED_S = 1.0
"""without a byte of a body, after which a request makes room for others; one of this machine is silent for no longer"""
ARRIVING_MIB = 256
"""of all requests together that have not arrived"""
IDLE_S = 75
"""of a connection between two requests; clients that find it closed open another"""
CLOSING_S = 3
"""for the calls that are open when a server ends"""
UNREAD_S = 30.0
"""without a byte being read of an answer that waits for its client, after which the connection ends"""
UNREAD_MIB = 256
"""of all answers together that wait for their clients"""


class RefusedError(Exception):
    """A request that is not answered; the text says why."""

    def __init__(self, status: int, why: str) -> None:
        super().__init__(why)
        self.status = status


def check_caller(headers: Sequence[tuple[str, str]], host: str, *, body: bool = False, token: bool = False) -> None:
    """Refuse a request that a page of another site may have sent.

    Args:
        headers: names, in small letters, and values of the request.
        host: address at which the server was reached. A name of this machine must stand in the request, too.
        body: whether the request has a body, which must then be JSON.
        token: whether a token protects the server, which may then be called by any name unless it is on loopback.

    Raises:
        RefusedError: 403 or 415.
    """
    given: dict[str, list[str]] = {}
    for name, value in headers:
        given.setdefault(name, []).append(value)
    hosts = given.get("host", [])
    if len(hosts) != 1:
        raise RefusedError(403, f"a request needs one Host header, found {len(hosts)}")
    asked = _name(hosts[0])
    names = LOOPBACK if host in LOOPBACK else (*LOOPBACK, host)
    anyone = token and host not in LOOPBACK
    if asked is None or not (anyone or asked in names):
        raise RefusedError(
            403, f"this server answers to {', '.join(names)}, not to the Host {shortened(hosts[0])!r}; use one of these"
        )
    for origin in given.get("origin", []):
        # A page of an application has a scheme of its own, and `localhost` for its name.
        scheme, _, place = origin.lower().partition("://")
        page = _name(place) if scheme in ("http", "https") else None
        if page is None or not (page == asked or page in LOOPBACK):
            raise RefusedError(403, f"pages of {shortened(origin)!r} may not call this server")
    if any("cross-site" in site.lower() for site in given.get("sec-fetch-site", [])):
        raise RefusedError(403, "pages of other sites may not call this server")
    if not body:
        return
    kinds = given.get("content-type", [])
    # A body without a type comes from a browser too, but then with an origin.
    if not kinds and "origin" not in given and "sec-fetch-site" not in given:
        return
    kind = kinds[0].partition(";")[0].strip().lower() if len(kinds) == 1 else ""
    if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
        raise RefusedError(
            415, f"the content type must be application/json, found {shortened(', '.join(kinds)) or 'none'}"
        )


def _name(host: str) -> str | None:
    """The name in `NAME:PORT`, in small letters; None where it is anything else."""
    found = _HOST.fullmatch(host)
    return found[1].strip("[]").lower() if found else None


async def read_json(request: Any, most_mib: float, timeout_s: float = BODY_S) -> Any:
    """The body of a Starlette request as JSON whose texts are valid Unicode.

    Raises:
        RefusedError: it is larger than `most_mib` (413), not there within `timeout_s` (408), or no JSON (400).
    """
    return parse_body(await read_body(request, most_mib, timeout_s))


async def read_body(request: Any, most_mib: float, timeout_s: float = BODY_S) -> bytes:
    """The body of a Starlette request. Raises RefusedError as `read_json`."""
    from starlette.requests import ClientDisconnect

    most, content = int(most_mib * 2**20), bytearray()
    too_large = RefusedError(413, f"the request is larger than {most_mib:g} MiB; shorten it")
    told = request.headers.get("content-length", "")
    if told.isdecimal() and (len(told) > 18 or int(told) > most):
        raise too_large
    try:
        async with asyncio.timeout(timeout_s):
            async for chunk in request.stream():
                content += chunk
                if len(content) > most:
                    raise too_large
    except TimeoutError:
        raise RefusedError(408, f"the request did not arrive within {timeout_s:g} s") from None
    except ClientDisconnect:
        raise RefusedError(400, "the client left before the request was whole") from None
    return bytes(content)


def parse_body(content: bytes) -> Any:
    """The JSON in a body. Raises RefusedError (400)."""
    try:
        return clean_deep(json.loads(content, parse_constant=_no_number, parse_float=_finite))
    except RecursionError:
        raise RefusedError(400, "the request is nested too deeply") from None
    except ValueError as error:
        raise RefusedError(400, f"the request is not JSON that can be used ({shortened(str(error), 160)})") from None


_TCP_CLOSE = 7
"""state of a connection in the kernel: over, by a reset where this side has not closed it"""


def _no_number(name: str) -> float:
    raise ValueError(f"{name} is no number")


def _finite(digits: str) -> float:
    number = float(digits)
    if math.isinf(number):  # it could not be written as JSON again
        raise ValueError(f"{digits} is too large")
    return number


def bounded_server(
    app: Any,
    *,
    connections: int,
    make_room: Callable[[], bool] = lambda: False,
    ended: Callable[[Any, bool], None] = lambda client, unread: None,
    **more: Any,
) -> Any:
    """A uvicorn server that ends connections which do nothing, the oldest first when there are too many.

    After these go requests that have not arrived, so that half-sent ones keep nobody out; together they hold
    `ARRIVING_MIB` at most. Answers that their clients do not read are dropped after `UNREAD_S`, and hold `UNREAD_MIB`.

    A connection has one request at a time: a server that has begun on a second one does not see that its client leaves.

    Args:
        app: the ASGI application.
        connections: most connections at the same time.
        make_room: called in the event loop where all are in calls; ends a call and returns True, or returns False.
        ended: called in the event loop when a connection has ended, with its client's address and whether that client
            had left before it read all that was sent.
        more: further settings of `uvicorn.Config`.
    """
    import uvicorn
    from uvicorn.protocols.http.auto import AutoHTTPProtocol

    class Bounded(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
        """Knows since when it has had nothing to do."""

        idle_since: float
        last_byte_at: float
        """when its last bytes came"""
        head_bytes: int | None = None
        """of a head that is not whole"""
        body_bytes = 0
        """of a request that has not arrived"""
        framing_bytes = 0
        """between the parts of a body and behind it, beyond four for each of its own"""
        unread: tuple[int, asyncio.TimerHandle] | None = None
        """bytes of an answer that wait for the client, when they were last looked at, and the next look"""

        def connection_made(self, transport: Any) -> None:
            self.idle_since = time.monotonic()
            super().connection_made(transport)
            transport.set_write_buffer_limits(high=0)  # any byte that waits is told of
            self.loop.call_later(HEAD_S, self.end_without_head)
            if len(self.connections) > connections:
                others = [each for each in self.connections if each is not self and not each.transport.is_closing()]
                idle = sorted(
                    (each for each in others if each.idle), key=lambda each: (bool(each.unread), each.idle_since)
                )
                arriving = [each for each in others if each.arrives]
                # Of the client with most of them, the one that was silent for longest.
                count = Counter(each.caller for each in arriving)
                arriving.sort(key=lambda each: (-count[each.caller], each.heard))
                stalled = [each for each in arriving if time.monotonic() - each.heard >= STALLED_S]
                # At last the new one has to go: those in a call have been promised an answer.
                if idle or stalled or not make_room():
                    [*idle, *stalled, *arriving, self][0].transport.abort()  # nothing waits for its client any more

        @property
        def caller(self) -> bytes:
            """What a client names itself by."""
            given = dict(self.cycle.scope["headers"])
            return bytes(given.get(b"x-api-key") or given.get(b"authorization") or b"")

        @property
        def idle(self) -> bool:
            return self.cycle is None or bool(self.cycle.response_complete)

        @property
        def arrives(self) -> bool:
            return not self.idle and bool(self.cycle.more_body)

        def bound_bodies(self) -> None:
            """Close requests of the client with most bytes, its largest first, until the rest is within the bound."""
            arriving = [each for each in self.connections if each.arrives and not each.transport.is_closing()]
            while sum(each.body_bytes for each in arriving) > ARRIVING_MIB * 2**20:
                held: Counter[bytes] = Counter()
                for each in arriving:
                    held[each.caller] += each.body_bytes
                arriving.sort(key=lambda each: (held[each.caller], each.body_bytes))
                arriving.pop().transport.close()

        def pause_writing(self) -> None:
            super().pause_writing()
            self.look(first=True)
            unread = [each for each in self.connections if each.unread]
            while len(unread) > 1 and sum(each.unread[0] for each in unread) > UNREAD_MIB * 2**20:
                unread.sort(key=lambda each: each.unread[0])
                unread.pop().transport.abort()

        def resume_writing(self) -> None:
            super().resume_writing()
            self.forget_unread()

        def connection_lost(self, error: Exception | None) -> None:
            ended(self.client, error is not None or self.unread is not None or _is_reset(self.transport))
            super().connection_lost(error)
            self.forget_unread()

        def forget_unread(self) -> None:
            if self.unread is not None:
                self.unread[1].cancel()
                self.unread = None

        def look(self, *, first: bool = False) -> None:
            """End the connection if its client has read nothing since the last look."""
            left = _unread_bytes(self.transport)
            if not first and self.unread is not None and left >= self.unread[0]:
                self.transport.abort()
            else:
                self.unread = left, self.loop.call_later(UNREAD_S, self.look)

        def on_message_begin(self) -> None:
            self.head_bytes = 0
            super().on_message_begin()

        def on_header(self, name: bytes, value: bytes) -> None:
            if self.head_bytes is not None:  # else it stands behind the body, and changes nothing
                super().on_header(name, value)

        def on_headers_complete(self) -> None:
            self.head_bytes, self.framing_bytes = None, 0
            if not self.idle:
                self.transport.close()
            elif self.parser.should_upgrade():  # what follows would not be read as HTTP/1.1
                self.send_400_response("This server speaks HTTP/1.1 alone; turn the upgrade off in your client.")
            else:
                super().on_headers_complete()

        def on_body(self, body: bytes) -> None:
            self.framing_bytes -= 5 * len(body)
            super().on_body(body)

        def data_received(self, data: bytes) -> None:
            self.heard = time.monotonic()
            super().data_received(data)
            self.body_bytes = self.body_bytes + len(data) if self.arrives else 0
            if self.arrives:
                self.framing_bytes += len(data)
                if self.framing_bytes > HEAD_BYTES + len(data) and not hasattr(self, "conn"):  # h11 has its own bound
                    self.send_400_response("The chunks of the request hold too little.")
                self.bound_bodies()
            if self.head_bytes is not None:
                self.head_bytes += len(data)
                if self.head_bytes > HEAD_BYTES:
                    self.send_400_response("The head of the request is too large.")
            elif not self.idle and not self.cycle.more_body and hasattr(self, "conn"):
                # Where uvicorn has h11 and no httptools, further bytes wait; it would stop reading, and see no end.
                if len(self.conn.trailing_data[0]) > HEAD_BYTES:
                    self.transport.close()
                else:
                    self.flow.resume_reading()

        def send_400_response(self, why: str) -> None:
            if not self.transport.is_closing():  # what comes behind a request that was refused is none either
                super().send_400_response(why)

        def on_response_complete(self) -> None:
            self.idle_since = time.monotonic()
            super().on_response_complete()
            self.loop.call_later(HEAD_S + IDLE_S, self.end_idle)

        def end_without_head(self) -> None:
            if self.cycle is None and not self.transport.is_closing():
                self.transport.close()

        def end_idle(self) -> None:
            # A head that comes byte by byte has ended the server's own wait.
            if self.idle and time.monotonic() - self.idle_since >= HEAD_S + IDLE_S and not self.transport.is_closing():
                self.transport.close()

    settings = {"log_level": "error", "lifespan": "off", "access_log": False, "ws": "none", **more}
    waits: dict[str, Any] = {"timeout_keep_alive": IDLE_S, "timeout_graceful_shutdown": CLOSING_S}
    return uvicorn.Server(uvicorn.Config(app, http=Bounded, **waits, **settings))


def _is_reset(transport: Any) -> bool:
    """Whether the client's kernel has answered by a reset, as it does where a closed connection is written to.

    A client that has read all closes by a plain end. Where the system does not tell, a reset before the end is
    the connection's error.
    """
    connection = transport.get_extra_info("socket")
    if not hasattr(socket, "TCP_INFO") or connection is None:
        return False
    try:
        return bool(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == _TCP_CLOSE)
    except OSError:
        return False


def _unread_bytes(transport: Any) -> int:
    """Bytes that a connection's client has not taken, with those that the kernel holds where it tells."""
    waiting = int(transport.get_write_buffer_size())
    try:
        import fcntl
        import termios

        told = fcntl.ioctl(transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, bytes(4))
    except (ImportError, OSError):
        return waiting
    return waiting + int.from_bytes(told, sys.byteorder)


def listening(host: str, port: int) -> socket.socket:
    """A socket that listens; port 0 takes a free one. Raises ConfigError for an address that cannot be used."""
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        why = os.strerror(error.errno) if error.errno else error.strerror  # create_server adds to strerror
        raise ConfigError(f"port {port} of {host} cannot be used ({why}); give another one.") from None


def token_for(host: str, variable: str) -> str | None:
    """The token in an environment variable. Raises ConfigError for none where other machines can reach `host`."""
    token = os.environ.get(variable) or None
    if host not in LOOPBACK and token is None:
        raise ConfigError(f"host {host} can be reached from other machines; set a token in {variable}.")
    return token


def address(host: str, port: int) -> str:
    """`http://HOST:PORT`."""
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


class LocalServer:
    """An HTTP server in a thread of its own, from `listen` on."""

    host: str
    port: int

    def listen(self, app: Any, host: str, port: int, *, connections: int, thread: str, **more: Any) -> None:
        """Answer by an ASGI application. Raises ConfigError for an address that cannot be used."""
        self._socket = listening(host, port)
        self.host, self.port = host, int(self._socket.getsockname()[1])
        self._server = bounded_server(app, connections=most_connections(connections), **more)
        sockets = {"sockets": [self._socket]}
        self._thread = threading.Thread(target=self._server.run, kwargs=sockets, daemon=True, name=thread)
        self._thread.start()

    @property
    def url(self) -> str:
        """Address without a path."""
        return address(self.host, self.port)

    def close(self) -> None:
        """Stop listening and end the thread. May be called more than once."""
        self._server.should_exit = True
        self._thread.join(timeout=5)
        self._socket.close()

    def wait(self) -> None:
        """Block until the server ends."""
        while self._thread.is_alive():
            self._thread.join(timeout=0.5)


def most_connections(wanted: int) -> int:
    """Connections that leave the process half of its file descriptors."""
    try:
        import resource
    except ImportError:
        return wanted
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return wanted if soft == resource.RLIM_INFINITY else max(8, min(wanted, soft // 2))
