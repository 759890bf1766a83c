"""A judge on loopback that speaks the three providers' protocols, and a clock that tests turn."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from mafrt.coach.retry import Clock

KEY = "sk-secret-of-the-test"
SPECS = ("openai", "anthropic", "google")
ENVIRONMENT = {"openai": "OPENAI_API_KEY", "anthropic": "ANTHROPIC_API_KEY", "google": "GEMINI_API_KEY"}


@dataclass
class Say:
    """How a request is answered."""

    text: str = ""
    """what the judge says"""
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    error: Any = None
    """body of a reply that is no success"""
    cut: bool = False
    """the token limit ended it"""
    hang_s: float = 0.0
    raw: bytes | None = None
    """sent as it is, as JSON"""
    half: bool = False
    """the connection ends in the middle of the body"""
    usage: bool = True


def verdict(score: Any = 7, reason: str = "Sound.", **more: Any) -> Say:
    return Say(json.dumps({"reason": reason, "score": score, **more}))


@dataclass
class Seen:
    """A request that came in."""

    path: str
    headers: dict[str, str]
    body: dict[str, Any]

    @property
    def whole(self) -> str:
        return json.dumps(self.body)

    @property
    def structured(self) -> bool:
        config = self.body.get("generationConfig", {})
        return bool(
            self.body.get("response_format")
            or self.body.get("output_config")
            or config.get("responseJsonSchema")
            or config.get("response_json_schema")
        )


class Judge:
    """`answer(request, number)` says how each is answered; `seen` holds them all, `most` how many were open at once."""

    def __init__(self, answer: Callable[[Seen, int], Say]) -> None:
        self.answer = answer
        self.seen: list[Seen] = []
        self.open = self.most = 0
        self._lock = threading.Lock()
        judge = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: Any) -> None:
                pass

            def do_POST(self) -> None:
                judge._serve(self)

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)

    def __enter__(self) -> Judge:
        self.thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self.server.shutdown()
        self.server.server_close()

    def url(self, provider: str = "openai") -> str:
        address = f"http://127.0.0.1:{self.server.server_address[1]}"
        return f"{address}/v1" if provider == "openai" else address

    def _serve(self, handler: Any) -> None:
        body = json.loads(handler.rfile.read(int(handler.headers["content-length"])))
        seen = Seen(handler.path, {k.lower(): v for k, v in handler.headers.items()}, body)
        with self._lock:
            self.seen.append(seen)
            number = len(self.seen) - 1
            self.open += 1
            self.most = max(self.most, self.open)
        say = self.answer(seen, number)
        if say.hang_s:
            time.sleep(say.hang_s)
        with self._lock:
            self.open -= 1  # before the reply, or the next request could come in first
        data = say.raw if say.raw is not None else json.dumps(self._body(seen, say)).encode()
        try:
            handler.send_response(say.status)
            handler.send_header("content-type", "application/json")
            handler.send_header("content-length", str(len(data)))
            for name, value in say.headers.items():
                handler.send_header(name, value)
            handler.end_headers()
            handler.wfile.write(data[: len(data) // 2] if say.half else data)
        except OSError:
            pass  # the client gave up
        handler.close_connection = say.half or handler.close_connection

    @staticmethod
    def _body(seen: Seen, say: Say) -> Any:
        if say.status != 200:
            return say.error if say.error is not None else {"error": {"message": "no", "code": say.status}}
        if "generateContent" in seen.path:
            part = {
                "content": {"role": "model", "parts": [{"text": say.text}]},
                "finishReason": "MAX_TOKENS" if say.cut else "STOP",
            }
            usage = {"promptTokenCount": 100, "candidatesTokenCount": 15, "thoughtsTokenCount": 5}
            return {"candidates": [part], **({"usageMetadata": usage} if say.usage else {})}
        if seen.path.endswith("/messages"):
            return {
                "id": "m",
                "type": "message",
                "role": "assistant",
                "model": "m",
                "content": [{"type": "text", "text": say.text}],
                "stop_reason": "max_tokens" if say.cut else "end_turn",
                "usage": {"input_tokens": 60, "cache_read_input_tokens": 40, "output_tokens": 20},
            }
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": say.text},
            "finish_reason": "length" if say.cut else "stop",
        }
        found = {"id": "c", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice]}
        usage = {"prompt_tokens": 100, "completion_tokens": 20, "total_tokens": 120}
        return {**found, **({"usage": usage} if say.usage else {})}


class FakeClock(Clock):
    """Sleeping takes no time and is noted down."""

    def __init__(self) -> None:
        self.time = 0.0
        self.slept: list[float] = []

    def now(self) -> float:
        return self.time

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.time += seconds
        await asyncio.sleep(0)  # others get their turn, as while one really sleeps
        await asyncio.sleep(0)  # others get their turn, as while one really sleeps
        await asyncio.sleep(0)  # others get their turn, as while one really sleeps
