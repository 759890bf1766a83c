"""Local servers against pages of other sites, clients that leave, stall or ask again, and requests that are none."""

from __future__ import annotations

import json
import socket
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor

import httpx
import pytest
from helpers_requests import BROKEN, CHUNKED, connected, head, status_of
from openai import APITimeoutError, BadRequestError, OpenAI

from mafrt.environment import local_server
from mafrt.environment.chat_api.protocol import ApiError, ChatReply, Token
from mafrt.environment.chat_api.server import ChatServer, Limits
from mafrt.environment.local_server import RefusedError, check_caller

ASK = [{"role": "user", "content": "x"}]
CHAT = {"model": "a", "messages": ASK}
LONG = int("9" * 400)


class Asked:
    """Models that note their calls and answer when they are told to."""

    def __init__(self, learns=False):
        self.learns, self.calls, self.futures, self.text = learns, [], [], "answer"
        self.answering = True

    def models(self, key):
        return ["a"]

    def begin(self, key, call, said):
        self.calls.append(call)
        future: Future[ChatReply] = Future()
        self.futures.append(future)
        if self.answering:
            future.set_result(ChatReply(self.text, False, 3, 2, (Token("ans", -0.5), Token("wer", -float("inf")))))
        return future

    def reward(self, key, body):
        raise ApiError(404, "no rewards here")


BODIES = {
    "chat/completions": CHAT,
    "responses": {"model": "a", "input": "x"},
    "messages": {"model": "a", "max_tokens": 9, "messages": ASK},
}
VERSION = {"anthropic-version": "2023-06-01"}
TYPED = {**VERSION, "content-type": "application/json"}


@pytest.fixture
def served(request):
    models = Asked(learns=getattr(request, "param", False))
    server = ChatServer(models, limits=Limits(calls=8, body_s=0.5, connections=12))
    yield models, server, f"{server.url}/v1"
    server.close()


@pytest.fixture(scope="module")
def standing():
    """One server for all requests that it refuses or answers at once, and leave nothing behind: a server's end takes
    .2 s."""
    models = Asked()
    server = ChatServer(models, limits=Limits(calls=8, body_s=0.5, connections=12))
    yield models, f"{server.url}/v1"
    server.close()


@pytest.fixture
def refusing(standing):
    standing[0].calls.clear()
    return standing


def soon(what):
    deadline = time.monotonic() + 90
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.01)


# -------------------------------------------------------------------------------------------------------- other sites


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"host": "evil.example"}, 403),
        ({"host": "evil.example:8000"}, 403),
        ({"host": "127.0.0.1.evil.example"}, 403),
        ({"host": "localhost@evil.example"}, 403),
        ({"host": ""}, 403),
        ({"host": "127.0.0.1:x"}, 403),
        ({"origin": "http://evil.example"}, 403),
        ({"origin": "null"}, 403),
        ({"origin": "http://localhost.evil.example"}, 403),
        ({"sec-fetch-site": "cross-site"}, 403),
        ({"content-type": "text/plain"}, 415),
        ({"content-type": "application/x-www-form-urlencoded"}, 415),
        ({"content-type": "text/plain; application/json"}, 415),
        ({"content-type": "multipart/form-data"}, 415),
        ({"origin": "http://localhost:3000", "content-type": ""}, 415),
        ({"host": "localhost:80", "content-type": "application/json; charset=utf-8"}, 200),
        ({"host": "[::1]:80"}, 200),
        ({"origin": "http://127.0.0.1:3000"}, 200),
    ],
)
def test_only_programs_of_this_machine_are_answered(refusing, headers, status):
    _, url = refusing
    given = {"content-type": "application/json", **headers}
    reply = httpx.post(f"{url}/chat/completions", content=json.dumps(CHAT), headers=given, timeout=60)
    assert reply.status_code == status and (status == 200 or reply.json()["error"]["message"])


def test_a_token_lets_other_names_in_but_no_other_pages():
    check_caller([("host", "box.example")], "0.0.0.0", token=True)
    with pytest.raises(RefusedError):
        check_caller([("host", "box.example"), ("origin", "http://evil.example")], "0.0.0.0", token=True)
    with pytest.raises(RefusedError, match="evil"):
        check_caller([("host", "evil.example")], "10.0.0.1")
    with pytest.raises(RefusedError, match="one Host"):
        check_caller([("host", "127.0.0.1"), ("host", "evil.example")], "127.0.0.1")


