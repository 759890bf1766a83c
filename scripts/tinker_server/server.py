"""The HTTP server of the Tinker API: Starlette on uvicorn, in a thread of its own."""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections.abc import Callable, Sequence
from typing import Any

from mafrt.core.errors import ConfigError
from mafrt.core.extras import package
from mafrt.core.text import error_line, shortened
from mafrt.environment.local_server import (
    LOOPBACK,
    LocalServer,
    RefusedError,
    check_caller,
    parse_body,
    read_body,
)
from mafrt.scripts.tinker_server import messages
from mafrt.scripts.tinker_server.checkpoints import described, owner_of, place_of
from mafrt.scripts.tinker_server.limits import Limits, refused
from mafrt.scripts.tinker_server.results import Result
from mafrt.scripts.tinker_server.service import Service

log = logging.getLogger(__name__)

PROTOBUF = "application/x-protobuf"
MOST_LISTED = 1000
LIMITS = Limits()
KEY = "tml-"
"""beginning of every API key that the SDK takes"""


def check_tokens(tokens: Sequence[str], host: str) -> None:
    """Raises ConfigError if clients could not use the tokens, or an open address has none."""
    if host not in LOOPBACK and not tokens:
        raise ConfigError(f"host {host} can be reached from other machines, so a token is needed.")
    if any(not token.startswith(KEY) or len(token) < 12 for token in tokens):
        raise ConfigError(f"A token must begin with {KEY!r}, or the SDK refuses it, and have 12 characters or more.")


