"""A small retrieval server in Search-R1's request form, over the embedded index.

POST /retrieve {"queries": [...], "topk": 3, "return_scores": true} -> {"result": [[{"document", "score"}, ...], ...]}
GET /health -> {"passages": 1000}
"""

from __future__ import annotations

import hmac
import json
from collections.abc import Mapping
from typing import Any

from mafrt.core.errors import MissingExtraError
from mafrt.core.extras import install
from mafrt.core.text import brief
from mafrt.envs.search.retrieval import Bm25

BODY_MIB = 1
MOST_QUERIES = 512
MOST_TOPK = 100


def retrieve(index: Bm25, body: Any, topk: int) -> dict[str, Any]:
    """The reply to one request; `topk` is the default. Raises ValueError with a sentence for a wrong request."""
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
    results = [index.search(query, most) for query in queries]
    if not scored:
        return {"result": [[passage.document() for passage, _ in hits] for hits in results]}
    return {
        "result": [[{"document": passage.document(), "score": score} for passage, score in hits] for hits in results]
    }


def app(index: Bm25, topk: int = 3, token: str | None = None) -> Any:
    """The Starlette application. `token`: bearer token that requests must carry; None: none.

    Raises MissingExtraError if Starlette is not installed.
    """
    try:
        from starlette.applications import Starlette
        from starlette.concurrency import run_in_threadpool
        from starlette.responses import JSONResponse
        from starlette.routing import Route
    except ImportError as error:
        raise MissingExtraError(f"the retrieval server needs a package: {install('serve')}") from error

    def refused(request: Any) -> bool:
        given = request.headers.get("authorization", "").encode()
        return token is not None and not hmac.compare_digest(given, f"Bearer {token}".encode())

    async def post(request: Any) -> Any:
        if refused(request):
            return JSONResponse({"error": "the token is missing or wrong"}, 401)
        content = b""
        async for part in request.stream():
            content += part
            if len(content) > BODY_MIB * 2**20:
                return JSONResponse({"error": f"the request is larger than {BODY_MIB} MiB"}, 413)
        try:
            return JSONResponse(await run_in_threadpool(retrieve, index, json.loads(content), topk))
        except (ValueError, RecursionError) as error:
            return JSONResponse({"error": str(error)}, 422)

    async def health(request: Any) -> Any:
        return JSONResponse({"passages": len(index.passages)})

    return Starlette(routes=[Route("/retrieve", post, methods=["POST"]), Route("/health", health, methods=["GET"])])
