"""The HTTP server of the chat APIs: Starlette on uvicorn, in a thread of its own.

Bounded: the size and the time of a request, the connections, the calls in flight, and the time of a call. A client that
leaves gives its place back. It listens on loopback unless told otherwise, and needs a token on any other address.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import json
import logging
import threading
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

from mafrt.core.errors import ConfigError
from mafrt.core.extras import package
from mafrt.core.text import error_line, shortened
from mafrt.environment.chat_api.completions import COMPLETIONS
from mafrt.environment.chat_api.messages import MESSAGES
from mafrt.environment.chat_api.protocol import Api, ApiError, ChatCall, ChatReply, Events, model_list
from mafrt.environment.chat_api.responses import RESPONSES, KeptItems
from mafrt.environment.local_server import (
    BODY_S,
    LOOPBACK,
    LocalServer,
    RefusedError,
    check_caller,
    read_json,
)

log = logging.getLogger(__name__)

APIS: tuple[Api, ...] = (COMPLETIONS, RESPONSES, MESSAGES)
"""Each is one file: another API is one more entry."""
LEAVING_TURNS = 8
"""Turns of the event loop from the end of a connection to that of its call, twice over."""
MOST_UNHEARD = 256
"""Answers of an episode that wait for the client to ask again."""


OnText = Callable[[str], None]
"""Takes a piece of a reply's text that is ready before the whole reply."""


class ChatModels(Protocol):
    """The side of a server that has the models. Methods run in the server's thread and must return at once."""

    learns: bool
    """Whether calls become turns that are learnt from: then a call whose client left is answered all the same, and a
    client that asks again gets that answer. Otherwise such a call is cancelled."""

    def models(self, key: str) -> list[str]:
        """Names of models. `key` is the part of the address before `/v1`, empty without one. Raises ApiError."""

    def begin(self, key: str, call: ChatCall, on_text: OnText) -> Future[ChatReply]:
        """Start answering a call. `on_text` may be called from any thread with pieces of the text. Raises ApiError."""

    def count(self, key: str, call: ChatCall) -> int:
        """Tokens of a call's prompt. Raises ApiError."""

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
    body_s: float = BODY_S
    """max seconds in which a request must arrive"""
    connections: int = 1024
    """max connections, and never more than half of the file descriptors; those without a call end first"""


