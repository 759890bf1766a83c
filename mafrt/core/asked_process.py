"""A process that answers questions, a JSON line each: work that may take for ever, or that reads what nobody trusts.

It is started when it is first needed, and again when it died or did not reply in time. A fork starts one of its own.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any

from mafrt.core.errors import EnvError, MissingExtraError

START_S = 120.0


class EndedError(OSError):
    """The process is gone, or talks nonsense; `returncode` of one that ended by itself."""

    returncode: int | None = None


class AskedProcess:
    """`python -m module`, which says one line when it is ready. Safe to share among threads.

    Each question gets an `id`, which is that of its reply. A first line with `missing` says which package is.
    """

    def __init__(self, module: str, name: str) -> None:
        """`name`: noun for errors, such as `the answer verifier`."""
        self.module, self.name = module, name
        self.process: subprocess.Popen[bytes] | None = None
        self.restarts = 0
        """how often a process was replaced, since it died or was late"""
        self._lock = threading.RLock()
        self._owner, self._asked, self._unread = 0, 0, b""

    def ask(self, question: Mapping[str, Any], within_s: float) -> dict[str, Any]:
        """The reply, by the clock within so many seconds; without one the process is ended.

        Raises:
            TimeoutError: it is late.
            EndedError: it died.
            EnvError: it cannot be started.
        """
        with self._lock:
            self.ensure()
            self._asked += 1
            try:
                self._send(json.dumps({**question, "id": self._asked}).encode() + b"\n")
                reply = self.read(within_s)
                while reply.get("id") != self._asked:  # the reply to a question that Ctrl-C broke off
                    reply = self.read(within_s)
            except TimeoutError:
                self._replace()
                raise
            except OSError as error:
                ended = EndedError(str(error))
                if self.process is not None:
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        ended.returncode = self.process.wait(timeout=1)
                self._replace()
                raise ended from error
            return reply

    def close(self) -> None:
        """End the process; the next question starts another."""
        with self._lock:
            process, self.process, self._unread = self.process, None, b""
            if process is None or self._owner != os.getpid():
                return
            with contextlib.suppress(OSError):
                process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    with contextlib.suppress(OSError):
                        pipe.close()

    def ensure(self) -> None:
        """Start the process unless it runs."""
        if self.process is not None and self._owner != os.getpid():
            self.process, self._unread = None, b""  # a fork: the process belongs to the parent
        if self.process is not None and self.process.poll() is None:
            return
        if self.process is not None:
            self._replace()
        # A clean environment: no keys to read, and the very packages that this process has.
        paths = os.pathsep.join(os.path.abspath(path) for path in sys.path)
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-m", self.module],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                cwd="/",
                env={"PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"},
                start_new_session=True,  # Ctrl-C is for the trainer
            )
        except OSError as error:
            raise EnvError(f"the process of {self.name} cannot be started: {error}") from error
        self._owner, self._unread = os.getpid(), b""
        try:
            hello = self.read(START_S)
        except OSError as error:
            self.close()
            raise EnvError(
                f"the process of {self.name} did not come up ({error}); try {sys.executable} -m {self.module}"
            ) from error
        if "missing" in hello:
            self.close()
            raise MissingExtraError(str(hello["missing"]))

    def read(self, within_s: float) -> dict[str, Any]:
        """One line; TimeoutError past the deadline, OSError if the process is gone or talks nonsense."""
        assert self.process is not None and self.process.stdout is not None
        pipe, until = self.process.stdout.fileno(), time.monotonic() + within_s
        while b"\n" not in self._unread:
            left = until - time.monotonic()
            if left <= 0 or not select.select([pipe], [], [], left)[0]:
                raise TimeoutError(f"no reply within {within_s:g} s")
            if not (chunk := os.read(pipe, 65536)):
                raise OSError("it ended")
            self._unread += chunk
        line, _, self._unread = self._unread.partition(b"\n")
        try:
            reply: dict[str, Any] = json.loads(line)
        except ValueError as error:
            raise OSError(f"it sent {line[:80]!r}") from error
        return reply

    def _send(self, line: bytes) -> None:
        assert self.process is not None and self.process.stdin is not None
        self.process.stdin.write(line)
        self.process.stdin.flush()

    def _replace(self) -> None:
        self.restarts += 1
        self.close()
