"""A small retrieval server in Search-R1's request form, over the embedded index.

POST /retrieve {"queries": [...], "topk": 3, "return_scores": true} -> {"result": [[{"document", "score"}, ...], ...]}
GET /health -> {"passages": 1000}
"""

from __future__ import annotations

import asyncio
import hmac
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from mafrt.core.extras import package
from mafrt.core.text import brief, shortened
from mafrt.environment.local_server import RefusedError, check_caller, read_json
from mafrt.envs.search.retrieval import Bm25

BODY_MIB = 1
MOST_QUERIES = 512
MOST_TOPK = 100
SEARCH_S = 60.0
"""for all queries of a request"""
MOST_REPLY_MIB = 32
"""of the passages of one reply; as JSON they take up to six times as much"""
_HEADERS = {"X-Content-Type-Options": "nosniff"}


def retrieve(index: Bm25, body: Any, topk: int, given_up: Callable[[], bool] = lambda: False) -> dict[str, Any]:
    """The reply to one request; `topk` is the default. `given_up` is asked before each query.

    Raises:
        ValueError: a wrong request, in a sentence.
        TimeoutError: the request was given up.
    """
    if not isinstance(body, Mapping):
        raise ValueError(f"expected an object with 'queries', found {brief(body)}")
    queries, most, scored = body.get("queries"), body.get("topk"), body.get("return_scores", False)
    if not isinstance(queries, list) or not all(isinstance(query, str) for query in queries):
        raise ValueError(f"'queries' must be a list of texts, found {brief(queries)}")
    if len(queries) > MOST_QUERIES:
        raise ValueError(f"'queries' holds {len(queries)}, at most {MOST_QUERIES} are taken")
    most = topk if most is None else most
    if isinstance(most, bool) or not isinstance(most, int) or not 1 <= most <= MOST_TOPK:
        raise ValueError(f"'topk' must be a whole number in 1..{MOST_TOPK}, found {brief(most)}")
    if not isinstance(scored, bool):
        raise ValueError(f"'return_scores' must be true or false, found {brief(scored)}")
    results, left = [], MOST_REPLY_MIB * 2**20
    for query in queries:
        if given_up():
            raise TimeoutError
        results.append(index.search(query, most))
        left -= sum(len(passage.title) + len(passage.text) for passage, _ in results[-1])
        if left < 0:
            raise ValueError(
                f"the passages of {len(queries)} queries with topk {most} are more than {MOST_REPLY_MIB} MiB; send "
                "fewer queries in a request, or ask for fewer passages"
            )
    if not scored:
        return {"result": [[passage.document() for passage, _ in hits] for hits in results]}
    return {
        "result": [[{"document": passage.document(), "score": score} for passage, score in hits] for hits in results]
    }


def app(index: Bm25, topk: int = 3, token: str | None = None) -> Any:
    """The Starlette application.

    Args:
        index: is searched.
        topk: passages of a query that names no number.
        token: bearer token that requests must carry; None: none.

    Raises:
        MissingExtraError: Starlette is not installed.
    """
    package("the retrieval server", "serve", "starlette")
    from starlette.applications import Starlette
    from starlette.concurrency import run_in_threadpool
    from starlette.responses import JSONResponse
    from starlette.routing import Route

    def check(request: Any, *, body: bool) -> None:
        host = (request.scope.get("server") or ("",))[0]
        check_caller(request.headers.items(), host, body=body, token=token is not None)
        given = request.headers.get("authorization", "").encode()
        if token is not None and not hmac.compare_digest(given, f"Bearer {token}".encode()):
            raise RefusedError(401, "the token is missing or wrong")

    def answer(body: Any, given_up: Callable[[], bool]) -> Any:
        return JSONResponse(retrieve(index, body, topk, given_up), headers=_HEADERS)

    async def post(request: Any) -> Any:
        check(request, body=True)
        body = await read_json(request, BODY_MIB)
        left, ends = threading.Event(), time.monotonic() + SEARCH_S

        async def watch() -> None:
            while not await request.is_disconnected():
                await asyncio.sleep(0.2)
            left.set()

        # A thread cannot be ended from outside, and those of clients that have left would be missing for the others.
        watching = asyncio.create_task(watch())
        try:
            return await run_in_threadpool(answer, body, lambda: left.is_set() or time.monotonic() > ends)
        except ValueError as error:
            raise RefusedError(422, str(error)) from error
        except TimeoutError:
            raise RefusedError(503, f"the search took longer than {SEARCH_S:g} s; ask for less") from None
        finally:
            watching.cancel()

    async def health(request: Any) -> Any:
        check(request, body=False)
        return JSONResponse({"passages": len(index.passages)}, headers=_HEADERS)

    async def refused(_: Any, error: Any) -> Any:
        return JSONResponse({"error": str(error)}, error.status, headers=_HEADERS)

    async def unknown(request: Any, error: Any) -> Any:
        asked = shortened(f"{request.method} {request.url.path}", 200)
        why = f"there is no {asked} here; there are POST /retrieve and GET /health"
        return JSONResponse({"error": why}, error.status_code, headers=_HEADERS)

    routes = [Route("/retrieve", post, methods=["POST"]), Route("/health", health, methods=["GET"])]
    return Starlette(routes=routes, exception_handlers={RefusedError: refused, 404: unknown, 405: unknown})
