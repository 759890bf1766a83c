"""Every server that this code opens refuses pages of other sites, on every route: both lists are made from the code."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from mafrt.environment.chat_api.server import ChatServer
from mafrt.envs.search.retrieval import Bm25, Passage
from mafrt.envs.search.server import app as search_app
from mafrt.scripts.tinker_server.server import TinkerServer

ROOT = Path(__file__).parents[2]
OPENS = {"create_server", "start_server", "start_unix_server", "HTTPServer", "ThreadingHTTPServer", "TCPServer",
         "ThreadingTCPServer", "listening", "bounded_server", "run_app"}  # fmt: skip
MAKERS = {*OPENS, "LocalServer", "grpc.server", "grpc.aio.server"}
"""a file without one of these words opens none"""
HOSTILE = [
    {"host": "evil.example"}, {"host": "127.0.0.1.evil.example"}, {"host": "localhost@evil.example"}, {"host": ""},
    {"host": "127.0.0.1:x"}, {"host": "127.0.0.1, evil.example"}, {"host": "0.0.0.0"}, {"host": "[::ffff:7f00:1]"},
    {"host": "2130706433"}, {"host": "127.0.0.1."}, {"origin": "http://evil.example"}, {"origin": "null"},
    {"origin": "file://"}, {"origin": "http://127.0.0.1@evil.example"}, {"origin": "http://localhost.evil.example"},
    {"origin": "chrome-extension://abc"}, {"origin": "http://127.0.0.1, http://evil.example"}, {"origin": ""},
    {"host": "[::1]evil.example"}, {"host": "127.0.0.1#evil.example"}, {"host": "127.0.0.1/evil.example"},
    {"host": "127.0.0.1?evil.example"}, {"host": "[::1"}, {"host": "127.1"}, {"host": "localhost%00.evil.example"},
    {"origin": "http://127.0.0.1#@evil.example"}, {"origin": "http://[::1]evil.example"}, {"origin": "//localhost"},
    {"origin": "tauri://localhost"}, {"origin": "moz-extension://localhost"}, {"origin": "http://127.0.0.1.nip.io"},
    {"origin": "blob:http://localhost/x"}, {"origin": "http://localhost:evil"}, {"origin": "http://localhost/"},
    {"sec-fetch-site": "Cross-Site"}, {"sec-fetch-site": "cross-site, none"},
    {"sec-fetch-site": "cross-site"}, {"origin": "http://127.0.0.1:1", "sec-fetch-site": "cross-site"},
]  # fmt: skip
TYPES = ["text/plain", "text/plain; charset=application/json", "multipart/form-data; boundary=x", "text/json",
         "application/x-www-form-urlencoded", "application/json, text/plain", "image/json"]  # fmt: skip


class NoAnswers:
    learns = False

    def __getattr__(self, name):
        raise AssertionError("a page of another site reached the models")


def openers():
    """Modules in which a socket is opened for others, or a server is made."""
    found = set()
    for folder in ("mafrt", "envs", "runners", "scripts"):
        for path in (ROOT / folder).rglob("*.py"):
            text = path.read_text(encoding="utf-8")
            for node in ast.walk(ast.parse(text)) if any(name in text for name in MAKERS) else ():
                name = getattr(node.func, "attr", getattr(node.func, "id", "")) if isinstance(node, ast.Call) else ""
                bases = node.bases if isinstance(node, ast.ClassDef) else []
                inherits = any(getattr(base, "id", "") in MAKERS for base in bases)
                if name in OPENS or inherits or (name == "server" and ast.unparse(node.func) in MAKERS):
                    found.add(path.relative_to(ROOT).as_posix())
    return found


@pytest.fixture(scope="module")
def apps():
    """Applications by the module that serves them."""
    chat, tinker = ChatServer(NoAnswers()), TinkerServer()
    tinker.service = NoAnswers()
    index = Bm25([Passage("0", "Paris", "The Seine crosses it.")])
    yield {
        "mafrt/environment/chat_api/server.py": chat._app(),
        "scripts/tinker_server/server.py": tinker._app(),
        "scripts/serve_retriever.py": search_app(index),
    }
    tinker.service = None
    chat.close()
    tinker.close()


ELSEWHERE = {
    "mafrt/environment/local_server.py",  # what they are made of
    "mafrt/environment/remote/server.py",  # gRPC, which no page of a browser speaks
    "scripts/reporting/live.py",  # below
}


@pytest.mark.slow
@pytest.mark.ci
def test_every_server_is_looked_at(apps):
    assert openers() == {*apps, *ELSEWHERE}


def requests_to(app):
    for route in app.routes:
        path = route.path
        for name in route.param_convertors:
            path = path.replace(f"{{{name}}}", "x")
        for method in sorted(route.methods - {"HEAD"}):
            yield method, path


@pytest.mark.slow
@pytest.mark.parametrize("module", ["mafrt/environment/chat_api/server.py", "scripts/tinker_server/server.py",
                                    "scripts/serve_retriever.py"])  # fmt: skip
def test_no_route_answers_a_page_of_another_site(apps, module):
    from starlette.testclient import TestClient

    client = TestClient(apps[module], base_url="http://127.0.0.1", raise_server_exceptions=False)
    asked = 0
    for method, path in requests_to(apps[module]):
        for headers in HOSTILE:
            given = {"content-type": "application/json"} | headers
            reply = client.request(method, path, content=b"{}" if method == "POST" else None, headers=given)
            assert reply.status_code == 403, (method, path, headers, reply.status_code)
            assert "access-control-allow-origin" not in reply.headers
            asked += 1
        for kind in TYPES if method == "POST" else ():
            reply = client.request(method, path, content=b"{}", headers={"content-type": kind})
            assert reply.status_code == 415, (method, path, kind, reply.status_code)
        assert client.options(path, headers={"origin": "http://evil.example"}).status_code in (403, 405)
    assert asked >= 2 * len(HOSTILE)


def test_the_live_report_answers_no_page_of_another_site(tmp_path):
    import http.client
    import threading

    from mafrt.scripts.reporting.live import make_server

    (tmp_path / "metrics.jsonl").write_text("")
    with make_server([tmp_path], 0, 1.0) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        for path in ("/", "/version", "/x"):
            for headers in HOSTILE:
                connection = http.client.HTTPConnection("127.0.0.1", server.server_port)
                connection.putrequest("GET", path, skip_host=True)
                for name, value in ({"host": "127.0.0.1"} | headers).items():
                    connection.putheader(name, value)
                connection.endheaders()
                assert connection.getresponse().status == 403, (path, headers)
                connection.close()
        server.shutdown()
