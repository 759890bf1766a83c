"""The HTTP server of the chat API: Starlette on uvicorn, in a thread of its own.

Bounded: the size of a request, the calls in flight, and the time of a call. It listens on loopback unless told
otherwise, and needs a token on any other address.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import os
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol

from mafrt.core.errors import ConfigError, MissingExtraError
from mafrt.core.extras import install
from mafrt.core.text import error_line
from mafrt.environment.chat_api.protocol import (
    ApiError,
    ChatCall,
    ChatReply,
    EventStream,
    completion,
    model_list,
    parse_call,
)

LOOPBACK = ("127.0.0.1", "localhost", "::1")


Said = Callable[[str], None]
"""Takes a piece of a reply's text that is ready before the whole reply."""


class ChatModels(Protocol):
    """The side of a server that has the models. Methods run in the server's thread and must return at once."""

    def models(self, key: str) -> list[str]:
        """Names of models. `key` is the part of the address before `/v1`, empty without one. Raises ApiError."""

    def begin(self, key: str, call: ChatCall, said: Said) -> Future[ChatReply]:
        """Start answering a call. `said` may be called from any thread with pieces of the text. Raises ApiError."""

    def reward(self, key: str, body: Any) -> None:
        """Take a posted reward. Raises ApiError."""


@dataclass(frozen=True)
class Limits:
    """Bounds of a server."""

    body_mib: float = 8.0
    """max MiB of one request"""
    calls: int = 512
    """max calls in flight; further ones get status 429"""
    timeout_s: float = 600.0
    """max seconds of one call"""


