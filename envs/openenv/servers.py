"""Servers that speak OpenEnv's protocol: a WebSocket each session, JSON messages of a `type` and `data`.

Nothing of the package `openenv` is needed. What a server sends is bounded in size and time and checked before it is
used; one that does not answer, or answers wrongly, is set aside, and its episodes are played again on another one.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mafrt.core.errors import ConfigError, DataError, EnvDownError, EnvError
from mafrt.core.extras import package
from mafrt.core.http_request import StatusError, http_request, is_http_address
from mafrt.core.reading import parse_json
from mafrt.core.text import clean_deep, error_line, shortened
from mafrt.environment.replayed import LostError

LARGEST = 16 << 20
"""Bytes of one message."""
CONNECT_S = 10.0
"""for a connection, and for a description"""
ASIDE_S = 5.0
"""for which a server is set aside"""
PATIENCE_S = 45.0
"""without any server until the run gives up; with the last connection less than a call may take (--env_timeout_s), so
that the reason is told"""
MOST_ERRORS = 10
"""of an action that are told to its agent"""
MOST_BROKEN = 5
"""Wrong replies after which a server is left for the rest of the run."""


@dataclass(eq=False)
class Server:
    """One address."""

    address: str
    sessions: int = 0
    until: float = 0.0
    """when it may be tried again"""
    broken: int = 0
    why: str = ""
    """it was set aside"""


class Servers:
    """The servers of one environment.

    Args:
        addresses: `http://HOST:PORT` or `https://...`, each of the same environment.
        token: sent as a bearer token.
        timeout_s: deadline of a reset or a step.

    Raises:
        EnvError: an address is none.
        MissingExtraError: websockets is not installed.
    """

    def __init__(self, addresses: Sequence[str], token: str | None, timeout_s: float) -> None:
        package("an environment of OpenEnv", "openenv", "websockets.sync.client")
        for address in addresses:
            if not is_http_address(address, bare=True):
                raise EnvError(f"{shortened(address, 200)!r} is no address of a server; expected http://HOST:PORT")
        self.servers = [Server(address.rstrip("/")) for address in dict.fromkeys(addresses)]
        self.headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        self.timeout_s = timeout_s
        self._lock = threading.Lock()

    def describe(self) -> dict[str, Any]:
        """The JSON schemas of the environment: `action`, `observation`. They must be the same everywhere.

        Raises:
            EnvError: a server does not describe itself as one of OpenEnv, or another environment than the first.
            EnvDownError: none answers.
        """
        found: dict[str, Any] | None = None
        for server in self.servers:
            try:
                schemas = self._get(server, "/schema")
            except OSError as error:
                self._aside(server, f"cannot be reached ({error_line(error)})")
                continue
            action = schemas.get("action") if isinstance(schemas, dict) else None
            if not isinstance(action, dict):
                raise EnvError(f"{server.address} is no server of OpenEnv 0.2 or newer: /schema has no action")
            if found is not None and found["action"] != action:
                raise EnvError(f"{server.address} serves another environment than {self.servers[0].address}")
            found = found or schemas
        if found is None:
            raise EnvDownError(f"no server answers: {self._reasons()}; start one, or give another address")
        return found

    def _get(self, server: Server, path: str) -> Any:
        url = server.address + path
        try:
            return parse_json(http_request(url, headers=self.headers, within_s=CONNECT_S, most=LARGEST))
        except StatusError as error:
            raise EnvError(f"{url} answers {error.status}; is it a server of OpenEnv?") from None
        except (DataError, ConfigError, ValueError) as error:
            raise EnvError(f"{url} is no JSON ({error_line(error)})") from None

    def open(self) -> Session:
        """A session on the least busy server that answers.

        Raises:
            EnvDownError: none has answered for `PATIENCE_S`.
        """
        end = time.monotonic() + PATIENCE_S
        while True:
            now = time.monotonic()
            with self._lock:
                ready = [server for server in self.servers if server.until <= now and server.broken < MOST_BROKEN]
                server = min(ready, key=lambda each: each.sessions, default=None)
                if server is not None:
                    server.sessions += 1
            if server is None:
                if all(each.broken >= MOST_BROKEN for each in self.servers) or now > end:
                    raise EnvDownError(f"no server is left: {self._reasons()}")
                time.sleep(0.1)
                continue
            try:
                return Session(self, server)
            except LostError:
                self.leave(server)

    def _aside(self, server: Server, why: str) -> None:
        with self._lock:
            server.until, server.why = time.monotonic() + ASIDE_S, why

    def lost(self, server: Server, why: str, *, broken: bool = False, late: bool = False) -> LostError:
        """Set a server aside. `broken`: it answered, and not as an environment does; `late`: not in time."""
        server.broken += broken
        self._aside(server, why)
        return LostError(f"{server.address} {why}", late=late)

    def leave(self, server: Server) -> None:
        """A session has ended."""
        with self._lock:
            server.sessions -= 1

    def _reasons(self) -> str:
        return "; ".join(f"{server.address} {server.why or 'is busy'}" for server in self.servers)


class Session:
    """One episode's connection."""

    def __init__(self, servers: Servers, server: Server) -> None:
        from websockets.sync.client import connect

        self._servers, self.server = servers, server
        address = "ws" + server.address.removeprefix("http") + "/ws"
        try:
            self._socket = connect(
                address, additional_headers=servers.headers, open_timeout=CONNECT_S, max_size=LARGEST, proxy=None
            )
        except Exception as error:  # of sockets, TLS and the handshake, each a class of its own
            raise servers.lost(server, f"cannot be reached ({type(error).__name__}: {error_line(error)})") from None
        self._open = True

    def ask(self, kind: str, data: dict[str, Any]) -> dict[str, Any]:
        """The reply to a message: `observation`, `reward`, `done`.

        Raises:
            ActionError: the action does not have the form that the server takes.
            EnvError: the environment raised.
            LostError: the server did not answer in time, or what it said is no reply.
        """
        try:
            if unasked := self._waiting():
                raise self.broken(f"a message that was not asked for ({shortened(repr(unasked), 40)})")
            self._send(json.dumps({"type": kind, "data": data}))
            received = self._socket.recv(timeout=self._servers.timeout_s)
        except LostError:
            raise
        except Exception as error:
            why = f"was lost ({type(error).__name__}: {error_line(error)})"
            # What this side ended the connection for: a frame that is none, or a message that is too large.
            broken = getattr(getattr(error, "sent", None), "code", None) in (1002, 1007, 1009)
            late = isinstance(error, TimeoutError)
            raise self._servers.lost(self.server, why, broken=broken, late=late) from None
        try:
            reply = parse_json(received)
        except (DataError, ConfigError, ValueError) as error:
            raise self.broken(f"no JSON ({error_line(error)})") from None
        body = reply.get("data") if isinstance(reply, dict) else None
        if not isinstance(body, dict):
            raise self.broken("no message with data")
        if reply.get("type") == "error":
            self._refuse(body)
        if reply.get("type") != "observation" or not isinstance(body.get("observation"), dict):
            raise self.broken(f"a message of type {shortened(repr(reply.get('type')), 40)}, expected an observation")
        reward = body.get("reward")
        if reward is not None and (not isinstance(reward, (int, float)) or not abs(reward) < 1e9):
            raise self.broken(f"a reward that is no number ({shortened(repr(reward), 40)})")
        if not isinstance(body.get("done", False), bool):
            raise self.broken("done, which is neither true nor false")
        try:
            cleaned: dict[str, Any] = clean_deep(body)
        except ValueError as error:
            raise self.broken(f"an observation that cannot be read: {error_line(error)}") from None
        return cleaned

    def _waiting(self) -> str | bytes | None:
        """A message that is there before anything is asked: it would be taken for the reply."""
        with contextlib.suppress(TimeoutError):
            return self._socket.recv(timeout=0)
        return None

    def _send(self, text: str) -> None:
        """Ends the connection where a server does not read in time, as sending would wait for ever."""

        def end() -> None:
            with contextlib.suppress(OSError):
                self._socket.socket.shutdown(socket.SHUT_RDWR)

        late = threading.Timer(self._servers.timeout_s, end)
        late.daemon = True
        late.start()
        try:
            self._socket.send(text)
        finally:
            late.cancel()

    def _refuse(self, body: dict[str, Any]) -> None:
        """Raise what an error message means."""
        code, why = body.get("code"), shortened(" ".join(str(body.get("message", "")).split()), 400)
        if code == "VALIDATION_ERROR":
            errors = body.get("errors")
            parts = [
                f"{'.'.join(map(str, each['loc'])) if isinstance(each.get('loc'), list) else ''}: {each.get('msg')}"
                for each in (errors[:MOST_ERRORS] if isinstance(errors, list) else [])
                if isinstance(each, dict)
            ]
            raise ActionError(shortened("; ".join(parts) or why, 400))
        if code in ("CAPACITY_REACHED", "SESSION_ERROR", "FACTORY_ERROR"):
            raise self._servers.lost(self.server, f"opens no session ({why})")
        raise EnvError(f"the environment on {self.server.address} failed: {why}")

    def broken(self, what: str) -> LostError:
        """Count a reply that breaks the protocol, and set the server aside."""
        return self._servers.lost(self.server, f"breaks the protocol: found {what}", broken=True)

    def close(self) -> None:
        """End the session. May be called more than once."""
        if self._open:
            self._open = False
            self._servers.leave(self.server)
            from websockets.exceptions import WebSocketException

            with contextlib.suppress(OSError, WebSocketException):  # it may be gone, which is what is wanted
                self._send('{"type": "close"}')
                self._socket.close()


class ActionError(Exception):
    """An action that the environment does not take; the text says why."""


def token_of(name: str | None) -> str | None:
    """The token in an environment variable. Raises ConfigError if it is not set."""
    if name is None:
        return None
    if not os.environ.get(name):
        raise ConfigError(f"token_env names the environment variable {name}, which is not set")
    return os.environ[name]