class ChatServer(LocalServer):
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
        package("The chat API", "serve", "starlette", "uvicorn")
        self.answers, self.token, self.limits = answers, token, limits
        self.in_flight = 0
        self._kept = KeptItems()
        self._calls: defaultdict[str, list[_Call]] = defaultdict(list)
        self._answered: dict[Any, _Call] = {}
        """client's address -> the call whose answer was sent last on its connection"""
        most = limits.connections
        self.listen(self._app(), host, port, connections=most, thread="mafrt-chat-api", ended=self._ended)

    # ------------------------------------------------------------------------------------------------------ routes

    def forget(self, key: str) -> None:
        """Forget the calls and answers of an episode. May be called in any thread."""
        self._calls.pop(key, None)
        self._kept.forget(key)

    def _app(self) -> Any:
        from starlette.applications import Starlette
        from starlette.routing import Route

        routes = []
        for prefix in ("", "/episodes/{key}"):
            # Anthropic's clients add /v1 to their address, also to one that ends in it already.
            for again in ("", "/v1"):
                routes += [Route(f"{prefix}{again}{api.path}", self._calling(api), methods=["POST"]) for api in APIS]
                routes += [
                    Route(f"{prefix}{again}{MESSAGES.path}/count_tokens", self._count, methods=["POST"]),
                    Route(f"{prefix}{again}/v1/models", self._models, methods=["GET"]),
                    Route(f"{prefix}{again}/v1/models/{{name:path}}", self._models, methods=["GET"]),
                ]
            routes.append(Route(f"{prefix}/v1/reward", self._reward, methods=["POST"]))
        handlers: dict[Any, Any] = {ApiError: _error, RefusedError: _refused, 404: _unknown, 405: _unknown}
        return Starlette(routes=[_safely(route) for route in routes], exception_handlers=handlers)

    def _calling(self, api: Api) -> Callable[[Any], Any]:
        async def answer(request: Any) -> Any:
            return await self._answer(api, request)

        return answer

    async def _answer(self, api: Api, request: Any) -> Any:
        from starlette.responses import Response, StreamingResponse

        self._heard(request.scope["client"])
        self._check(request, body=True)
        key, body = request.path_params.get("key", ""), await self._json(request)
        if api.header and api.header not in request.headers:
            raise ApiError(400, f"{api.header}: header is required, as the clients of this API send it")
        past, created = self._kept.of(key), int(time.time())
        call = replace(api.parse(body, past), session=request.headers.get("x-session-id", "")[:200])
        running, attempt = _Running(self.limits.timeout_s), _Attempt.of(request, body)
        if any(attempt.digest == each.attempt.digest for each in self._calls.get(key, ())):
            # The end of a connection on which the same was asked is seen some turns of the loop after it has come.
            for _ in range(LEAVING_TURNS):
                await asyncio.sleep(0)
        shared = self._begin(key, call, attempt, running)
        # Ends when the client leaves or has its answer, also where a stream is never begun.
        watcher = asyncio.ensure_future(_left(request, running))
        watcher.add_done_callback(lambda _: self._end(shared, running))
        try:
            # Until the first piece an error is an answer with a status.
            piece = await running.next_piece()
            if call.stream:
                sent = partial(self._send, shared, running, request)
                events = self._events(running, sent, api.events(call, created, past), piece)
                return StreamingResponse(events, media_type="text/event-stream")
            while piece:
                piece = await running.next_piece()
            made = api.whole(call, running.reply(), created, past)
            self._send(shared, running, request)
            return _json_response(made)
        except _LeftError:
            return Response(status_code=499)  # nobody reads it

    async def _events(
        self, running: _Running, sent: Callable[[], None], stream: Events, piece: str
    ) -> AsyncIterator[str]:
        """The reply as server-sent events, from this piece on."""
        try:
            yield stream.begin()
            while piece:
                yield stream.piece(piece)
                piece = await running.next_piece()
            for event in stream.end(running.reply()):
                yield event
            sent()
        except ApiError as error:
            yield stream.failed(error)
        except _LeftError:
            return

    def _begin(self, key: str, call: ChatCall, attempt: _Attempt, running: _Running) -> _Call:
        """The call that a request makes, or goes on with: a client that asks again means the same call."""
        shared = next((each for each in self._calls.get(key, ()) if attempt.repeats(each)), None)
        if shared is None:
            if call.answers > self.limits.calls:
                raise ApiError(400, f"'n' must be at most {self.limits.calls}, as many calls as are answered at once")
            if self.in_flight + call.answers > self.limits.calls:
                raise ApiError(429, f"{self.limits.calls} calls are in flight; try again later", "rate_limit_exceeded")
            shared = _Call(key, attempt, self._answers_to(key, call, running.said), call.answers)
            if self.answers.learns:
                calls = self._calls[key]
                calls.append(shared)
                del calls[:-MOST_UNHEARD]
        shared.listeners += 1
        self.in_flight += shared.answers
        running.follow(shared.future)
        return shared

    def _answers_to(self, key: str, call: ChatCall, on_text: OnText) -> Future[ChatReply]:
        """One reply with all answers: each is a call of its own, of which the first shows its pieces."""
        if call.answers == 1:
            return self.answers.begin(key, call, on_text)
        begun: list[Future[ChatReply]] = []
        try:
            for number in range(call.answers):
                one = replace(call, number=number, stream=call.stream and not number)
                begun.append(self.answers.begin(key, one, on_text))
        except Exception:
            if not self.answers.learns:  # a turn that has begun is answered
                for future in begun:
                    future.cancel()
            raise
        return _together(begun, cancels=not self.answers.learns)

    def _send(self, shared: _Call, running: _Running, request: Any) -> None:
        """The whole answer is sent; whether it is read, the end of the connection or its next request tells."""
        shared.heard = not running.left
        if shared.heard and self.answers.learns:
            self._answered[request.scope["client"]] = shared

    def _ended(self, client: Any, unread: bool) -> None:
        """A connection has ended; its client may have left before it read the last answer."""
        if unread and client in self._answered:
            self._answered.pop(client).heard = False
        self._heard(client)

    def _heard(self, client: Any) -> None:
        """The last answer to a client has been read."""
        shared = self._answered.pop(client, None)
        if shared is not None and not shared.attempt.name and shared in (calls := self._calls.get(shared.key, [])):
            calls.remove(shared)

    def _end(self, shared: _Call, running: _Running) -> None:
        """A request has its answer, or its client has left."""
        self.in_flight -= shared.answers
        shared.listeners -= 1
        running.forget()
        if not self.answers.learns:
            shared.future.cancel()  # nobody waits for it, unless it is done

    async def _models(self, request: Any) -> Any:
        self._check(request)
        listed = model_list(self.answers.models(request.path_params.get("key", "")))
        if (name := request.path_params.get("name")) is None:
            return _json_response(listed)
        named = {model["id"]: model for model in listed["data"]}
        if name not in named:
            raise ApiError(
                404, f"there is no model {shortened(name)!r}; there are {', '.join(named)}", "model_not_found"
            )
        return _json_response(named[name])

    async def _count(self, request: Any) -> Any:
        self._check(request, body=True)
        call = MESSAGES.counted(await self._json(request))
        return _json_response({"input_tokens": self.answers.count(request.path_params.get("key", ""), call)})

    async def _reward(self, request: Any) -> Any:
        self._check(request, body=True)
        self.answers.reward(request.path_params.get("key", ""), await self._json(request))
        return _json_response({"ok": True})

    def _check(self, request: Any, *, body: bool = False) -> None:
        """Refuse a request of another site, or without the token."""
        check_caller(request.headers.items(), self.host, body=body, token=self.token is not None)
        if self.token is None:
            return
        keys = (request.headers.get("authorization", "").removeprefix("Bearer "), request.headers.get("x-api-key", ""))
        if not any(hmac.compare_digest(key.encode(), self.token.encode()) for key in keys):
            raise ApiError(401, "the token is wrong or missing; give it as the API key", "invalid_api_key")

    async def _json(self, request: Any) -> Any:
        return await read_json(request, self.limits.body_mib, self.limits.body_s)


