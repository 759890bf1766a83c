"""What a server may send to a client of httpx and httpx2: floods and bombs end in an error of the package."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import zlib

import pytest

from mafrt.core.http_bounds import bounded
from mafrt.core.http_request import is_http_address
from mafrt.engines.vllm import server_calls

OK = b"HTTP/1.1 200 OK\r\n"


def bomb():
    """10 MiB of zeros in 10 KiB."""
    packed = zlib.compress(b"0" * (10 << 20))
    return b"content-encoding: deflate\r\ncontent-length: %d\r\n\r\n" % len(packed) + packed


TALKS = {
    "a body without an end": OK + b"content-length: 999999999\r\n\r\n" + b"x" * (3 << 20),
    "chunks without an end": OK + b"transfer-encoding: chunked\r\n\r\n" + (b"10000\r\n" + b" " * 65536 + b"\r\n") * 40,
    "a bomb": OK + bomb(),
    "thousands of objects": OK + b"content-length: 40002\r\n\r\n[" + b"{}, " * 10_000 + b"]",
    "a packing that is none": OK + b"content-encoding: br\r\ncontent-length: 3\r\n\r\nabc",
}


@pytest.fixture(params=["httpx", "httpx2"])
def ask(request):
    """`ask(said, ...)`: the response of a bounded client to a server that says `said`, and the requests it saw."""
    package = pytest.importorskip(request.param)

    def of(said, times=1, **bounds):
        seen = []

        async def answer(reader, writer):
            seen.append(await reader.readuntil(b"\r\n\r\n"))
            writer.write(said)
            writer.close()

        async def run():
            server = await asyncio.start_server(answer, "127.0.0.1", 0)
            url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/x"
            async with server, bounded(package.AsyncClient(follow_redirects=True), 2 << 20, **bounds) as client:
                for _ in range(times):
                    response = await client.get(url)
                return response

        return asyncio.run(run()), seen

    of.package = package
    return of


@pytest.mark.parametrize("said", TALKS.values(), ids=TALKS)
def test_more_than_is_taken_is_an_error_of_the_package(ask, said):
    with pytest.raises(ask.package.StreamError):
        ask(said, parts=5000)


def test_a_reply_within_the_bounds_is_read(ask):
    response, seen = ask(OK + b'content-length: 9\r\n\r\n{"a": 12}', parts=5000)
    assert response.json() == {"a": 12}
    assert b"accept-encoding: identity" in seen[0].lower()


def test_a_stream_that_its_reader_bounds_is_left_to_it(ask):
    said = OK + b"content-type: text/event-stream\r\ncontent-length: %d\r\n\r\n" % (3 << 20) + b"x" * (3 << 20)
    response, _ = ask(said, unbounded="text/event-stream")
    assert len(response.content) == 3 << 20


def test_redirects_are_not_followed_and_cookies_not_kept(ask):
    said = b"HTTP/1.1 307 X\r\nlocation: /x\r\nset-cookie: a=b\r\ncontent-length: 0\r\n\r\n"
    response, seen = ask(said, times=2)
    assert response.status_code == 307 and len(seen) == 2 and b"a=b" not in seen[1]


def test_the_clients_of_the_sdks_are_taken():
    for name in ("openai", "anthropic"):
        sdk = importlib.import_module(name)
        assert not bounded(sdk.DefaultAsyncHttpxClient(), 1).follow_redirects


def test_a_vllm_server_that_drips_is_lost_in_time(monkeypatch):
    pytest.importorskip("httpx")
    monkeypatch.setattr(server_calls, "CONNECT_S", 0.1)

    async def drip(reader, writer):
        writer.write(OK + b"content-length: 9999\r\n\r\n")
        with contextlib.suppress(OSError):
            while True:
                writer.write(b" ")
                await writer.drain()
                await asyncio.sleep(0.02)

    async def run():
        server, calls = await asyncio.start_server(drip, "127.0.0.1", 0), server_calls.ServerCalls(0.2)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with calls.client() as client:
            with pytest.raises(server_calls.LostError, match=r"no answer within 0\.2 s"):
                await calls.call(client, url, "POST", "/v1/completions", {})
        server.close()

    asyncio.run(asyncio.wait_for(run(), 20))


@pytest.mark.parametrize("text", ["http://h", "https://h:1/p?q=1", "http://[::1]:8", "http://a.b:65535/"])
def test_an_address(text):
    assert is_http_address(text)


@pytest.mark.parametrize(
    "text",
    ["", "h", "h:80", "ftp://h", "http://", "http:///p", "http://h:x", "http://h:99999", "http://h:-1", "http://h h",
     "http://h\n", "http://[::1", "http://a..b", "http://" + "a" * 64, "http://:80", "HTTP//h", "http://\x00", "file:///etc"],
)  # fmt: skip
def test_no_address(text):
    assert not is_http_address(text)