def test_the_corpus_is_not_read_by_other_sites():
    from starlette.testclient import TestClient

    from mafrt.envs.search.retrieval import Bm25, Passage
    from mafrt.envs.search.server import app

    client, body = TestClient(app(Bm25([Passage("0", "Paris", "The Seine crosses it.")]))), {"queries": ["Seine"]}
    assert client.post("/retrieve", json=body).status_code == 200
    assert client.get("/health", headers={"host": "evil.example"}).status_code == 403
    for headers in ({"host": "evil.example"}, {"origin": "http://evil.example"}):
        assert client.post("/retrieve", json=body, headers=headers).status_code == 403
    plain = client.post("/retrieve", content=json.dumps(body), headers={"content-type": "text/plain"})
    assert plain.status_code == 415 and "application/json" in plain.json()["error"]
    for wrong in (b'{"queries": NaN}', b"[" * 100_000, b"\xff", b'{"queries": ["x"], "topk": ' + b"9" * 400 + b"}"):
        reply = client.post("/retrieve", content=wrong, headers={"content-type": "application/json"})
        assert reply.status_code in (400, 422)


# ------------------------------------------------------------------------------------------------- clients that leave


@pytest.mark.parametrize("path", BODIES)
def test_clients_that_leave_give_their_places_back(served, path):
    models, server, url = served
    models.answering = False
    for _ in range(2):
        with ThreadPoolExecutor(8) as pool, httpx.Client(base_url=url, headers=VERSION, timeout=0.5) as client:
            bodies = [{**BODIES[path], "stream": n % 2 == 0} for n in range(8)]
            left = [pool.submit(client.post, path, json=body) for body in bodies]
            assert all(isinstance(each.exception(), httpx.TimeoutException) for each in left)
        soon(lambda: server.in_flight == 0)
    assert all(future.cancelled() for future in models.futures) and len(models.futures) == 16


@pytest.mark.parametrize("served", [True], indirect=True)
@pytest.mark.parametrize("path", ["chat/completions", "responses"])
def test_a_client_that_asks_again_means_the_same_call(served, path):
    models, server, url = served
    models.answering = False
    with OpenAI(base_url=url, api_key="x", timeout=0.3, max_retries=2) as client, pytest.raises(APITimeoutError):
        if path == "responses":
            client.responses.create(model="a", input="x")
        else:
            client.chat.completions.create(model="a", messages=ASK)
    assert len(models.calls) == 1
    soon(lambda: server.in_flight == 0)
    models.futures[0].set_result(ChatReply("late"))
    # The answer that nobody heard is there for the client that asks again, and only once.
    with OpenAI(base_url=url, api_key="x", max_retries=0) as client:
        models.answering = True
        if path == "responses":
            assert client.responses.create(model="a", input="x").output_text == "late"
            assert client.responses.create(model="a", input="x").output_text == "answer"
        else:
            said = [client.chat.completions.create(model="a", messages=ASK).choices[0].message.content for _ in "ab"]
            assert said == ["late", "answer"]
    assert len(models.calls) == 2


@pytest.mark.parametrize("served", [True], indirect=True)
def test_a_client_that_left_is_gone_also_where_it_asks_again_at_once(served):
    models, server, _ = served
    models.answering = False
    body = json.dumps(CHAT).encode()
    asked = head("/v1/chat/completions", f"Content-Length: {len(body)}") + body
    second = connected(server)
    soon(lambda: len(server._server.server_state.connections) == 1)
    with connected(server) as first:
        first.sendall(asked)
        soon(lambda: models.calls)
        goes_on = threading.Event()
        loop = next(iter(server._server.server_state.connections)).loop
        loop.call_soon_threadsafe(goes_on.wait, 60)  # so that both are seen in one turn of the loop
    second.sendall(asked)
    goes_on.set()
    soon(lambda: server.in_flight == 1 and server._calls[""][0].listeners == 1)
    models.futures[0].set_result(ChatReply("late"))
    assert b"late" in read_all(second) and len(models.calls) == 1


@pytest.mark.parametrize("served", [True], indirect=True)
@pytest.mark.parametrize("path", BODIES)
def test_equal_calls_that_both_wait_are_two_and_a_key_names_one(served, path):
    models, _, url = served
    models.answering = False
    with ThreadPoolExecutor(4) as pool, httpx.Client(base_url=url, headers=VERSION, timeout=300) as client:
        own = [pool.submit(client.post, path, json=BODIES[path]) for _ in range(2)]
        soon(lambda: len(models.calls) == 2)
        key = {"idempotency-key": "one"}
        same = [pool.submit(client.post, path, json=BODIES[path], headers=key) for _ in "ab"]
        soon(lambda: len(models.calls) == 3)
        time.sleep(0.2)
        for future in models.futures:
            future.set_result(ChatReply("x"))
        assert all(each.result().status_code == 200 for each in own + same)
    assert len(models.calls) == 3


