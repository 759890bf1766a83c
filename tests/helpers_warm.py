"""Processes of their own that begin with the heavy imports done: forked from one that holds them.

A test that needs a process (an exit code, a kill, a file run as `__main__`) seldom needs the import of torch and
transformers again, which costs more processor time than most tests. Tests about imports start an interpreter instead.

One such server serves all processes of a test run side by side (ADDRESS); a run in one process starts its own. The
processes that run tests are forks as well: of a second server, which has also imported every file of tests.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

ADDRESS = "MAFRT_TESTS_WARM"
"""Environment variable with the path of the socket of the server that all processes of a test run share."""


RUNNING: set[WarmProcess] = set()
"""Started here, and not seen to have ended."""


RUN = subprocess.run
"""The function itself, where a test has put another in its place."""


class Server:
    """A connection to a process that holds the imports."""

    def __init__(self, address: Path, process: subprocess.Popen | None = None) -> None:
        """`process`: the server itself if it was started here. It ends at the end of its input, so with the tests."""
        self.address, self.process = address, process
        self._line = connected(address, process)

    def send(self, job: dict[str, Any], streams: Sequence[int] = ()) -> None:
        """`streams`: descriptors for its input and outputs, if they are not to be files of the job's folder."""
        text = json.dumps(job).encode() + b"\n"
        sent = socket.send_fds(self._line, [text], streams) if streams else 0
        self._line.sendall(text[sent:])

    def ended(self) -> bool:
        try:
            return not self._line.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            return True


def connected(address: Path, process: subprocess.Popen | None = None) -> socket.socket:
    """A connection to a server that may still be importing. Raises RuntimeError if it ended, or after five minutes."""
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline and (process is None or process.poll() is None):
        line = socket.socket(socket.AF_UNIX)
        try:
            line.connect(str(address))
        except OSError:
            line.close()
            time.sleep(0.02)
        else:
            return line
    raise RuntimeError(f"the process that holds the imports does not answer at {address}")


class WarmProcess:
    """A program that was started; its output goes to files, so that it cannot block on a full pipe."""

    def __init__(self, server: Server, folder: Path) -> None:
        self._server, self._folder = server, folder
        self.pid = int(self._appeared("pid", 120))
        self.returncode: int | None = None
        RUNNING.add(self)

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code, negative for a signal. Raises TimeoutExpired."""
        if self.returncode is None:
            if not self._ended_within(timeout):
                raise subprocess.TimeoutExpired(str(self._folder), timeout or 0)
            self.returncode = int(self._appeared("code", 60))
            RUNNING.discard(self)
        return self.returncode

    def poll(self) -> int | None:
        return self.wait(0) if (self._folder / "code").exists() else None

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    @property
    def stdout(self) -> str:
        """Printed so far."""
        return self._printed("out")

    @property
    def stderr(self) -> str:
        return self._printed("err")

    def _printed(self, name: str) -> str:
        """Nothing before the process has opened the file, which is a moment after its id is known."""
        path = self._folder / name
        return path.read_text() if path.exists() else ""

    def _ended_within(self, timeout: float | None) -> bool:
        try:
            handle = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return True
        try:
            return bool(select.select([handle], [], [], timeout)[0])
        finally:
            os.close(handle)

    def _appeared(self, name: str, timeout: float) -> str:
        """The text of a file that the server moves into place."""
        path, deadline = self._folder / name, time.monotonic() + timeout
        while not path.exists():
            if self._server.ended():
                raise RuntimeError("the process that holds the imports ended")
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(str(path), timeout)
            time.sleep(0.005)
        return path.read_text()


def start_python(
    *argv: str | Path,
    cwd: str | Path = ".",
    env: Mapping[str, str] | None = None,
    typed: str = "",
    python: str | Path = sys.executable,
) -> WarmProcess:
    """`python argv...`, for a script, a module or code and its arguments; `typed` is its standard input."""
    folder = Path(tempfile.mkdtemp(dir=_files().name))
    job = {
        "folder": str(folder),
        "argv": [str(word) for word in argv],
        "cwd": str(Path(cwd).resolve()),
        "env": dict(os.environ if env is None else env),
        "typed": typed,
    }
    if _server(python).ended():
        _server.cache_clear()  # one that ended fails the test that met it, and not all after it
    server = _server(python)
    server.send(job)
    return WarmProcess(server, folder)


def run_python(*argv: str | Path, timeout: float = 300, **words: Any) -> WarmProcess:
    """`start_python` and its end; a program that does not end in time is killed, and TimeoutExpired raised."""
    process = start_python(*argv, **words)
    try:
        process.wait(timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(10)
        raise
    return process


def run_command(
    command: Sequence[str | Path], *, check: bool = False, timeout: float = 300, **words: Any
) -> subprocess.CompletedProcess[str]:
    """For a test to put in the place of `subprocess.run`: what begins with this interpreter runs in a fork.

    Its outputs are always captured, as text.
    """
    if command[0] != sys.executable:
        return RUN(command, check=check, timeout=timeout, **words)
    words = {name: value for name, value in words.items() if name not in ("capture_output", "text")}
    done = run_python(*command[1:], timeout=timeout, **words)
    found = subprocess.CompletedProcess(list(command), done.wait(), done.stdout, done.stderr)
    if check:
        found.check_returncode()
    return found


@cache
def _files() -> tempfile.TemporaryDirectory:
    return tempfile.TemporaryDirectory()


@cache
def _server(python: str | Path) -> Server:
    shared = os.environ.get(ADDRESS)
    if shared and python == sys.executable:
        return Server(Path(shared))
    address = Path(_files().name, f"server_{len(os.listdir(_files().name))}")
    return Server(address, start_server(python, address))


def start_server(python: str | Path, address: Path, *collected: str) -> subprocess.Popen:
    """Start a server of `python`; with names of files and folders of tests also one for `WORKER`, at their side."""
    # Its input is never written to, and ends with this process.
    return subprocess.Popen([python, SERVER, address, *collected], stdin=subprocess.PIPE)


SERVER = Path(__file__).with_name("warm_server.py")
WORKER = Path(__file__).with_name("warm_worker.py")
"""A script that stands for an interpreter, and runs what it is given in a fork of a server."""


def write_python(path: Path) -> dict[str, str]:
    """Write a program that stands for `python -u`, for others to start; the variables that it needs."""
    path.write_text(f'#!/bin/sh\nexec {sys.executable} {WORKER} "" "$@"\n')
    path.chmod(0o755)
    return {ADDRESS: str(_server(sys.executable).address)}


def end_server(python: str | Path) -> None:
    """End the process that holds the imports for an interpreter, since its environment is about to go."""
    process = _server(python).process
    assert process is not None and process.stdin is not None
    process.stdin.close()
    process.wait(60)
