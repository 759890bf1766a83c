"""Serves a report on loopback and builds it again when the runs have changed."""

from __future__ import annotations

import contextlib
import hashlib
import socket
import threading
import webbrowser
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from mafrt.core.errors import ConfigError
from mafrt.environment.local_server import HEAD_S, RefusedError, check_caller
from mafrt.scripts.reporting.page import build_page
from mafrt.scripts.reporting.run_data import read_run

HOST = "127.0.0.1"
MOST_CONNECTIONS = 64
"""at the same time; a page has one or two"""
_WATCHED = ("metrics.jsonl", "evaluations.jsonl", "summary.json", "transcripts")


class BoundedServer(ThreadingHTTPServer):
    """A thread for each of `MOST_CONNECTIONS`; one more ends the oldest, of those without a whole request first."""

    def __init__(self, *args: Any) -> None:
        self._lock = threading.Lock()
        self._waiting: list[socket.socket] = []
        self._answered: list[socket.socket] = []
        super().__init__(*args)

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            self._waiting.append(request)
            if len(self._waiting) + len(self._answered) > MOST_CONNECTIONS:
                oldest = (self._waiting[:-1] or self._answered)[0]
                with contextlib.suppress(OSError):  # it has ended by itself
                    oldest.shutdown(socket.SHUT_RDWR)  # its thread wakes and closes it
        super().process_request(request, client_address)

    def answers(self, request: socket.socket) -> None:
        """A whole request has come."""
        with self._lock:
            self._waiting.remove(request)
            self._answered.append(request)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            for held in (self._waiting, self._answered):
                if request in held:
                    held.remove(request)
        super().shutdown_request(request)


class LiveReport:
    """The page of some runs, built when it is asked for and the runs have changed since."""

    def __init__(self, folders: Sequence[Path], max_mib: float) -> None:
        self.folders, self.max_mib = folders, max_mib
        self._lock = threading.Lock()
        self._built: tuple[str, bytes] = ("", b"")

    def version(self) -> str:
        """Changes whenever a run has written something that the report shows."""
        states = []
        for folder in self.folders:
            for name in _WATCHED:
                with contextlib.suppress(OSError):
                    state = (folder / name).stat()
                    states.append((str(folder), name, state.st_mtime_ns, state.st_size))
        return hashlib.blake2b(repr(states).encode(), digest_size=8).hexdigest()

    def page(self) -> bytes:
        with self._lock:
            version = self.version()
            if self._built[0] != version:
                runs = [read_run(folder) for folder in self.folders]
                self._built = version, build_page(runs, max_mib=self.max_mib, live=True).html
            return self._built[1]


def make_server(folders: Sequence[Path], port: int, max_mib: float) -> ThreadingHTTPServer:
    """A server on loopback. Raises ConfigError if the port is taken."""
    live = LiveReport(folders, max_mib)

    class Handler(BaseHTTPRequestHandler):
        timeout = HEAD_S  # of a connection that sends nothing

        def handle(self) -> None:
            with contextlib.suppress(ConnectionError):  # a page that was closed is no error of the server
                super().handle()

        def do_GET(self) -> None:
            server.answers(self.connection)
            try:
                check_caller([(name.lower(), value) for name, value in self.headers.items()], HOST)
            except RefusedError as refused:
                self._answer(refused.status, "text/plain", f"{refused}\n".encode())
                return
            if self.path == "/":
                self._answer(200, "text/html; charset=utf-8", live.page())
            elif self.path == "/version":
                self._answer(200, "text/plain", live.version().encode())
            else:
                self._answer(404, "text/plain", b"There is one page only: /")

        def _answer(self, status: int, kind: str, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Cache-Control", "no-store")
            self.send_header("X-Content-Type-Options", "nosniff")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Requests are not logged."""

    try:
        server = BoundedServer((HOST, port), Handler)
    except OSError as error:
        raise ConfigError(
            f"port {port} of {HOST} cannot be used ({error.strerror}); give another --port, or 0."
        ) from None
    return server


def serve(folders: Sequence[Path], port: int, max_mib: float, *, open_browser: bool) -> int:
    """Serve until Ctrl-C."""
    with make_server(folders, port, max_mib) as server:
        address = f"http://{HOST}:{server.server_port}/"
        with contextlib.suppress(KeyboardInterrupt):
            print(f"The report of {', '.join(map(str, folders))} is at {address}; Ctrl-C ends it.", flush=True)
            if open_browser:
                webbrowser.open(address)
            server.serve_forever()
    return 0