class TinkerServer(LocalServer):
    """A running server; `close` ends it. Until `service` is set, requests get status 503.

    Args:
        host, port: address; port 0 takes a free one.
        tokens: API keys that are let in; empty: any, each a client of its own. Required unless on loopback.
        limits: bounds.

    Raises:
        ConfigError: no token for an open address, or the address cannot be used.
        MissingExtraError: a package is missing.
    """

    def __init__(
        self, *, host: str = "127.0.0.1", port: int = 0, tokens: Sequence[str] = (), limits: Limits = LIMITS
    ) -> None:
        check_tokens(tokens, host)
        package("The Tinker API", "tinker", "starlette", "uvicorn")
        self.tokens, self.limits = [token.encode() for token in tokens], limits
        self.service: Service | None = None
        self.listen(
            self._app(),
            host,
            port,
            connections=limits.connections,
            thread="mafrt-tinker-api",
            make_room=lambda: self.service is not None and self.service.results.make_room(),
        )

    def close(self) -> None:
        """Stop listening and end the threads."""
        super().close()
        if self.service is not None:
            self.service.close()

    # --------------------------------------------------------------------------------------------------------- routes

    def _app(self) -> Any:
        from starlette.applications import Starlette
        from starlette.routing import Route

        def later(take: Callable[[Service, str, Any], Result]) -> Callable[[Service, str, Any], Any]:
            """A request whose result is fetched later."""

            def promise(service: Service, owner: str, body: Any) -> dict[str, Any]:
                return {"request_id": take(service, owner, body).id}

            return promise

        posts: dict[str, Callable[[Service, str, Any], Any]] = {
            "client/config": lambda s, owner, body: {
                "pjwt_auth_enabled": False,
                "sample_use_retrieve_futures": True,
                "sample_join_sampling_session": True,
                "fwdbwd_max_chunk_len": 1024,
                "sample_max_concurrent_requests": self.limits.waiting,
            },
            "client/dynamic_config": lambda s, owner, body: {"sample_cancel_enabled": True},
            "telemetry": lambda s, owner, body: {"status": "accepted"},
            "create_session": lambda s, owner, body: s.create_session(owner, body),
            "session_heartbeat": _heartbeat,
            "create_model": later(lambda s, owner, body: s.create_model(owner, {**body, **_without_path(body)})),
            "load_weights": later(lambda s, owner, body: s.load_weights(owner, body)),
            "save_weights": later(lambda s, owner, body: s.save_weights(owner, body, "weights")),
            "save_weights_for_sampler": later(lambda s, owner, body: s.save_weights(owner, body, "sampler_weights")),
            "optim_step": later(lambda s, owner, body: s.optim_step(owner, body)),
            "get_info": lambda s, owner, body: s.about(owner, messages.text_of(body, "model_id")),
            "weights_info": lambda s, owner, body: s.weights_info(
                owner, messages.text_of(body, "tinker_path", most=400)
            ),
            "create_sampling_session": lambda s, owner, body: s.create_sampling_session(owner, body),
            "join_sampling_session": lambda s, owner, body: s.join(owner, body),
            "asample": _asample,
            "cancel_future": lambda s, owner, body: s.cancel(owner, messages.text_of(body, "request_id", most=400)),
            "retrieve_future": self._retrieve,
            "retrieve_futures": lambda s, owner, body: s.completions(owner, body),
            "sessions/{session}/finish": _finish_session,
        }
        gets: dict[str, Callable[[Service, str, Any], Any]] = {
            "healthz": lambda s, owner, given: {"status": "ok"},
            "get_server_capabilities": _capabilities,
            "samplers/{sampler}": lambda s, owner, given: s.sampler(owner, given["sampler"]),
            "sessions/{session}": _session,
            "training_runs": _runs,
            "training_runs/{run}": lambda s, owner, given: s.run(owner, given["run"]),
            "training_runs/{run}/checkpoints": _checkpoints,
            "checkpoints": _all_checkpoints,
        }
        delete = "training_runs/{run}/checkpoints/{kind}/{name}"
        self._known = sorted(
            [*(f"POST {name}" for name in posts), *(f"GET {name}" for name in gets), f"DELETE {delete}"]
        )
        routes = [
            Route(f"/api/v1/{name}", self._answering(answer, True), methods=["POST"]) for name, answer in posts.items()
        ]
        routes += [Route(f"/api/v1/{name}", self._answering(answer), methods=["GET"]) for name, answer in gets.items()]
        routes.append(Route("/api/v1/forward_backward", self._answering_pass, methods=["POST"]))
        routes.append(Route(f"/api/v1/{delete}", self._answering(_delete), methods=["DELETE"]))
        handlers: dict[Any, Any] = {RefusedError: _refused, 404: self._unknown, 405: self._unknown}
        return Starlette(routes=routes, exception_handlers=handlers)

    def _entered(self, request: Any, *, body: bool) -> tuple[Service, str]:
        """The service, and whose request it is. Raises RefusedError."""
        check_caller(request.headers.items(), self.host, body=body, token=bool(self.tokens))
        key = request.headers.get("x-api-key") or request.headers.get("authorization", "").removeprefix("Bearer ")
        if self.tokens and not any(hmac.compare_digest(key.encode(), token) for token in self.tokens):
            raise refused("the API key is wrong or missing; set TINKER_API_KEY to the server's token", 401)
        if self.service is None:
            raise refused("the base is being loaded; ask again in a moment", 503)
        return self.service, owner_of(key)

    def _answering(self, answer: Callable[[Service, str, Any], Any], body: bool = False) -> Callable[[Any], Any]:
        async def respond(request: Any) -> Any:
            service, owner = self._entered(request, body=body)
            given: Any = {**request.query_params, **request.path_params}
            if body:
                content = await read_body(request, min(self.limits.body_mib, self.limits.json_mib), self.limits.body_s)
                given = {
                    **messages.object_of(parse_body(content) if content else {}, "the body"),
                    **request.path_params,
                }
            made = answer(service, owner, given)
            made = await made if asyncio.iscoroutine(made) else made
            return made if hasattr(made, "status_code") else _json(made)

        return _safely(respond)

    @property
    def _answering_pass(self) -> Callable[[Any], Any]:
        async def respond(request: Any) -> Any:
            service, owner = self._entered(request, body=False)
            # No page of a browser sends this type to another site without asking first.
            if (kind := request.headers.get("content-type", "")) != PROTOBUF:
                raise refused(f"the content type must be {PROTOBUF}, found {shortened(kind) or 'none'}", 415)
            if request.headers.get("content-encoding", "identity") != "identity":
                raise refused("a compressed body is not taken", 415)
            content = await read_body(request, self.limits.body_mib, self.limits.body_s)
            return _json({"request_id": service.forward_backward(owner, content).id})

        return _safely(respond)

    async def _retrieve(self, service: Service, owner: str, body: Any) -> Any:
        from starlette.responses import Response

        result = service.result(owner, messages.text_of(body, "request_id", most=400))
        await service.results.wait(owner, result.ready, self.limits.poll_s)
        if not result.ready.is_set():
            again = {"type": "try_again", "request_id": result.id, "queue_state": "active"}
            return _json(again, 408)
        if result.refusal is not None:
            raise result.refusal
        service.results.fetched(result)
        return Response(result.content, media_type=PROTOBUF if result.binary else "application/json")

    async def _unknown(self, request: Any, error: Any) -> Any:
        asked = shortened(f"{request.method} {request.url.path}", 200)
        return _json(
            {"detail": f"there is no {asked} here; under /api/v1 there are {', '.join(self._known)}"}, error.status_code
        )


