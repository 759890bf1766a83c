"""Requests that are not what they should be, byte by byte."""

from __future__ import annotations

import re
import socket
import time


def connected(server):
    return socket.create_connection((server.host, server.port), timeout=300)


def head(path, *lines):
    more = ("Host: localhost", "Content-Type: application/json", "anthropic-version: 2023-06-01")
    return "\r\n".join([f"POST {path} HTTP/1.1", *more, *lines, "", ""]).encode()


CHUNKED = "Transfer-Encoding: chunked"


BROKEN = {
    "half a body": (lambda path, body: [head(path, f"Content-Length: {len(body)}") + body[:9]], 408),
    "no body": (lambda path, body: [head(path, f"Content-Length: {len(body)}")], 408),
    "a length too small": (lambda path, body: [head(path, "Content-Length: 9") + body], 400),
    "a length too large": (lambda path, body: [head(path, f"Content-Length: {len(body) + 5}") + body], 408),
    "a negative length": (lambda path, body: [head(path, "Content-Length: -5") + body], 400),
    "no number": (lambda path, body: [head(path, "Content-Length: many") + body], 400),
    "two lengths": (lambda path, body: [head(path, "Content-Length: 9", "Content-Length: 8") + body], 400),
    "no length": (lambda path, body: [head(path) + body], 400),
    "too large": (lambda path, body: [head(path, f"Content-Length: {99 * 2**20}")], 413),
    "chunks without end": (lambda path, body: [head(path, CHUNKED) + b"9\r\n" + body[:9] + b"\r\n"], 408),
    "half a chunk": (lambda path, body: [head(path, CHUNKED) + b"99\r\n" + body[:9]], 408),
    "a chunk without size": (lambda path, body: [head(path, CHUNKED) + b"zz\r\n" + body], 400),
    "chunks too large": (lambda path, body: [head(path, CHUNKED), *[b"100000\r\n" + bytes(2**20) + b"\r\n"] * 9], 413),
    "an endless extension": (lambda path, body: [head(path, CHUNKED) + b"9;" + b"a" * 2**19, *[b"a" * 2**16] * 9], 400),
    "endless trailers": (
        lambda path, body: [head(path, CHUNKED) + b"1\r\n{\r\n0\r\n", *[b"A: b\r\n" * 2**14] * 9],
        400,
    ),
    "byte by byte": (lambda path, body: [head(path, "Content-Length: 99"), *[b" "] * 8], 408),
    "a promise": (lambda path, body: [head(path, "Expect: 100-continue", "Content-Length: 9")], 408),
    "an endless head": (lambda path, body: [head(path)[:-2] + b"X: " + b"a" * 2**17], 400),
    "many heads": (lambda path, body: [head(path)[:-2], *[b"X: y\r\n" * 1000] * 20], 400),
}


def status_of(server, pieces):
    """Of a server's last answer on a connection of its own; 0 if it closes without one."""
    with connected(server) as client:
        try:
            for piece in pieces:
                client.sendall(piece)
                time.sleep(0.05 if len(piece) < 9 else 0)
        except OSError:
            pass  # it has heard enough
        said = b""
        while b"\r\n\r\n" not in said.replace(b"100 Continue\r\n\r\n", b""):
            if not (piece := client.recv(4096)):
                break
            said += piece
    return int((re.findall(rb"HTTP/1.1 (\d+)", said) or [0])[-1])