@dataclass(frozen=True)
class _Attempt:
    """The marks by which two requests are one call."""

    digest: bytes
    """of address and body"""
    name: str = ""
    """idempotency key; empty without one"""
    again: bool = False
    """whether the client says that it has asked before"""

    @staticmethod
    def of(request: Any, body: Any) -> _Attempt:
        content = json.dumps([request.url.path, body], sort_keys=True).encode()
        return _Attempt(
            hashlib.sha256(content).digest(),
            request.headers.get("idempotency-key", "")[:200],
            request.headers.get("x-stainless-retry-count", "0") not in ("", "0"),
        )

    def repeats(self, call: _Call) -> bool:
        """Whether this request is an earlier one that its client has given up.

        Equal requests whose clients both wait are two calls: an agent may be asked the same twice.
        """
        if self.name or call.attempt.name:
            return self.name == call.attempt.name and self.digest == call.attempt.digest
        return self.digest == call.attempt.digest and not call.heard and (self.again or not call.listeners)


@dataclass(eq=False)
class _Call:
    """One call, which several requests may have asked for."""

    key: str
    attempt: _Attempt
    future: Future[ChatReply]
    answers: int = 1
    """places that it takes among the calls in flight"""
    listeners: int = 0
    """requests that wait for the answer"""
    heard: bool = False
    """whether a client has got the answer"""