def _without_path(body: Any) -> dict[str, Any]:
    if "path" in body:
        raise refused("create_model takes no path; use load_weights")
    return {}


def _heartbeat(service: Service, owner: str, body: Any) -> dict[str, Any]:
    service.session(owner, messages.text_of(body, "session_id"))
    return {"type": "session_heartbeat"}


def _finish_session(service: Service, owner: str, body: Any) -> dict[str, Any]:
    service.end(service.session(owner, body["session"]))
    return {}


def _asample(service: Service, owner: str, body: Any) -> dict[str, Any]:
    result, ids = service.sample(owner, body)
    return {"request_id": result.id, "sample_sequence_ids": ids}


def _capabilities(service: Service, owner: str, given: Any) -> dict[str, Any]:
    model = {"max_context_length": service.base.context_window, "trainable": True, "sampleable": True}
    return {"supported_models": [{"model_name": service.names[0], **model}]}


def _session(service: Service, owner: str, given: Any) -> dict[str, Any]:
    session = service.session(owner, given["session"])
    ids = {"training_run_ids": [*session.models], "sampler_ids": [*session.samplers]}
    return {**ids, "user_metadata": session.metadata or None}


def _part(found: list[Any], given: Any) -> tuple[list[Any], dict[str, int]]:
    """A page of a list."""
    try:
        limit, offset = int(given.get("limit", 20)), int(given.get("offset", 0))
    except ValueError:
        limit = offset = -1
    if not 0 <= limit <= MOST_LISTED or not 0 <= offset < 2**31:
        raise refused(f"limit and offset must be whole numbers, limit at most {MOST_LISTED}")
    return found[offset : offset + limit], {"offset": offset, "limit": limit, "total_count": len(found)}


def _runs(service: Service, owner: str, given: Any) -> dict[str, Any]:
    found, cursor = _part(service.checkpoints.runs(owner), given)
    return {"training_runs": [service.run(owner, run) for run, _ in found], "cursor": cursor}


def _checkpoints(service: Service, owner: str, given: Any) -> dict[str, Any]:
    return {"checkpoints": [described(*each) for each in service.checkpoints.all_of(given["run"], owner)]}


def _all_checkpoints(service: Service, owner: str, given: Any) -> dict[str, Any]:
    every = [each for run, _ in service.checkpoints.runs(owner) for each in service.checkpoints.all_of(run, owner)]
    found, cursor = _part(every, given)
    return {"checkpoints": [described(*each) for each in found], "cursor": cursor}


def _delete(service: Service, owner: str, given: Any) -> dict[str, Any]:
    place = place_of(given["run"], given["kind"], given["name"])
    service.checkpoints.manifest(place, owner)
    service.checkpoints.delete(place, owner)
    return {}


def _json(body: Any, status: int = 200) -> Any:
    from starlette.responses import JSONResponse

    return JSONResponse(body, status_code=status)


async def _refused(_: Any, error: Any) -> Any:
    return _json({"detail": str(error)}, error.status)


def _safely(respond: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Answers for faults of our own too, in place of a traceback."""

    async def answer(request: Any) -> Any:
        try:
            return await respond(request)
        except RefusedError:
            raise
        except Exception as error:
            log.exception("a request could not be answered")
            return _json({"detail": f"the request cannot be answered: {error_line(error)}"}, 500)

    return answer
