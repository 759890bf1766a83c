"""Bounds on what a server may send to a client of httpx, or of httpx2, which has the same form.

Such a client keeps a whole body however long it is, unpacks what is compressed without a bound, keeps every cookie, and
follows a redirect with all headers but one, so that a key in another header goes to another host. Its timeouts are for
each read: whoever asks bounds the time of a call.
"""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from typing import Any, TypeVar

Client = TypeVar("Client")


def bounded(client: Client, most: int, *, parts: int | None = None, unbounded: str | None = None) -> Client:
    """Have an `AsyncClient` take at most `most` bytes of a body, none that is compressed, no cookie and no redirect.

    Args:
        client: of httpx or httpx2.
        most: bytes of a body; more is a `StreamError` of the client's package.
        parts: brackets, braces and commas of a body, for SDKs that make an object of each, thousands a second.
        unbounded: content type of bodies that are streams, of which whoever reads them bounds each part.
    """
    package: Any = sys.modules[
        next(kind.__module__ for kind in type(client).__mro__ if _is_package(kind)).split(".")[0]
    ]

    class Bounded(package.AsyncByteStream):  # type: ignore[misc]
        def __init__(self, response: Any) -> None:
            self.inner, self.headers = response.stream, response.headers

        async def __aiter__(self) -> AsyncIterator[bytes]:
            if self.headers.get("content-encoding", "identity") != "identity":
                raise package.StreamError("it is compressed, which was not asked for")
            stream = unbounded is not None and self.headers.get("content-type", "").startswith(unbounded)
            length = found = 0
            async for chunk in self.inner:
                length += len(chunk)
                found += 0 if parts is None else sum(map(chunk.count, (b"{", b"[", b",")))
                if length > most and not stream:
                    raise package.StreamError(f"it has more than {most >> 20} MiB")
                if parts is not None and found > parts:
                    raise package.StreamError(f"it has more than {parts} parts")
                yield chunk

        async def aclose(self) -> None:
            await self.inner.aclose()

    async def bound(response: Any) -> None:
        response.stream = Bounded(response)
        about.cookies.clear()

    about: Any = client
    about.follow_redirects = False
    about.headers["accept-encoding"] = "identity"
    about.event_hooks = {**about.event_hooks, "response": [*about.event_hooks["response"], bound]}
    return client


def _is_package(kind: type) -> bool:
    return kind.__module__.split(".")[0] in ("httpx", "httpx2")