@pytest.mark.parametrize("served", [True], indirect=True)
@pytest.mark.parametrize("path", BODIES)
def test_a_client_that_leaves_amid_a_stream_and_asks_again_means_the_same_call(served, path):
    models, server, url = served
    models.answering = False
    pieces = []
    begin = models.begin
    models.begin = lambda key, call, said: pieces.append(said) or begin(key, call, said)
    asked = {"url": path, "json": {**BODIES[path], "stream": True}}
    with httpx.Client(base_url=url, headers=VERSION, timeout=300) as client:
        with ThreadPoolExecutor(1) as pool:
            pool.submit(lambda: soon(lambda: pieces) or pieces[0]("late "))
            with client.stream("POST", **asked) as streamed:
                assert any("late" in line for line in streamed.iter_lines())
        soon(lambda: server.in_flight == 0)
        models.futures[0].set_result(ChatReply("late answer"))
        assert "late answer" in client.post(**asked).text and len(models.calls) == 1


def test_of_several_answers_one_that_fails_ends_the_others(served, caplog):
    models, server, url = served
    models.answering = False
    with ThreadPoolExecutor(1) as pool, httpx.Client(base_url=url, timeout=300) as client:
        asked = pool.submit(client.post, "chat/completions", json={**CHAT, "n": 4})
        soon(lambda: len(models.futures) == 4)
        assert models.futures[3].set_running_or_notify_cancel()  # the engine has it, so it cannot be cancelled
        models.futures[2].set_exception(ApiError(503, "the engine is away"))
        assert asked.result().status_code == 503
        models.futures[3].set_result(ChatReply("late"))
        soon(lambda: server.in_flight == 0)
    assert [future.cancelled() for future in models.futures] == [True, True, False, False]
    assert "Traceback" not in caplog.text


@pytest.mark.parametrize("error", [ApiError(400, "no"), RuntimeError("no")])
def test_of_several_answers_one_that_cannot_begin_ends_the_others(served, monkeypatch, error):
    models, server, url = served
    models.answering = False

    def begin(key, call, said):
        if len(models.futures) == 2:
            raise error
        return Asked.begin(models, key, call, said)

    monkeypatch.setattr(models, "begin", begin)
    assert httpx.post(f"{url}/chat/completions", json={**CHAT, "n": 4}, timeout=60).status_code in (400, 500)
    assert all(future.cancelled() for future in models.futures) and server.in_flight == 0


def test_more_answers_than_a_server_gives_at_once_are_no_matter_of_waiting(served):
    models, _, url = served
    reply = httpx.post(f"{url}/chat/completions", json={**CHAT, "n": 9}, timeout=60)
    assert reply.status_code == 400 and "at most 8" in reply.text and not models.calls
    assert httpx.post(f"{url}/chat/completions", json={**CHAT, "n": 8}, timeout=60).status_code == 200


# ----------------------------------------------------------------------------------------------- clients that stall


@pytest.mark.slow
@pytest.mark.parametrize(("parser", "learns"), [("httptools_impl", True), ("h11_impl", False)])
def test_broken_requests_are_refused_and_leave_nothing_behind(parser, learns, monkeypatch):
    from uvicorn.protocols.http import auto

    module = pytest.importorskip(f"uvicorn.protocols.http.{parser}")
    kind = module.HttpToolsProtocol if parser == "httptools_impl" else module.H11Protocol
    monkeypatch.setattr(auto, "AutoHTTPProtocol", kind)
    models = Asked(learns=learns)
    server = ChatServer(models, limits=Limits(calls=8, body_s=0.2, connections=12))
    for path, body in BODIES.items():
        whole = json.dumps(body).encode()
        for name, (made, status) in BROKEN.items():
            assert status_of(server, made(f"/v1/{path}", whole)) == status, (path, name)
        with connected(server) as half:  # and one that leaves
            half.sendall(head(f"/v1/{path}", f"Content-Length: {len(whole)}") + whole[:9])
    assert not models.calls and server.in_flight == 0
    # A second request behind the one that runs hides no client's leaving.
    models.answering = False
    for path, body in BODIES.items():
        one = head(f"/v1/{path}", f"Content-Length: {len(json.dumps(body))}") + json.dumps(body).encode()
        for pieces in ([one + one], [one, one], [one, one[:50]]):
            with connected(server) as client:
                for piece in pieces:
                    client.sendall(piece)
                    time.sleep(0.05)
    soon(lambda: server.in_flight == 0)
    models.answering = True
    asked = json.dumps({**CHAT, "seed": 5}).encode()
    assert status_of(server, [head("/v1/chat/completions", f"Content-Length: {len(asked)}") + asked]) == 200
    server.close()


def test_connections_that_do_nothing_make_room(served):
    _, server, url = served
    held = [connected(server) for _ in range(40)]
    assert httpx.get(f"{url}/models", timeout=300).status_code == 200
    for each in held:
        each.close()


def test_a_head_that_does_not_come_ends_the_connection(monkeypatch):
    monkeypatch.setattr(local_server, "HEAD_S", 0.2)
    server = ChatServer(Asked())
    with connected(server) as silent, connected(server) as slow:
        slow.sendall(b"GET /v1/models HT")
        assert silent.recv(10) == b"" and slow.recv(10) == b""
    server.close()


