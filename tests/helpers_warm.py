"""Processes of their own that begin with the heavy imports done: forked from one that holds them.

A test that needs a process (an exit code, a kill, a file run as `__main__`) seldom needs the import of torch and
transformers again, which costs more processor time than most tests. Tests about imports start an interpreter instead.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import runpy
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

IMPORTED = (
    "mafrt.scripts.cli.train",
    "mafrt.runners.on_policy",
    "mafrt.runners.evaluation",
    "mafrt.training.learner",
    "mafrt.engines.local.engine",
    "transformers.models.qwen3.modeling_qwen3",
    "transformers.models.qwen2.modeling_qwen2",
    "transformers.integrations.sdpa_attention",
    "math_verify",
)
"""Modules that nearly every run needs; none of them starts a thread, so a fork of them is whole."""


class WarmProcess:
    """A program that was started; its output goes to files, so that it cannot block on a full pipe."""

    def __init__(self, server: subprocess.Popen, folder: Path) -> None:
        self._server, self._folder = server, folder
        self.pid = int(self._appeared("pid", 120))
        self.returncode: int | None = None

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code, negative for a signal. Raises TimeoutExpired."""
        if self.returncode is None:
            self.returncode = int(self._appeared("code", timeout))
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
        return (self._folder / "out").read_text()

    @property
    def stderr(self) -> str:
        return (self._folder / "err").read_text()

    def _appeared(self, name: str, timeout: float | None) -> str:
        """The text of a file that the server moves into place."""
        path, deadline = self._folder / name, time.monotonic() + (float("inf") if timeout is None else timeout)
        while not path.exists():
            if self._server.poll() is not None:
                raise RuntimeError(f"the process that holds the imports ended with code {self._server.returncode}")
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(str(path), timeout or 0)
            time.sleep(0.005)
        return path.read_text()


def start_python(
    *argv: str | Path,
    cwd: str | Path = ".",
    env: Mapping[str, str] | None = None,
    typed: str = "",
    python: str | Path = sys.executable,
) -> WarmProcess:
    """`python argv...`, for a script and its arguments; `typed` is its standard input."""
    folder = Path(tempfile.mkdtemp(dir=_files().name))
    job = {
        "folder": str(folder),
        "argv": [str(word) for word in argv],
        "cwd": str(Path(cwd).resolve()),
        "env": dict(os.environ if env is None else env),
        "typed": typed,
    }
    if _server(python).poll() is not None:
        _server.cache_clear()  # one that ended fails the test that met it, and not all after it
    server = _server(python)
    assert server.stdin is not None
    server.stdin.write(json.dumps(job).encode() + b"\n")
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


@cache
def _files() -> tempfile.TemporaryDirectory:
    return tempfile.TemporaryDirectory()


@cache
def _server(python: str | Path) -> subprocess.Popen:
    # It ends with the tests: at the end of its input. Unbuffered, so that a job is sent when it is written.
    return subprocess.Popen([python, __file__], stdin=subprocess.PIPE, bufsize=0)


def end_server(python: str | Path) -> None:
    """End the process that holds the imports for an interpreter, since its environment is about to go."""
    server = _server(python)
    assert server.stdin is not None
    server.stdin.close()
    server.wait(60)


def _serve() -> None:
    importlib.import_module("mafrt.models.generation_import").import_generation()
    for name in IMPORTED:
        importlib.import_module(name)
    running: dict[int, Path] = {}
    text = b""
    gc.collect()
    gc.freeze()  # collections in a fork look at its own objects only
    while True:
        if select.select([0], [], [], 0.01 if running else None)[0]:
            read = os.read(0, 1 << 16)
            if not read:
                os._exit(0)
            *jobs, text = (text + read).split(b"\n")
            for job in map(json.loads, jobs):
                pid = os.fork()
                if pid == 0:
                    _become(job)
                running[pid] = Path(job["folder"])
                _put(running[pid] / "pid", pid)
        for pid in list(running):
            if (ended := os.waitpid(pid, os.WNOHANG))[0]:
                _put(running.pop(pid) / "code", os.waitstatus_to_exitcode(ended[1]))


def _put(path: Path, number: int) -> None:
    path.with_suffix(".tmp").write_text(str(number))
    path.with_suffix(".tmp").rename(path)


def _become(job: dict[str, Any]) -> NoReturn:
    (typed := Path(job["folder"], "in")).write_text(job["typed"])
    os.dup2(os.open(typed, os.O_RDONLY), 0)
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(f"{job['folder']}/{name}", os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # the tests may run where Ctrl-C is ignored
    os.chdir(job["cwd"])
    os.environ.clear()
    os.environ.update(job["env"])
    sys.argv = job["argv"]
    sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
    code = 0
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as left:
        code = left.code if isinstance(left.code, int) else int(left.code is not None)
        if left.code is not None and not isinstance(left.code, int):
            print(left.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        code = 1
    _leave(code)


def _leave(code: int) -> NoReturn:
    """End as an interpreter does, but for taking modules apart: that copies all memory that a fork shares, in 1.5 s."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code & 0xFF)


if __name__ == "__main__":
    _serve()
