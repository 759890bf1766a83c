"""One HTTP request to one server: no proxy, no other address, and an end.

A timeout of a socket is for each read, and a server may send byte by byte for ever; a redirection would take the token
and what is asked to another host.
"""

from __future__ import annotations

import contextlib
import http.client
import socket
import threading
from collections.abc import Mapping
from urllib.parse import urlsplit

from mafrt.core.text import error_line


class StatusError(OSError):
    """The server refuses, or sends elsewhere."""

    def __init__(self, status: int) -> None:
        reason = http.client.responses.get(status, "")
        super().__init__(f"it answered {status} {reason}".strip())
        self.status = status


def is_http_address(text: str, *, bare: bool = False) -> bool:
    """Whether it is the address of a server: `http://` or `https://`, a host, and a port that can be one.

    bare: without a query and a user, to which paths can be added, and which can be shown.
    """
    try:
        parts = urlsplit(text)
        parts.port  # noqa: B018  # raises ValueError for a port that is none
        (parts.hostname or "").encode("idna")
    except ValueError:  # UnicodeError is one
        return False
    plain = text.isprintable() and not any(c.isspace() for c in text)
    if bare and (parts.query or parts.username):
        return False
    return parts.scheme in ("http", "https") and bool(parts.hostname) and plain


def http_request(
    url: str, body: bytes | None = None, *, headers: Mapping[str, str], within_s: float, most: int
) -> bytes:
    """The content of the reply to a GET, or a POST where there is a body.

    Args:
        url: `http://` or `https://`.
        body: is posted.
        headers: of the request.
        within_s: seconds for all of it.
        most: bytes of the reply that are taken.

    Raises:
        StatusError: its status is 300 or more.
        TimeoutError: it is not there in time.
        OSError: the server cannot be reached, says what is no HTTP, or more than is taken.
    """
    parts = urlsplit(url)
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    late = threading.Event()
    opened: list[socket.socket] = []

    def end() -> None:
        late.set()
        with contextlib.suppress(OSError):
            opened[0].shutdown(socket.SHUT_RDWR)

    timer = threading.Timer(within_s, end)
    timer.daemon = True
    try:
        connection = kind(parts.hostname or "", parts.port, timeout=within_s)
        with contextlib.closing(connection):
            connection.connect()
            opened.append(connection.sock)  # the connection forgets it where the reply ends with it
            timer.start()
            connection.request("GET" if body is None else "POST", path, body, dict(headers))
            reply = connection.getresponse()
            status, content = reply.status, reply.read(most + 1)
    except (OSError, http.client.HTTPException, ValueError) as error:
        if late.is_set() or isinstance(error, TimeoutError):
            raise TimeoutError(f"it did not answer within {within_s:g} s") from None
        raise (
            error if isinstance(error, OSError) else OSError(f"what it says is no HTTP ({error_line(error)})")
        ) from error
    finally:
        timer.cancel()
    if late.is_set():
        raise TimeoutError(f"it did not answer within {within_s:g} s")
    if status >= 300:
        raise StatusError(status)
    if len(content) > most:
        raise OSError(f"it sent more than {most >> 20} MiB" if most >> 20 else f"it sent more than {most} bytes")
    return content