def asking(server, text=""):
    """A connection that has asked and reads nothing, with small buffers."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.settimeout(300)
    client.connect((server.host, server.port))
    body = json.dumps({**CHAT, "user": text}).encode()
    client.sendall(head("/v1/chat/completions", f"Content-Length: {len(body)}") + body)
    return client


@pytest.mark.parametrize("stream", [False, True])
def test_answers_that_nobody_reads_are_dropped(served, monkeypatch, stream):
    monkeypatch.setattr(local_server, "UNREAD_S", 0.5)
    models, server, url = served
    models.text = "a" * 2**23
    clients = []
    for _ in range(4):
        client = connected(server)
        body = json.dumps({**CHAT, "stream": stream}).encode()
        client.sendall(head("/v1/chat/completions", f"Content-Length: {len(body)}") + body)
        clients.append(client)
    soon(lambda: len(models.calls) == 4)
    soon(lambda: server.in_flight == 0 and not server._server.server_state.connections)
    assert all(len(read_all(client)) < 2**23 for client in clients)
    # One that reads gets all of it, however slowly.
    with asking(server) as slow:
        said = 0
        while said < 2**23:
            part = slow.recv(2**20)
            assert part
            said += part.count(b"a")
            time.sleep(0.002)
    assert httpx.get(f"{url}/models", timeout=300).status_code == 200


def test_bytes_of_answers_that_nobody_reads_are_bounded_all_together(served, monkeypatch):
    monkeypatch.setattr(local_server, "UNREAD_MIB", 30)
    models, server, _ = served
    models.text = "a" * 2**23
    clients = [asking(server, str(number)) for number in range(6)]
    soon(lambda: len(models.calls) == 6)
    held = server._server.server_state.connections
    soon(lambda: sum(each.transport.get_write_buffer_size() for each in list(held)) < 30 * 2**20)
    # Each is more than 8 MiB with its head.
    assert 1 <= sum(len(read_all(client)) > 2**23 for client in clients) <= 3


def read_all(client):
    said = bytearray()
    with client:
        while True:
            try:
                part = client.recv(2**20)
            except ConnectionResetError:
                return said
            if not part:
                return said
            said += part
            if b'"usage"' in said[-200:]:
                return said


def test_what_stands_behind_a_body_changes_no_head(served):
    _, server, _ = served
    body = json.dumps(CHAT).encode()
    whole = head("/v1/chat/completions", CHUNKED) + b"%x\r\n%b\r\n0\r\n" % (len(body), body)
    behind = b"Host: evil.example\r\nOrigin: http://evil.example\r\n\r\n"
    assert status_of(server, [whole + behind]) == 200


def test_an_upgrade_to_another_protocol_is_refused_with_a_sentence(served):
    models, server, _ = served
    body = json.dumps(CHAT).encode()
    more = ("Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAMAAABkAAQAAP__")
    with connected(server) as client:
        client.sendall(head("/v1/chat/completions", f"Content-Length: {len(body)}", *more) + body)
        said = read_all(client)
    assert b" 400 " in said and b"HTTP/1.1 alone" in said and said.count(b"HTTP/1.1 400") == 1 and not models.calls


# -------------------------------------------------------------------------------------------- requests that are none


@pytest.mark.parametrize(
    "more",
    [
        {"messages": [{"role": [], "content": "x"}]},
        {"messages": [{"role": {}, "content": "x"}]},
        {"messages": [{"role": "user", "content": {"a": 1}}]},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        {"messages": [{"role": "user", "content": [{"type": "input_audio", "text": "x"}]}]},
        {"messages": [{"role": "assistant", "tool_calls": 7}]},
        {"messages": [{"role": "assistant", "tool_calls": [{"function": []}]}]},
        {"messages": {"role": "user"}},
        {"messages": [{"role": "assistant", "audio": {"id": "x"}}]},
        {"messages": [{"role": "assistant", "function_call": 7}]},
        {"max_tokens": LONG},
        {"seed": LONG},
        {"temperature": -LONG},
        {"top_p": "high"},
        {"logprobs": "yes"},
        {"logprobs": True, "top_logprobs": 3},
        {"n": 200},
        {"n": LONG},
        {"response_format": {"type": "xml"}},
        {"response_format": {"type": []}},
        {"response_format": {"type": "json_schema"}},
        {"response_format": {"type": "json_schema", "json_schema": {"schema": []}}},
        {"response_format": []},
        {"logit_bias": {"1": 5}},
        {"frequency_penalty": 0.5},
        {"presence_penalty": "x"},
        {"modalities": ["text", "audio"]},
        {"audio": {"voice": "x"}},
        {"functions": [{"name": "f"}]},
        {"function_call": "auto"},
        {"web_search_options": {}},
        {"top_k": 5},
        {"stop": [[]]},
        {"stream": "yes"},
        {"stream_options": []},
        {"parallel_tool_calls": 1},
        {"tools": [{"type": "function", "function": {"name": []}}]},
        {"tools": [{"type": "code_interpreter"}]},
        {"tools": [7]},
        {"tool_choice": "required"},
        {"tool_choice": {"type": "function", "function": {"name": "other"}}},
        {"tool_choice": []},
    ],
    ids=lambda more: str(more)[:60],
)
def test_what_cannot_be_honoured_is_refused_with_a_sentence(refusing, more):
    models, url = refusing
    reply = httpx.post(f"{url}/chat/completions", json={**CHAT, **more}, timeout=60)
    assert reply.status_code == 400 and reply.json()["error"]["message"] and not models.calls


@pytest.mark.parametrize(
    "more",
    [
        {"input": []},
        {"input": 7},
        {"input": [7]},
        {"input": [{"type": "computer_call"}]},
        {"input": [{"role": []}]},
        {"input": [{"type": "function_call", "name": []}]},
        {"input": [{"type": "reasoning", "summary": []}]},
        {"instructions": []},
        {"text": {"format": {"type": "json_schema", "name": "x", "schema": 7}}},
        {"text": {"format": {"type": "grammar"}}},
        {"text": 5},
        {"include": ["file_search_call.results"]},
        {"previous_response_id": "resp_of_nobody"},
        {"previous_response_id": []},
        {"conversation": "c"},
        {"background": True},
        {"truncation": "auto"},
        {"prompt": {"id": "x"}},
        {"top_logprobs": 2},
        {"max_output_tokens": LONG},
        {"tools": [{"type": "web_search"}]},
        {"tool_choice": "required"},
        {"best_of": 2},
    ],
    ids=lambda more: str(more)[:60],
)
def test_responses_refuse_what_they_cannot_honour(refusing, more):
    models, url = refusing
    reply = httpx.post(f"{url}/responses", json={"model": "a", "input": "x", **more}, timeout=60)
    assert reply.status_code == 400 and reply.json()["error"]["message"] and not models.calls


@pytest.mark.parametrize(
    "body",
    [
        b"[" * 100_000,
        b'{"a":' * 5_000 + b"1" + b"}" * 5_000,
        b'{"model": "a", "messages": ' + b"[" * 300 + b"]" * 300 + b"}",
        b'{"model": NaN}',
        b'{"model": "a", "input": "x", "messages": [], "metadata": {"a": -1e999}}',
        b"\xff\xfe",
        b"9" * 10_000,
        b"",
    ],
    ids=lambda body: str(body[:20]),
)
@pytest.mark.parametrize("path", ["chat/completions", "responses", "messages", "messages/count_tokens", "reward"])
def test_bytes_that_are_no_request_are_refused(refusing, body, path):
    _, url = refusing
    reply = httpx.post(f"{url}/{path}", content=body, headers={"content-type": "application/json"}, timeout=60)
    assert reply.status_code == 400 and reply.json()["error"]["message"]


FUNCTION = {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {"a": {"enum": ["x"]}}}}
RICH = {
    "chat/completions": {
        "model": "a",
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "x"}], "name": "n"},
            {"role": "assistant", "content": None, "tool_calls": [
                {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}]},
            {"role": "tool", "tool_call_id": "c", "content": "7"},
        ],
        "tools": [{"type": "function", "function": FUNCTION}], "tool_choice": "auto", "n": 1, "temperature": 1,
        "max_tokens": 9, "stop": ["x"], "stream_options": {"include_usage": True}, "metadata": {"a": "b"},
    },
    "responses": {
        "model": "a", "instructions": "i", "max_output_tokens": 9, "metadata": {"a": "b"},
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "x"}]},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "y"}]},
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "7"},
            {"type": "reasoning", "id": "r", "summary": []},
        ],
        "tools": [{"type": "function", **FUNCTION}], "tool_choice": "auto", "text": {"format": {"type": "text"}},
    },
    "messages": {
        "model": "a", "max_tokens": 9, "system": [{"type": "text", "text": "s"}], "stop_sequences": ["x"],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "x"}]},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "f", "input": {"a": 1}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": [
                {"type": "text", "text": "7"}]}]},
        ],
        "tools": [{"name": "f", "description": "d", "input_schema": FUNCTION["parameters"]}],
        "tool_choice": {"type": "auto"}, "metadata": {"user_id": "u"}, "thinking": {"type": "disabled"},
    },
}  # fmt: skip
DEEP = json.loads("[" * 90 + "]" * 90)
WILD = [None, True, -1, 1.5, LONG, 1e308, "", "\ud800", "\x00", "a" * 70_000, [], {}, [None], [[]], DEEP, {"": None},
        {"type": "object"}, {"$ref": "#"}, [{"type": "text"}], {"\ud800": 1}, {"role": "user"}]  # fmt: skip


def places_in(value, path=()):
    yield path
    for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield from places_in(value[key], (*path, key))


@pytest.mark.parametrize("path", RICH)
def test_wild_values_anywhere_are_an_answer_or_a_400(served, path):
    import copy
    import random

    _, server, url = served
    choose = random.Random(0)
    with httpx.Client(headers={"content-type": "application/json", **VERSION}, timeout=300) as client:
        assert client.post(f"{url}/{path}", json=RICH[path]).status_code == 200
        for place in places_in(RICH[path]):
            for value in choose.sample(WILD, 3):
                body: dict = {"": copy.deepcopy(RICH[path])}
                within = body
                for key in ("", *place)[:-1]:
                    within = within[key]
                within[("", *place)[-1]] = value
                reply = client.post(f"{url}/{path}", content=json.dumps(body[""]))
                assert reply.status_code in (200, 400), (place, value, reply.text)
    soon(lambda: server.in_flight == 0)


def test_lone_surrogates_and_wild_answers_do_no_harm(served):
    models, _, url = served
    models.text = '<tool_call>{"name": "f\\ud800", "arguments": {"a": "\\ud800", "b": 1e999}}</tool_call>\ud800'
    tool = {"name": "f", "description": "\ud800", "parameters": {"type": "object", "title": "\ud800"}}
    chat = json.dumps({**CHAT, "tools": [{"type": "function", "function": tool}]})
    responses = json.dumps({"model": "a", "input": "\ud800", "tools": [{"type": "function", **tool}]})
    for path, body in (("chat/completions", chat), ("responses", responses)):
        for stream in (False, True):
            content = body[:-1] + f', "stream": {json.dumps(stream)}}}'
            reply = httpx.post(
                f"{url}/{path}", content=content, headers={"content-type": "application/json"}, timeout=60
            )
            assert reply.status_code == 200 and "f\ufffd" in reply.text and "Infinity" not in reply.text


USER = ASK[0]
OFFERED = {
    "chat/completions": {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}},
    "responses": {"type": "function", "name": "f", "parameters": {"type": "object"}},
    "messages": {"name": "f", "input_schema": {"type": "object"}},
}


@pytest.mark.parametrize(
    ("path", "more"),
    [
        ("chat/completions", {"messages": [{**USER, "weight": 0.5}]}),
        ("chat/completions", {"messages": [USER, {"role": "assistant", "content": "y", "prefix": True}]}),
        (
            "chat/completions",
            {"messages": [{**USER, "content": [{"type": "text", "text": "x", "lang": "en"}]}]},
        ),
        ("chat/completions", {"messages": [{**USER, "name": "a\nb"}]}),
        ("chat/completions", {"messages": [{**USER, "name": ["a"]}]}),
        ("chat/completions", {"stream_options": {"usage": True}}),
        ("chat/completions", {"stream_options": {"include_usage": "yes"}}),
        ("chat/completions", {"tools": [{**OFFERED["chat/completions"], "timeout": 3}]}),
        ("chat/completions", {"tools": [OFFERED["chat/completions"]], "tool_choice": {"type": "function", "most": 3}}),
        (
            "chat/completions",
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "object"}, "grammar": "x"}}},
        ),
        ("responses", {"prompt_cache_options": {"prewarm": True}}),
        ("responses", {"text": {"length": 3}}),
        ("responses", {"text": "plain"}),
        ("responses", {"reasoning": {"tokens": 3}}),
        ("responses", {"reasoning": {"mode": "pro"}}),
        ("responses", {"reasoning": {"context": "all_turns"}}),
        ("responses", {"reasoning": "high"}),
        ("responses", {"stream_options": {"include_usage": True}}),
        ("responses", {"tools": [{**OFFERED["responses"], "defer_loading": True}]}),
        ("responses", {"tools": [{**OFFERED["responses"], "allowed_callers": ["programmatic"]}]}),
        ("responses", {"input": [{**USER, "name": "bob"}]}),
        (
            "responses",
            {
                "input": [
                    USER,
                    {"type": "function_call", "name": "f", "arguments": "{}", "call_id": "c", "namespace": "n"},
                ]
            },
        ),
        ("messages", {"messages": [{**USER, "name": "bob"}]}),
        ("messages", {"tools": [{**OFFERED["messages"], "timeout": 3}]}),
        ("messages", {"tools": [{**OFFERED["messages"], "allowed_callers": ["code_execution_20250825"]}]}),
        ("messages", {"output_config": {"task_budget": {"type": "tokens", "total": 9}}}),
        ("messages", {"thinking": {"type": "adaptive", "words": 9}}),
        ("messages", {"tools": [OFFERED["messages"]], "tool_choice": {"type": "auto", "most": 1}}),
    ],
)
def test_fields_within_fields_are_refused_where_nothing_reads_them(refusing, path, more):
    models, url = refusing
    reply = httpx.post(f"{url}/{path}", json={**BODIES[path], **more}, headers=VERSION, timeout=60)
    assert reply.status_code == 400 and not models.calls, (path, more)


def test_results_of_tools_stand_in_the_order_of_their_calls(refusing):
    models, url = refusing
    calls = [{"id": name, "type": "function", "function": {"name": name, "arguments": "{}"}} for name in "abc"]
    chat = [USER, {"role": "assistant", "content": None, "tool_calls": calls}]
    chat += [{"role": "tool", "tool_call_id": name, "content": name} for name in "cab"]
    items = [USER, *({"type": "function_call", "call_id": name, "name": name, "arguments": "{}"} for name in "abc")]
    items += [{"type": "function_call_output", "call_id": name, "output": name} for name in "cab"]
    used = [{"type": "tool_use", "id": name, "name": name, "input": {}} for name in "abc"]
    blocks = [{"type": "tool_result", "tool_use_id": name, "content": name} for name in "cab"]
    blocks.append({"type": "text", "text": "go on"})
    turns = [USER, {"role": "assistant", "content": used}, {"role": "user", "content": blocks}]
    for path, more in (
        ("chat/completions", {"messages": chat}),
        ("responses", {"input": items}),
        ("messages", {"messages": turns}),
    ):
        models.calls.clear()
        asked = json.dumps({**BODIES[path], **more})
        assert httpx.post(f"{url}/{path}", content=asked, headers=TYPED, timeout=60).status_code == 200
        said = [message["content"] for message in models.calls[0].messages if message["role"] == "tool"]
        assert said == ["a", "b", "c"], path
        # One of no call there is refused; a program may have dropped the calls.
        stray = asked.replace('call_id": "c", "content', 'call_id": "z", "content')
        stray = stray.replace('call_id": "c", "output', 'call_id": "z", "output').replace(
            'use_id": "c"', 'use_id": "z"'
        )
        reply = httpx.post(f"{url}/{path}", content=stray, headers=TYPED, timeout=60)
        assert reply.status_code == 400 and "'z' is the id of no call" in reply.text
    asked = {**CHAT, "messages": [USER, *chat[2:]]}
    assert httpx.post(f"{url}/chat/completions", json=asked, timeout=60).status_code == 200


def test_names_and_thoughts_of_messages_reach_the_model(refusing):
    models, url = refusing

    def shown(*messages):
        models.calls.clear()
        asked = {**CHAT, "messages": [USER, *messages]}
        assert httpx.post(f"{url}/chat/completions", json=asked, timeout=60).status_code == 200
        return [message["content"] for message in models.calls[0].messages[1:]]

    one, two = {"role": "assistant", "name": "one"}, {"role": "assistant", "name": "two"}
    assert shown({**one, "content": "a"}, {**one, "content": "b"}) == ["a", "b"]  # one name tells nothing apart
    assert shown({**one, "content": "a"}, {**two, "content": "b"}) == ["one: a", "two: b"]
    # Nobody's words begin with another's name.
    assert shown({**one, "content": "a\ntwo: I agree"}, {**two, "content": "b"})[0] == "one: a\n> two: I agree"
    assert shown({"role": "assistant", "content": "a", "reasoning_content": "t"}) == ["<think>\nt\n</think>\n\na"]
    assert shown({"role": "assistant", "content": None, "refusal": "no"}) == ["no"]


def test_other_addresses_name_those_that_are_there(served):
    _, _, url = served
    for path in ("messages/batches", "embeddings", "completions", "assistants"):
        reply = httpx.post(f"{url}/{path}", json={}, timeout=60)
        assert reply.status_code == 404 and "/v1/chat/completions" in reply.json()["error"]["message"]
    assert httpx.get(f"{url}/responses", timeout=60).status_code == 405


# ----------------------------------------------------------------------------------------------------- what is honoured


def test_fields_that_are_honoured(served):
    models, _, url = served
    tools = [{"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in "fg"]
    with OpenAI(base_url=url, api_key="x", max_retries=0) as client:

        def ask(**more):
            return client.chat.completions.create(model="a", messages=ASK, **more).choices[0]

        tokens = ask(logprobs=True).logprobs.content
        assert (tokens[0].token, tokens[0].logprob, tokens[0].bytes) == ("ans", -0.5, [97, 110, 115])
        assert tokens[1].logprob == -9999.0 and ask().logprobs is None
        ask(tools=tools, tool_choice={"type": "function", "function": {"name": "g"}})
        system = models.calls[-1].messages[0]["content"]
        assert '"name": "g"' in system and '"name": "f"' not in system and "must call the function g" in system
        ask(tools=tools, tool_choice="required")
        assert "must call a function" in models.calls[-1].messages[0]["content"]
        ask(tools=tools, tool_choice="none")
        assert models.calls[-1].messages == ASK
        models.text = '<tool_call>{"name": "f", "arguments": {}}</tool_call>' * 2
        assert len(ask(tools=tools).message.tool_calls) == 2
        assert len(ask(tools=tools, parallel_tool_calls=False).message.tool_calls) == 1
        harmless = {"user": "u", "metadata": {"a": "b"}, "store": True, "service_tier": "auto", "prediction": None}
        assert ask(**harmless, seed=1, modalities=["text"], n=1, response_format={"type": "text"}).finish_reason


@pytest.mark.slow
def test_responses_follow_each_other(served):
    models, _, url = served
    with OpenAI(base_url=url, api_key="x", max_retries=0) as client:
        models.text = "one"
        first = client.responses.create(model="a", input="x", instructions="Be brief.")
        assert first.output_text == "one" and first.usage.total_tokens == 5 and first.output[0].id
        second = client.responses.create(model="a", input="y", previous_response_id=first.id)
        assert [m["content"] for m in models.calls[-1].messages] == ["x", "one", "y"]
        with pytest.raises(BadRequestError, match="earlier response"):
            client.responses.create(model="a", input="y", previous_response_id=second.id + "x")
        with client.responses.stream(model="a", input="z", previous_response_id=second.id) as stream:
            kinds = [event.type for event in stream]
            assert stream.get_final_response().output_text == "one"
        assert kinds[0] == "response.created" and kinds[-1] == "response.completed"
        assert [m["content"] for m in models.calls[-1].messages] == ["x", "one", "y", "one", "z"]
        unkept = client.responses.create(model="a", input="x", store=False)
        with pytest.raises(BadRequestError, match="earlier response"):
            client.responses.create(model="a", input="y", previous_response_id=unkept.id)


def test_many_at_once_are_bounded(served):
    models, server, url = served
    models.answering = False
    with ThreadPoolExecutor(9) as pool:
        asked = [pool.submit(httpx.post, f"{url}/chat/completions", json=CHAT, timeout=300) for _ in range(9)]
        soon(lambda: len(models.calls) == 8 and any(each.done() for each in asked))
        for future in models.futures:
            future.set_result(ChatReply("x"))
        assert sorted(each.result().status_code for each in asked) == [200] * 8 + [429]
    soon(lambda: server.in_flight == 0)


def test_a_name_that_no_model_could_write_is_refused(served):
    _, _, url = served
    for path, body in RICH.items():
        body = json.loads(json.dumps(body))
        tool = body["tools"][0].get("function", body["tools"][0])
        tool["name"] = "f" * 300
        reply = httpx.post(f"{url}/{path}", json={**body, "tool_choice": None}, headers=VERSION, timeout=60)
        assert reply.status_code == 400 and "256" in reply.json()["error"]["message"], path


@pytest.mark.parametrize("served", [True], indirect=True)
@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("half", [False, True])
def test_a_client_that_gives_up_as_its_answer_comes_and_asks_again_means_the_same_call(served, streams, half):
    """`half`: it leaves with a part of the answer unread, else before it is sent, which the server sees late."""
    models, server, _ = served
    models.answering = False
    body = json.dumps({**CHAT, "stream": streams}).encode()
    asked = head("/v1/chat/completions", f"Content-Length: {len(body)}") + body
    for turn in range(3):
        first = connected(server)
        first.sendall(asked)
        soon(lambda turn=turn: len(models.futures) == turn + 1)
        loop, goes_on = next(iter(server._server.server_state.connections)).loop, threading.Event()
        if half:
            models.futures[turn].set_result(ChatReply(f"late {turn}" * 50))
            assert first.recv(20)
            first.close()
        else:
            # The answer is put before the end of the connection among what the loop is going to see.
            loop.call_soon_threadsafe(goes_on.wait, 60)
            models.futures[turn].set_result(ChatReply(f"late {turn}"))
            first.close()
            goes_on.set()
        with connected(server) as second:
            second.sendall(asked)
            said = b""
            while (b"[DONE]" if streams else b'"usage"') not in said:
                said += second.recv(2**20)
            assert f"late {turn}".encode() in said and len(models.calls) == turn + 1


@pytest.mark.parametrize("served", [True], indirect=True)
@pytest.mark.parametrize("keeps", [False, True])
def test_a_client_that_has_read_its_answer_and_asks_the_same_again_makes_another_call(served, keeps):
    models, server, url = served
    with httpx.Client(base_url=url, timeout=300) as client:
        for number in range(3):
            more = {} if keeps else {"headers": {"connection": "close"}}
            assert client.post("chat/completions", json=CHAT, **more).status_code == 200
            assert len(models.calls) == number + 1
    soon(lambda: not server._answered)
    assert not server._calls.get("")
