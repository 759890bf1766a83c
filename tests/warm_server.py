"""The process that holds the imports; see helpers_warm.py. It forks a process for every job that arrives on its socket.

Usage: python warm_server.py ADDRESS [TESTS ...]. With files or folders of tests it forks a second server, at
ADDRESS.tests, which imports them as pytest does and then serves the processes that run tests. Both end at the end of
their standard input.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import sys
import threading
import traceback
import types
from collections.abc import Iterator
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


def main(address: str, tests: list[str]) -> NoReturn:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the tests; this process ends after them
    os.fsync = lambda descriptor: None  # as in conftest.py
    importlib.import_module("mafrt.models.pretrained").import_generation()
    for name in IMPORTED:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # collections in a fork look at its own objects only
    if tests and os.fork() == 0:
        import_tests(tests)
        gc.collect()
        gc.freeze()
        address += ".tests"
    serve(address)


def import_tests(tests: list[str]) -> None:
    """Import the files of tests as pytest does: a later collection in a fork finds them imported."""
    import pytest

    kept = os.dup(1), os.dup(2)
    null = os.open(os.devnull, os.O_WRONLY)
    for target in (1, 2):
        os.dup2(null, target)
    # Mistakes in a file are shown by the processes that run the tests.
    with contextlib.suppress(Exception):
        pytest.main(["--collect-only", "-n", "0", *tests])
    for target, source in zip((1, 2), kept, strict=True):
        os.dup2(source, target)
        os.close(source)
    os.close(null)


def serve(address: str) -> NoReturn:
    """Fork for every job until standard input ends."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address + ".new")
    listener.listen(64)
    os.rename(address + ".new", address)
    lines: dict[socket.socket, Line] = {}
    running: dict[int, Path] = {}
    while True:
        for source in select.select([0, listener, *lines, *running], [], [])[0]:
            if source == 0:
                os._exit(0)
            elif source is listener:
                lines[listener.accept()[0]] = Line()
            elif source in running:
                ended = os.waitid(os.P_PIDFD, source, os.WEXITED)
                assert ended is not None
                code = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
                _put(running.pop(source) / "code", code)
                os.close(source)
            elif not lines[source].read(source):
                source.close()
                del lines[source]
            else:
                for job, streams in lines[source].jobs():
                    pid = os.fork()
                    if pid == 0:
                        for other in (listener, *lines):
                            other.close()
                        for handle in running:
                            os.close(handle)
                        become(job, streams)
                    for stream in streams:
                        os.close(stream)
                    folder = Path(job["folder"])
                    running[os.pidfd_open(pid)] = folder
                    _put(folder / "pid", pid)


class Line:
    """What has arrived from one client and is not served yet."""

    def __init__(self) -> None:
        self._text, self._streams = b"", []

    def read(self, source: socket.socket) -> bool:
        """False at its end."""
        read, streams, _, _ = socket.recv_fds(source, 1 << 16, 3)
        self._text += read
        self._streams += streams
        return bool(read)

    def jobs(self) -> Iterator[tuple[dict[str, Any], list[int]]]:
        """Each with the descriptors for its streams, if any came with it."""
        *jobs, self._text = self._text.split(b"\n")
        for job in jobs:
            streams, self._streams = self._streams, []
            yield json.loads(job), streams


def _put(path: Path, number: int) -> None:
    with contextlib.suppress(FileNotFoundError):  # the process that asked is gone, and its folder with it
        path.with_suffix(".tmp").write_text(str(number))
        path.with_suffix(".tmp").rename(path)


def become(job: dict[str, Any], streams: list[int]) -> NoReturn:
    """Run the job's script, the code after `-c` or the module after `-m`, as an interpreter would."""
    if not streams:
        (typed := Path(job["folder"], "in")).write_text(job["typed"])
        streams = [os.open(typed, os.O_RDONLY)]
        streams += [os.open(f"{job['folder']}/{n}", os.O_WRONLY | os.O_CREAT | os.O_APPEND) for n in ("out", "err")]
    for target, source in enumerate(streams):
        os.dup2(source, target)
        os.close(source)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # the tests may run where Ctrl-C is ignored
    os.chdir(job["cwd"])
    os.environ.clear()
    os.environ.update(job["env"])
    sys.argv = job["argv"]
    code = 0
    try:
        if sys.argv[0] == "-c":
            typed_code = sys.argv.pop(1)
            sys.path[0] = ""
            sys.modules["__main__"] = types.ModuleType("__main__")
            exec(typed_code, sys.modules["__main__"].__dict__)  # noqa: S102
        elif sys.argv[0] == "-m":
            sys.path[0] = os.getcwd()
            name = sys.argv.pop(1)
            sys.modules.pop(name, None)  # imported already, it would run a second time, with a warning
            runpy.run_module(name, run_name="__main__", alter_sys=True)
        else:
            sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
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
    main(sys.argv[1], sys.argv[2:])
