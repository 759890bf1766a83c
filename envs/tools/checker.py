"""The trainer's side of the process that checks arguments against schemas and computes expressions.

One process serves all threads. It is started when first needed, and again when it died or did not reply in time.
"""

from __future__ import annotations

import atexit
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

from mafrt.core.errors import EnvError
from mafrt.core.text import brief, clean_text
from mafrt.envs.tools.failed import Failed

START_S = 120.0
REPLY_S = 30.0
"""By the clock; the process itself bounds the processor time, so that a busy machine fails no call."""
MOST_ASKED_KIB = 24 * 1024
"""of a schema with its arguments"""
DEEPEST = 200
"""levels of nesting of a schema or of arguments"""


class Checker:
    """Asks one process. Safe to share among threads; a fork starts a process of its own."""

    def __init__(self, reply_s: float = REPLY_S) -> None:
        self.reply_s = reply_s
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._owner, self._asked, self._unread = 0, 0, b""

    def compute(self, expression: str) -> int | float:
        """The value of an arithmetic expression. Raises Failed."""
        said = self._ask({"do": "compute", "expression": expression})
        if said.get("fault") is not None:
            raise Failed(str(said["fault"]))
        value: int | float = said["value"]
        return value

    def schema_fault(self, schema: Mapping[str, Any]) -> str | None:
        """Why a JSON schema cannot be used, as a clause; None if it can."""
        try:
            fault = self._ask({"do": "schema", "schema": schema}).get("fault")
        except Failed as failure:
            return str(failure).rstrip(".")
        return None if fault is None else clean_text(str(fault))

    def wrong(self, schema: Mapping[str, Any], arguments: Mapping[str, Any]) -> str | None:
        """The first fault of arguments, as a clause; None if they fit. Raises Failed if that cannot be found out."""
        said = self._ask({"do": "check", "schema": schema, "arguments": arguments})
        if not said.get("wrong"):
            return None
        where = clean_text(str(said.get("where") or ""))
        fault = said.get("fault")
        text = f"found {brief(said.get('found'))}" if fault is None else clean_text(str(fault))
        return f"{f' at {where}' if where else ''}: {text}"

    def close(self) -> None:
        """End the process; the next question starts another."""
        process, self._process, self._unread = self._process, None, b""
        if process is None or self._owner != os.getpid():
            return
        with contextlib.suppress(OSError):
            process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()

    def _ask(self, question: Mapping[str, Any]) -> dict[str, Any]:
        try:
            text = json.dumps(question)
        except (ValueError, RecursionError) as error:
            raise Failed(f"the arguments cannot be read ({type(error).__name__}).") from error
        if len(text) > MOST_ASKED_KIB * 1024:
            raise Failed(f"schema and arguments have more than {MOST_ASKED_KIB} KiB.")
        if _deeper(question, DEEPEST):
            raise Failed(f"schema or arguments are nested deeper than {DEEPEST} levels.")
        late = Failed("the call took too long to check, so it was not made.")
        with self._lock:
            for last in (False, True):
                self._ensure()
                self._asked += 1
                try:
                    self._send(json.dumps({**question, "id": self._asked}).encode() + b"\n")
                    said = self._read(self.reply_s)
                    while said.get("id") != self._asked:  # the reply to a question that Ctrl-C broke off
                        said = self._read(self.reply_s)
                except TimeoutError:
                    self.close()
                    raise late from None
                except OSError:
                    # It may have been ended from outside, so that the question is put once more.
                    self.close()
                    if last:
                        raise late from None
                    continue
                if said.get("late"):
                    raise late
                return said
        raise AssertionError("unreachable")

    def _ensure(self) -> None:
        if self._process is not None and self._owner != os.getpid():
            self._process, self._unread = None, b""
        if self._process is not None and self._process.poll() is None:
            return
        self.close()
        # A clean environment: no keys to read, and the very packages that this process has.
        paths = os.pathsep.join(os.path.abspath(path) for path in sys.path)
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "mafrt.envs.tools._checker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                cwd="/",
                env={"PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"},
                start_new_session=True,  # Ctrl-C is for the trainer
            )
            self._owner = os.getpid()
            self._read(START_S)
        except OSError as error:
            self.close()
            raise EnvError(f"the process that checks the calls of tools cannot be started: {error}") from error

    def _send(self, data: bytes) -> None:
        assert self._process is not None and self._process.stdin is not None
        self._process.stdin.write(data)
        self._process.stdin.flush()

    def _read(self, within_s: float) -> dict[str, Any]:
        """One reply; TimeoutError past the deadline, OSError if the process is gone."""
        assert self._process is not None and self._process.stdout is not None
        pipe, until = self._process.stdout.fileno(), time.monotonic() + within_s
        while b"\n" not in self._unread:
            left = until - time.monotonic()
            if left <= 0 or not select.select([pipe], [], [], left)[0]:
                raise TimeoutError(f"no reply within {within_s:g} s")
            if not (part := os.read(pipe, 65536)):
                raise OSError("it ended")
            self._unread += part
        line, _, self._unread = self._unread.partition(b"\n")
        said: dict[str, Any] = json.loads(line)
        return said


def _deeper(value: Any, levels: int) -> bool:
    """Whether a value is nested deeper than so many levels."""
    layer = [value]
    for _ in range(levels):
        layer = [
            inner
            for part in layer
            if isinstance(part, (dict, list, tuple))
            for inner in (part.values() if isinstance(part, dict) else part)
        ]
        if not layer:
            return False
    return True


CHECKER = Checker()
atexit.register(CHECKER.close)
