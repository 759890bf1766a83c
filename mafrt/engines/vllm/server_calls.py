"""HTTP calls of one vLLM server, with their many ways to fail sorted by their consequence."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING, Any

from mafrt.core.errors import ConfigError
from mafrt.core.http_bounds import bounded
from mafrt.engines.checks import TOKEN

if TYPE_CHECKING:
    import httpx

MOST_ANSWERED = 256 << 20
"""Bytes of one answer: log-probabilities and token ids of the longest batches are a tenth of it."""
CONNECT_S = 10.0
SMALL_S = 30.0
"""Seconds for an answer that nothing has to be computed for, and for a dead server to show that it is back."""


class LostError(Exception):
    """A server that cannot be reached, or cannot go on."""

    def __init__(self, why: str, status: int | None = None, *, broken: bool = False) -> None:
        super().__init__(why)
        self.status = status
        """of its answer, if there was one"""
        self.broken = broken
        """whether it is a connection that broke, which says little about the server"""


class UnknownModelError(Exception):
    """A server that has forgotten an adapter: it was restarted."""


class ServerCalls:
    """Calls with the token of the environment.

    Args:
        timeout_s: seconds for an answer that has to be computed.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        token = os.environ.get(TOKEN)
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}

    async def call(
        self, client: httpx.AsyncClient, url: str, method: str, path: str, body: Any = None
    ) -> dict[str, Any]:
        """One HTTP call, and a second one if the connection broke and the server is well.

        Nothing is sampled twice by that: the first answer was lost, so it was not used.
        """
        try:
            return await self._once(client, url, method, path, body)
        except LostError as error:
            if not error.broken:
                raise
        await self._once(client, url, "GET", "/health")
        return await self._once(client, url, method, path, body)

    async def _once(
        self, client: httpx.AsyncClient, url: str, method: str, path: str, body: Any = None
    ) -> dict[str, Any]:
        """One HTTP call, with its many ways to fail sorted by their consequence."""
        import httpx

        wait_s = self._timeout_s
        if method == "GET" or "unload" in path:
            wait_s = min(wait_s, SMALL_S)
        patience = httpx.Timeout(wait_s, connect=CONNECT_S)
        try:
            asked = client.request(method, url + path, json=body, headers=self._headers, timeout=patience)
            # A timeout of the client is for each read, and a server may send byte by byte.
            answer = await asyncio.wait_for(asked, wait_s + CONNECT_S)
        except httpx.ConnectTimeout:
            raise LostError(f"no connection within {CONNECT_S:g} s", broken=True) from None
        except (httpx.TimeoutException, TimeoutError):
            raise LostError(f"no answer within {wait_s:g} s") from None
        except (httpx.TransportError, httpx.StreamError) as error:
            raise LostError(str(error) or type(error).__name__, broken=True) from None
        if answer.status_code == 200:
            try:
                return answer.json() if "json" in answer.headers.get("content-type", "") else {}
            except ValueError:
                raise LostError("half an answer") from None
        reply = _words(answer)
        if answer.status_code == 404:
            raise UnknownModelError(reply)
        if answer.status_code in (401, 403):
            raise ConfigError(f"{url} refuses the token ({answer.status_code}); set {TOKEN} to its --api-key.")
        if answer.status_code < 500 and answer.status_code not in (408, 429):
            raise ConfigError(f"{url} refuses {path} ({answer.status_code}): {reply}")
        raise LostError(f"{answer.status_code}: {reply}", answer.status_code)

    def client(self) -> httpx.AsyncClient:
        import httpx

        # A connection each: servers close idle ones, now and then just as the next request goes out.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        return bounded(httpx.AsyncClient(limits=limits, trust_env=False), MOST_ANSWERED)


def _words(answer: httpx.Response) -> str:
    """The server's own sentence."""
    try:
        body = answer.json()
        body = body.get("error", body)
        text = body.get("message") or body.get("detail") if isinstance(body, dict) else body
    except (ValueError, AttributeError):
        text = answer.text
    return " ".join(str(text).split())[:300] or answer.reason_phrase