class ChatServer:
    """A running server; `close` ends it.

    Args:
        answers: answers the calls.
        host, port: address; port 0 takes a free one.
        token: bearer token that every request must carry; None: none. Required for a host that is not loopback.
        limits: bounds.

    Raises:
        ConfigError: no token for an open address, or the address cannot be used.
        MissingExtraError: Starlette or uvicorn is missing.
    """

    def __init__(
        self,
        answers: ChatModels,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        token: str | None = None,
        limits: Limits = Limits(),
    ) -> None:
        if host not in LOOPBACK and not token:
            raise ConfigError(f"host {host} can be reached from other machines, so a token is needed.")
        try:
            import uvicorn
        except ImportError as error:
            raise MissingExtraError(f"The chat API is missing a package ({error}); run: {install('serve')}") from None
        self.answers, self.token, self.limits = answers, token, limits
        self.in_flight = 0
        try:
            self._socket = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        except OSError as error:
            why = os.strerror(error.errno) if error.errno else error.strerror  # create_server adds to strerror
            raise ConfigError(f"port {port} of {host} cannot be used ({why}); give another one.") from None
        self.host, self.port = host, int(self._socket.getsockname()[1])
        # A client's idle connection must outlast an update of the adapters, or its next call may meet its end.
        config = uvicorn.Config(
            self._app(), log_level="error", lifespan="off", access_log=False, ws="none", timeout_keep_alive=3600
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(
            target=self._server.run, kwargs={"sockets": [self._socket]}, daemon=True, name="mafrt-chat-api"
        )
        self._thread.start()

    @property
    def url(self) -> str:
        """Address without a path."""
        return f"http://{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"

    def close(self) -> None:
        """Stop listening and end the thread. May be called more than once."""
        self._server.should_exit = True
        self._thread.join(timeout=5)
        self._socket.close()

    def wait(self) -> None:
        """Block until the server ends."""
        while self._thread.is_alive():
            self._thread.join(timeout=0.5)

    # ------------------------------------------------------------------------------------------------------ routes

    def _app(self) -> Any:
        from starlette.applications import Starlette
        from starlette.routing import Route

        routes = []
        for prefix in ("", "/episodes/{key}"):
            routes += [
                Route(f"{prefix}/v1/chat/completions", self._chat, methods=["POST"]),
                Route(f"{prefix}/v1/models", self._models, methods=["GET"]),
                Route(f"{prefix}/v1/reward", self._reward, methods=["POST"]),
            ]
        return Starlette(routes=routes, exception_handlers={ApiError: _error})

    async def _chat(self, request: Any) -> Any:
        from starlette.responses import JSONResponse, StreamingResponse

        self._check(request)
        call = parse_call(await self._json(request))
        if self.in_flight >= self.limits.calls:
            raise ApiError(429, f"{self.limits.calls} calls are in flight; try again later", "rate_limit_exceeded")
        running = _Running(self.limits.timeout_s)
        future = self.answers.begin(request.path_params.get("key", ""), call, running.said)
        self.in_flight += 1
        running.follow(future, self._one_less)
        # Until the first piece an error is an answer with a status.
        piece = await running.next_piece()
        if call.stream:
            events = running.events(EventStream(call, int(time.time())), piece)
            return StreamingResponse(events, media_type="text/event-stream")
        while piece:
            piece = await running.next_piece()
        return JSONResponse(completion(call, running.reply(), int(time.time())))

    def _one_less(self) -> None:
        self.in_flight -= 1

    async def _models(self, request: Any) -> Any:
        from starlette.responses import JSONResponse

        self._check(request)
        return JSONResponse(model_list(self.answers.models(request.path_params.get("key", ""))))

    async def _reward(self, request: Any) -> Any:
        from starlette.responses import JSONResponse

        self._check(request)
        self.answers.reward(request.path_params.get("key", ""), await self._json(request))
        return JSONResponse({"ok": True})

    def _check(self, request: Any) -> None:
        """Refuse a request without the token."""
        if self.token is None:
            return
        given = request.headers.get("authorization", "").removeprefix("Bearer ").encode()
        if not hmac.compare_digest(given, self.token.encode()):
            raise ApiError(401, "the token is wrong or missing; give it as the API key", "invalid_api_key")

    async def _json(self, request: Any) -> Any:
        """The body of a request as JSON, read no further than the limit."""
        most, content = int(self.limits.body_mib * 2**20), b""
        async for chunk in request.stream():
            content += chunk
            if len(content) > most:
                raise ApiError(413, f"the request is larger than {self.limits.body_mib:g} MiB")
        try:
            return json.loads(content)
        except (ValueError, RecursionError):
            raise ApiError(400, "the request is not JSON") from None


class _Running:
    """A call that is being answered, in the server's event loop."""

    def __init__(self, timeout_s: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._timeout_s, self._deadline = timeout_s, self._loop.time() + timeout_s
        self._pieces: asyncio.Queue[str] = asyncio.Queue()
        self._whole: asyncio.Future[ChatReply] | None = None

    def said(self, piece: str) -> None:
        """Take a piece of the text, in any thread."""
        if piece:
            self._loop.call_soon_threadsafe(self._pieces.put_nowait, piece)

    def follow(self, future: Future[ChatReply], done: Callable[[], None]) -> None:
        """Wait for the whole reply; `done` is called when it is there, or given up."""
        self._whole = asyncio.wrap_future(future)

        def end(_: Any) -> None:
            done()
            self._pieces.put_nowait("")  # after all pieces, since they came before the reply

        self._whole.add_done_callback(end)

    async def next_piece(self) -> str:
        """The next piece; empty when the reply is whole. Raises ApiError."""
        assert self._whole is not None
        try:
            piece = await asyncio.wait_for(self._pieces.get(), max(0.0, self._deadline - self._loop.time()))
        except TimeoutError:
            self._whole.cancel()
            raise ApiError(504, f"no answer within {self._timeout_s:g} s", "timeout") from None
        if not piece:
            self.reply()
        return piece

    def reply(self) -> ChatReply:
        """The whole reply. Raises ApiError."""
        assert self._whole is not None
        try:
            return self._whole.result()
        except ApiError:
            raise
        except Exception as error:
            raise ApiError(500, f"the call cannot be answered: {error_line(error)}") from error

    async def events(self, stream: EventStream, piece: str) -> AsyncIterator[str]:
        """The reply as server-sent events, from this piece on."""
        assert self._whole is not None
        try:
            yield stream.begin()
            while piece:
                yield stream.piece(piece)
                piece = await self.next_piece()
            for event in stream.end(self.reply()):
                yield event
        except ApiError as error:
            yield stream.failed(error)
        finally:
            self._whole.cancel()  # of a client that has gone


async def _error(_: Any, error: Any) -> Any:
    from starlette.responses import JSONResponse

    return JSONResponse(error.body(), status_code=error.status)
