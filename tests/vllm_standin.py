"""A server on loopback that speaks as much of vLLM's protocol as mafrt uses, with a `LocalEngine` behind it.

What it says is right, so that a test can compare; its knobs make it wrong, silent or dead.
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from mafrt.core.types import Completion, Request, SamplingParams
from mafrt.engines.local.engine import LocalEngine
from mafrt.models.shared_base import SharedBase


class StandIn:
    """Use as a context manager; `url` is its address.

    Knobs, all of which may be changed while it runs:
        die_after: completions after which it closes its door, in the middle of an answer.
        delay_s: pause before every completion.
        hiccups: requests that break off without an answer, though the server lives; those to `hiccup_path`.
        ill: completions that it answers with 503.
        answer: makes what is sent out of a completion and the request's body.
        deaf: loads adapters and samples without them.
        frozen: keeps the first weights that it was given for every adapter, by the name before the run's.
        room: the largest rank that it can hold.
        token: what it wants in the Authorization header.
        lora: whether adapters can be loaded while it runs.
    """

    def __init__(self, make_base: Callable[[], SharedBase], port: int = 0, **knobs: Any) -> None:
        self.base = make_base()
        self.die_after: int | None = None
        self.delay_s = 0.0
        self.hiccups = 0
        self.ill = 0
        self.hiccup_path = "/v1/completions"
        self.answer: Callable[[Completion, dict[str, Any]], dict[str, Any]] = _choice
        self.deaf = self.frozen = False
        self.room = 512
        self.token: str | None = None
        self.lora = True
        self.max_model_len = self.base.context_window
        for name, value in knobs.items():
            assert hasattr(self, name), name
            setattr(self, name, value)
        self.loaded: dict[str, str] = {}
        """name that was given -> adapter of the base"""
        self.unloaded: list[str] = []
        self.completed: list[dict[str, Any]] = []
        """bodies of the completions that were sent"""
        self.asked = self.stumbled = 0
        self._engine = LocalEngine(self.base)
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._server = _Server(("127.0.0.1", port), _handler(self))
        self.port = self._server.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> StandIn:
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def kill(self) -> None:
        """What kill -9 looks like from outside: every connection breaks, and no new one is taken."""
        self._server.dead = True
        self._server.shutdown()
        self._server.server_close()
        for connection in list(self._open):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def stumbles(self, path: str) -> bool:
        with self._lock:
            found = self.hiccups > 0 and path == self.hiccup_path
            self.hiccups -= found
            self.stumbled += found
            return found

    def load(self, name: str, path: str) -> tuple[int, dict[str, Any]]:
        if name in self.loaded:
            return 400, _error(f"The lora adapter '{name}' has already been loaded.")
        if not Path(path).is_dir():
            return 404, _error(f"No adapter found for '{name}' at {path}")
        if json.loads((Path(path) / "adapter_config.json").read_text())["r"] > self.room:
            return 500, _error(f"LoRA rank is greater than max_lora_rank {self.room}.")
        with self._lock:
            whose = name.rsplit("-", 2)[0]
            if self.frozen and whose in self.base.adapters:
                self.loaded[name] = whose
                return 200, {}
            own = whose if self.frozen else name
            if own not in self.base.adapters:
                self.base.load_adapter(own, path)
            self.loaded[name] = own
        return 200, {}

    def complete(self, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        if body["model"] != "served" and body["model"] not in self.loaded:
            return 404, _error(f"The model `{body['model']}` does not exist.")
        with self._lock:
            if self.ill > 0:
                self.ill -= 1
                return 503, _error("overloaded")
        time.sleep(self.delay_s)
        how = SamplingParams(body["max_tokens"], body["temperature"], body["top_p"], body["top_k"], tuple(body["stop"]))
        adapter = None if self.deaf else self.loaded.get(body["model"])
        with self._lock:
            self.asked += 1
            if self.die_after is not None and self.asked > self.die_after:
                return 0, {}
            (said,) = self._engine.generate([Request(body["prompt"], adapter, how, body["seed"])])
            self.completed.append(body)
        return 200, {"choices": [self.answer(said, body)]}


def _choice(said: Completion, body: dict[str, Any]) -> dict[str, Any]:
    reason = "length" if said.stop == "length" else "stop"
    return {"token_ids": said.ids, "logprobs": {"token_logprobs": said.logprobs}, "finish_reason": reason}


def _error(message: str) -> dict[str, Any]:
    return {"error": {"message": message}}


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256
    dead = False

    def handle_error(self, *_: object) -> None:
        """Broken connections are what these tests are about."""


def _handler(standin: StandIn) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def setup(self) -> None:
            super().setup()
            standin._open.add(self.connection)

        def log_message(self, *_: object) -> None:
            pass

        def do_GET(self) -> None:
            if self.path == "/health":
                return self._send(200, {})
            card = {"id": "served", "root": "", "parent": None, "max_model_len": standin.max_model_len}
            return self._send(200, {"data": [card]})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if standin.stumbles(self.path):
                self.close_connection = True
                return None
            if self.path == "/v1/completions":
                status, found = standin.complete(body)
            elif not standin.lora:
                status, found = 404, {"detail": "Not Found"}
            elif self.path == "/v1/load_lora_adapter":
                status, found = standin.load(body["lora_name"], body["lora_path"])
            else:
                standin.unloaded.append(body["lora_name"])
                status, found = (200, {}) if standin.loaded.pop(body["lora_name"], None) else (404, _error("unknown"))
            if not status:
                standin.kill()
                self.close_connection = True
                return None
            return self._send(status, found)

        def _send(self, status: int, found: dict[str, Any]) -> None:
            if self.server.dead:  # type: ignore[attr-defined]
                return
            if standin.token and self.headers.get("Authorization") != f"Bearer {standin.token}":
                status, found = 401, {"error": "Unauthorized"}
            data = json.dumps(found).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    return Handler
