"""A server on loopback that speaks SandboxFusion's protocol and runs the code in a tier of ours: for tests and demos.

It shares the server's manners too: plain names in `fetch_files`, links followed, and a program that writes much is
reported as one that took too long.
"""

from __future__ import annotations

import base64
import http.server
import json
import threading
import time
from typing import Any

from mafrt.core.errors import MafrtError
from mafrt.sandbox.types import Execution, Sandbox

MUCH_OUTPUT_BYTES = 60_000
"""Our tiers keep 64 KiB of a stream; what comes near it is much."""


class StandIn:
    """Serves until `close`. `failures` are taken one per request before it works again: an HTTP status, `SandboxError`,
    `hang`, `garbage` or `half`."""

    def __init__(self, sandbox: Sandbox, port: int = 0) -> None:
        self.sandbox = sandbox
        self.failures: list[int | str] = []
        self.requests: list[dict[str, Any]] = []
        self.hang_s = 2.0
        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", port), _handler(self))
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def __enter__(self) -> StandIn:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """The body of a reply to `/run_code`."""
        if request.get("language") != "python":
            return {"status": "SandboxError", "message": f"no {request.get('language')} here", "files": {}}
        done = self.sandbox.execute(
            request["code"],
            {name: base64.b64decode(text) for name, text in request.get("files", {}).items()},
            request.get("fetch_files", []),
            float(request.get("run_timeout", 10)),
            max(1, int(request.get("memory_limit_MB", 1024))),
        )
        late = done.status == "timeout" or max(len(done.stdout), len(done.stderr)) > MUCH_OUTPUT_BYTES
        return {
            "status": "Success" if done.exit_code == 0 and not late else "Failed",
            "message": "",
            "compile_result": None,
            "run_result": _run_result(done, late),
            "files": {name: base64.b64encode(content).decode() for name, content in done.files.items()},
        }


def _run_result(done: Execution, late: bool) -> dict[str, Any]:
    return {
        "status": "TimeLimitExceeded" if late else "Finished",
        "execution_time": done.seconds,
        "return_code": None if late else done.exit_code,
        "stdout": done.stdout,
        "stderr": done.stderr,
    }


def _handler(standin: StandIn) -> type[http.server.BaseHTTPRequestHandler]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            standin.requests.append(request)
            failure = standin.failures.pop(0) if standin.failures else None
            if self.path != "/run_code":
                return self.send_error(404)
            if isinstance(failure, int):
                return self.send_error(failure)
            if failure == "hang":
                time.sleep(standin.hang_s)
                return None
            if failure == "garbage":
                return self._reply(b"<html>an error page</html>")
            if failure == "SandboxError":
                return self._reply(json.dumps({"status": "SandboxError", "message": "no room", "files": {}}).encode())
            try:
                body = json.dumps(standin.answer(request)).encode()
            except MafrtError as error:
                body = json.dumps({"status": "SandboxError", "message": str(error), "files": {}}).encode()
            return self._reply(body[: len(body) // 2], len(body)) if failure == "half" else self._reply(body)

        def _reply(self, body: bytes, promised: int | None = None) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body) if promised is None else promised))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: Any) -> None:
            """Not on the terminal."""

    return Handler
