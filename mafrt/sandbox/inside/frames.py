"""Messages between the trainer and the sandbox over a stream socket: JSON of limited size, and raw bytes after it.

JSON and bytes only: decoding a message executes nothing. The reader sets the size limits.
"""

from __future__ import annotations

import json
import socket
import struct
import time
from typing import Any

HEADER_BYTES = 8 * 2**20
"""Longest JSON message; the snippet's code travels in one."""

_LENGTH = struct.Struct("!Q")


class BrokenFrame(ConnectionError):
    """The peer closed the connection mid-message, or sent an invalid message."""


def send(connection: socket.socket, message: dict[str, Any], *blobs: bytes) -> None:
    """One JSON message, then the blobs, whose sizes the message must tell."""
    data = json.dumps(message).encode()
    if len(data) > HEADER_BYTES:
        raise BrokenFrame(f"found a message of {len(data)} bytes, expected at most {HEADER_BYTES}")
    connection.sendall(_LENGTH.pack(len(data)) + data)
    for blob in blobs:
        connection.sendall(blob)


def receive(connection: socket.socket, deadline: float | None = None) -> dict[str, Any]:
    """The next JSON object. `deadline` is a time of `time.monotonic`; past it, TimeoutError."""
    (size,) = _LENGTH.unpack(receive_bytes(connection, _LENGTH.size, deadline))
    if size > HEADER_BYTES:
        raise BrokenFrame(f"found a message of {size} bytes, expected at most {HEADER_BYTES}")
    try:
        message = json.loads(receive_bytes(connection, size, deadline))
    except (ValueError, RecursionError) as error:
        raise BrokenFrame(f"found a message that is not JSON: {error}") from error
    if not isinstance(message, dict):
        raise BrokenFrame(f"found a {type(message).__name__}, expected a JSON object")
    return message


def receive_bytes(connection: socket.socket, size: int, deadline: float | None = None) -> bytes:
    """Exactly `size` bytes; the caller has checked that `size` is a reasonable wish."""
    parts, left = [], size
    while left:
        if deadline is not None:
            rest = deadline - time.monotonic()
            if rest <= 0:
                raise TimeoutError("the sandbox did not answer in time")
            connection.settimeout(rest)
        part = connection.recv(min(left, 2**20))
        if not part:
            raise BrokenFrame("the other side closed the connection")
        parts.append(part)
        left -= len(part)
    return b"".join(parts)