def _together(futures: Sequence[Future[ChatReply]], *, cancels: bool) -> Future[ChatReply]:
    """The first reply with all others, or the first error; who cancels it cancels all.

    Args:
        futures: of the replies.
        cancels: whether one error cancels the others, which nobody is going to read.
    """
    whole: Future[ChatReply] = Future()
    lock, waits = threading.Lock(), set(range(len(futures)))

    def take(number: int, done: Future[ChatReply]) -> None:
        with lock:
            waits.discard(number)
            last = not waits
        if whole.done():
            return
        if done.cancelled() or done.exception() is not None or last:
            with contextlib.suppress(InvalidStateError):  # another one's error, or the end, came first
                if done.cancelled():
                    whole.cancel()
                elif (error := done.exception()) is not None:
                    whole.set_exception(error)
                else:
                    first, *others = (each.result() for each in futures)
                    whole.set_result(replace(first, others=tuple(others)))

    def ended(done: Future[ChatReply]) -> None:
        if done.cancelled() or (cancels and done.exception() is not None):
            for future in futures:
                future.cancel()

    whole.add_done_callback(ended)
    for number, future in enumerate(futures):
        future.add_done_callback(partial(take, number))
    return whole


class _LeftError(Exception):
    """The client has gone."""


class _Running:
    """A request that is being answered, in the server's event loop."""

    def __init__(self, timeout_s: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._timeout_s, self._deadline = timeout_s, self._loop.time() + timeout_s
        self._pieces: asyncio.Queue[str] = asyncio.Queue()
        self._future: Future[ChatReply] | None = None
        self.left = False
        """whether the client has gone"""

    def said(self, piece: str) -> None:
        """Take a piece of the text, in any thread."""
        if piece:
            self._put(piece)

    def _put(self, piece: str) -> None:
        try:
            self._loop.call_soon_threadsafe(self._pieces.put_nowait, piece)
        except RuntimeError:  # the server has ended
            log.debug("an answer came after the end of its server")

    def follow(self, future: Future[ChatReply]) -> None:
        """Wait for the whole reply; it comes after all pieces."""
        self._future = future
        future.add_done_callback(self._whole)

    def _whole(self, _: Future[ChatReply]) -> None:
        self._put("")

    def forget(self) -> None:
        """Take no more pieces."""
        self._pieces = asyncio.Queue()

    def leave(self) -> None:
        """The client has gone."""
        self.left = True
        self._pieces.put_nowait("")

    async def next_piece(self) -> str:
        """The next piece; empty when the reply is whole. Raises ApiError, and _LeftError if the client has gone."""
        try:
            piece = await asyncio.wait_for(self._pieces.get(), max(0.0, self._deadline - self._loop.time()))
        except TimeoutError:
            raise ApiError(504, f"no answer within {self._timeout_s:g} s", "timeout") from None
        if self.left:
            raise _LeftError
        if not piece:
            self.reply()
        return piece

    def reply(self) -> ChatReply:
        """The whole reply. Raises ApiError."""
        assert self._future is not None
        try:
            return self._future.result(timeout=0)
        except ApiError:
            raise
        except Exception as error:
            raise ApiError(500, f"the call cannot be answered: {error_line(error)}") from error


async def _left(request: Any, running: _Running) -> None:
    """Wait until the client has gone; its body has been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
    running.leave()


def _json_response(body: Any, status: int = 200) -> Any:
    from starlette.responses import JSONResponse

    return JSONResponse(body, status_code=status)


async def _error(request: Any, error: Any) -> Any:
    """An error in the form of the client's API."""
    api: Api = MESSAGES if MESSAGES.path in request.url.path or "anthropic-version" in request.headers else COMPLETIONS
    return _json_response(api.error(error), error.status)


async def _refused(request: Any, error: Any) -> Any:
    return await _error(request, ApiError(error.status, str(error)))


async def _unknown(request: Any, error: Any) -> Any:
    """An address that is not there: name those that are."""
    there = ", ".join([*(f"POST {api.path}" for api in APIS), "GET /v1/models", "POST /v1/reward"])
    asked = shortened(f"{request.method} {request.url.path}", 200)
    return await _error(
        request, ApiError(error.status_code, f"there is no {asked} here; there are {there}", "unknown_url")
    )


def _safely(route: Any) -> Any:
    """The route with an answer for faults of our own too, in place of a traceback."""
    endpoint = route.endpoint

    async def answer(request: Any) -> Any:
        try:
            return await endpoint(request)
        except (ApiError, RefusedError):
            raise
        except Exception as error:
            log.exception("a request could not be answered")
            raise ApiError(500, f"the request cannot be answered: {error_line(error)}") from error

    return type(route)(route.path, answer, methods=route.methods)
