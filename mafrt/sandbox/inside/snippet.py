"""The snippet's own process: limits, then confinement, then the code. Nothing it reports is trusted."""

from __future__ import annotations

import atexit
import io
import linecache
import os
import random
import signal
import socket
import struct
import sys
import threading
import time
import traceback
import types
from typing import Any, NoReturn

from . import frames, limits
from .confine import Confinement

NAME = "snippet.py"
"""File name of the code in tracebacks."""
READY, YES = struct.Struct("=cd"), b"r"
"""The first note to the supervisor: the walls are up, and when that was."""
BROKEN = b"!"
"""The other note: the walls could not be put up. The snippet's own code has no way to write one."""


class Unbuffered(io.BufferedWriter):
    """Hands on every write at once and whole: `os._exit`, a crash or the deadline then lose nothing.

    (`python -u` has no buffered writer, and a raw one may write only a part.)
    """

    def write(self, data: Any) -> int:
        written = super().write(data)
        self.flush()
        return written


def run(orders: socket.socket, workdir: str, confinement: Confinement, streams: tuple[int, int], note: int) -> NoReturn:
    """In a fresh fork: put the walls up, wait for the code and its budget, then become the snippet."""
    status = 1
    try:
        try:
            _settle(workdir, streams, orders.fileno(), note)
            mapped = limits.mapped_bytes()
            confinement.enclose(workdir)
            order = frames.receive(orders)
            orders.close()
            limits.apply(mapped, *order["budget"])
        except frames.BrokenFrame:
            os._exit(0)  # there will be no snippet
        except BaseException as error:
            os.write(note, BROKEN + f"{type(error).__name__}: {error}".encode("utf-8", "replace")[:1000])
            os._exit(1)
        os.write(note, READY.pack(YES, time.monotonic()))
        os.close(note)
        status = _execute(order["code"])
    finally:
        os._exit(status)


def _settle(workdir: str, streams: tuple[int, int], orders: int, note: int) -> None:
    """A session, streams and a folder of its own; nothing else of the supervisor's stays open."""
    # A session of its own, so that all it starts can be ended together.
    os.setsid()
    null = os.open(os.devnull, os.O_RDONLY)
    for target, source in enumerate((null, *streams)):
        os.dup2(source, target)
    first, second = sorted((orders, note))
    # Whatever else was inherited is closed, since a descriptor gives rights that no wall takes back.
    os.closerange(3, first)
    os.closerange(first + 1, second)
    os.closerange(second + 1, 65536)
    # The zygote has Python's handler switched off, which a program would notice.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(workdir)
    sys.stdin = io.TextIOWrapper(io.BufferedReader(io.FileIO(0, closefd=False)), "utf-8", "replace")
    sys.stdout = _writer(1)
    sys.stderr = _writer(2)
    # Also the originals, which some libraries write to.
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr  # type: ignore[misc]
    sys.argv = [NAME]
    sys.path.insert(0, workdir)


def _writer(target: int) -> io.TextIOWrapper:
    raw = io.FileIO(target, "w", closefd=False)
    return io.TextIOWrapper(Unbuffered(raw), encoding="utf-8", errors="backslashreplace", write_through=True)


def _execute(code: str) -> int:
    """Run the code as the module `__main__`; returns the exit code."""
    main = types.ModuleType("__main__")
    main.__dict__.update(__file__=NAME, __builtins__=__builtins__)
    sys.modules["__main__"] = main
    # The code is in no file, and a traceback without its lines would be of little use to the agent.
    linecache.cache[NAME] = (len(code), None, code.splitlines(keepends=True), NAME)
    # For every snippet alike: a program that forgets to seed must not make a resumed run another one.
    random.seed(0)
    status = 0
    try:
        exec(compile(code, NAME, "exec", dont_inherit=True), main.__dict__)  # noqa: S102
    except BaseException as error:
        status = _report(error)
    try:
        # As an interpreter does at its end, so that threads and exit handlers still get to write.
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException as error:
        status = _report(error) or status
    return status


def _report(error: BaseException) -> int:
    """Print an uncaught error as an interpreter does, from the snippet's own frames on."""
    if isinstance(error, SystemExit):
        if error.code is None or isinstance(error.code, int):
            return (error.code or 0) & 0xFF
        sys.stderr.write(f"{error.code}\n")
        return 1
    trace = error.__traceback__
    # Our own frames are left out: the agent should see its program only.
    while trace is not None and trace.tb_frame.f_code.co_filename != NAME:
        trace = trace.tb_next
    if isinstance(error, MemoryError):
        error.__traceback__ = trace = None  # its frames keep the objects that filled the memory alive
    try:
        traceback.print_exception(type(error), error, trace)
    # An exception may have a __str__ that raises.
    except BaseException:
        os.write(2, f"{type(error).__name__}\n".encode())
    return 1
