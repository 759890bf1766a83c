"""A request to one server ends, goes nowhere else, and fails by one class, whatever the server says."""

from __future__ import annotations

import contextlib
import socket
import threading
import time

import pytest

from mafrt.core.http_request import StatusError, http_request

OK = b"HTTP/1.1 200 OK\r\n"


@pytest.fixture
def server():
    """`server(talk)`: the address of one that talks with each connection; `server.seen` are the requests."""
    sockets, seen = [], []

    def of(talk):
        listening = socket.create_server(("127.0.0.1", 0))
        sockets.append(listening)

        def answer():
            while True:
                try:
                    connection, _ = listening.accept()
                except OSError:
                    return
                with connection, contextlib.suppress(OSError):
                    seen.append(connection.recv(2**16))
                    talk(connection)

        threading.Thread(target=answer, daemon=True).start()
        return f"http://127.0.0.1:{listening.getsockname()[1]}"

    of.seen = seen
    yield of
    for each in sockets:
        each.close()


def drip(head):
    def talk(connection):
        connection.sendall(head)
        for _ in range(12_000):
            connection.sendall(b" ")
            time.sleep(0.05)

    return talk


@pytest.mark.parametrize(
    "talk",
    [drip(OK + b"Content-Length: 9999\r\n\r\n"), drip(OK + b"X: "), drip(OK + b"\r\n"), drip(b""),
     drip(OK + b"Transfer-Encoding: chunked\r\n\r\n5"), drip(b"HTTP/1.1 100 Continue\r\n\r\n"),
     lambda connection: time.sleep(600), lambda connection: (connection.recv(1), time.sleep(600))],
)  # fmt: skip
@pytest.mark.parametrize("body", [None, b"x" * 2**24])
def test_it_ends_in_time(server, talk, body):
    begin = time.monotonic()
    with pytest.raises(TimeoutError, match="within"):
        http_request(server(talk), body, headers={}, within_s=0.5, most=2**20)
    assert time.monotonic() - begin < 300


@pytest.mark.parametrize(
    "said",
    [b"", b"garbage\r\n\r\n", b"HTTP/1.1 99999 OK\r\n\r\n", b"HTTP/1.1 200 " + b"x" * 99_999 + b"\r\n\r\n",
     OK + b"X: y\r\n" * 1000 + b"\r\n", OK + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
     OK + b"Transfer-Encoding: chunked\r\n\r\n-5\r\n", OK + b"\r\n" + b" " * 2**21, b"\x16\x03\x01\x00\x00",
     OK + b"Content-Length: 99999999999\r\n\r\n" + b" " * 2**21],
)  # fmt: skip
def test_what_is_no_reply_is_an_error_of_the_server(server, said):
    with pytest.raises(OSError):
        http_request(server(lambda connection: connection.sendall(said)), headers={}, within_s=20, most=2**20)


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308, 401, 404, 500])
def test_it_goes_nowhere_else(server, status):
    other = server(lambda connection: connection.sendall(OK + b"Content-Length: 2\r\n\r\n{}"))
    for place in (f"{other}/x", "file:///etc/passwd", "http://[x", "//evil.example"):
        said = f"HTTP/1.1 {status} Go\r\nLocation: {place}\r\nContent-Length: 0\r\n\r\n".encode()
        for body in (None, b"{}"):
            with pytest.raises(StatusError, match=str(status)) as raised:
                url = server(lambda connection, said=said: connection.sendall(said))
                http_request(url, body, headers={"Authorization": "Bearer t"}, within_s=20, most=99)
            assert raised.value.status == status
    assert len(server.seen) == 8


def test_a_reply(server, monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    url = server(lambda connection: connection.sendall(OK + b"Content-Length: 2\r\n\r\n{}"))
    assert http_request(f"{url}/a", b"body", headers={"X-Own": "1"}, within_s=20, most=2) == b"{}"
    assert server.seen[0].startswith(b"POST /a HTTP/1.1\r\n") and b"X-Own: 1" in server.seen[0]
    assert http_request(url, headers={}, within_s=20, most=2) == b"{}"
    assert server.seen[1].startswith(b"GET / HTTP/1.1\r\n")
