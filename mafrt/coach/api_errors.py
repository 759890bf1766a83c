"""Failures of a call to a judge, sorted by their remedy. Standard library only."""

from __future__ import annotations

import email.utils
import json
import math
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Literal

Kind = Literal["transient", "refused", "dead"]

_TRANSIENT = frozenset({408, 409, 425, 429})
_DEAD = frozenset({401, 402, 403, 404})
_NO_MONEY = re.compile(
    r"insufficient_quota|billing_hard_limit|billing_error|billing_not_active|credit balance is too low|"
    r"insufficient balance",
    re.IGNORECASE,
)
_PER_DAY = re.compile(r"PerDay", re.IGNORECASE)
"""In the quota that Google names where it says 429: waiting a minute does not help against it."""
_SECONDS = re.compile(r"([0-9]+(?:\.[0-9]+)?)s")


class CallFailedError(Exception):
    """One call failed.

    `transient`: another try may succeed (rate limit, server error, no connection, no reply in time).
    `refused`: this very request will never be answered (400 and its like); others may be.
    `dead`: no request will be answered before the user fixes the cause (key, rights, model, quota).
    """

    def __init__(
        self, kind: Kind, message: str, *, status: int | None = None, retry_after_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.kind: Kind = kind
        self.status = status
        self.retry_after_s = retry_after_s


def failed(status: int, message: str, headers: Mapping[str, str], body: Any) -> CallFailedError:
    """The failure that an HTTP status, its headers and its body stand for.

    Args:
        status: of the reply.
        message: the provider's own words.
        headers: of the reply.
        body: of the reply, parsed where it was JSON.
    """
    detail = f"{status}: {' '.join(str(message)[:2000].split())[:300]}"
    details = f"{message} {json.dumps(body, default=str)}"[:20_000]
    no_money = status in (400, 402, 403, 429) and _NO_MONEY.search(details)
    # Providers answer 429 both to haste and to an empty account; waiting helps against the first only.
    if no_money or (status == 429 and _PER_DAY.search(details)):
        return CallFailedError("dead", f"its quota or credit is used up ({detail})", status=status)
    if 300 <= status < 400:
        return CallFailedError(
            "dead", f"it sends to another address; give the one that answers ({detail})", status=status
        )
    if status in _DEAD:
        meaning = {401: "it does not accept the key", 402: "it wants to be paid", 403: "it denies access"}
        return CallFailedError(
            "dead", f"{meaning.get(status, 'it does not know the model or the address')} ({detail})", status=status
        )
    if status in _TRANSIENT or status >= 500:
        return CallFailedError("transient", detail, status=status, retry_after_s=retry_after(headers, body))
    return CallFailedError("refused", detail, status=status)


def retry_after(headers: Mapping[str, str], body: Any = None) -> float | None:
    """Seconds that the provider asks to wait: from its headers (number or date), or Google's `retryDelay`."""
    given = {name.lower(): value for name, value in headers.items()}
    try:
        if "retry-after-ms" in given:
            return _wait_s(float(given["retry-after-ms"]) / 1000)
        if "retry-after" in given:
            return _wait_s(float(given["retry-after"]))
    except ValueError:
        return _until(given.get("retry-after", ""))
    delay = re.search(r'"retryDelay": "([^"]*)"', json.dumps(body, default=str))
    seconds = _SECONDS.fullmatch(delay[1]) if delay else None
    return _wait_s(float(seconds[1])) if seconds else None


def _wait_s(seconds: float) -> float | None:
    """A wait that can be waited: not negative; None for NaN and infinity."""
    # The header is the server's text, and a wait of infinity would hold the run for ever.
    return max(seconds, 0.0) if math.isfinite(seconds) else None


def _until(date: str) -> float | None:
    """Seconds until an HTTP date; None for a date that is none, or that no calendar holds."""
    try:
        when = email.utils.parsedate_to_datetime(date)
        if when.tzinfo is None:
            when = when.replace(tzinfo=UTC)
        return _wait_s((when - datetime.now(UTC)).total_seconds())
    except (ValueError, OverflowError, TypeError, IndexError):
        return None
