"""Steps that may never end or may fill the memory, tried in a fork that is bounded, and ended with it."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import resource
import signal
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from mafrt.core.text import shortened

TRIAL_S, TRIAL_CPU_S, TRIAL_MIB = 300.0, 20, 1024
"""bounds of a trial, by the clock, of a processor, and of memory"""
SAID = 65536
"""most bytes that a trial says, as many as a pipe holds"""


def in_fork(*steps: Callable[[], str]) -> list[str]:
    """What the steps return in a fork, one line each; fewer where one raises, dies, or needs more than a trial may."""
    read_end, write_end = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # the child uses no thread but its own
        pid = os.fork()
    if pid == 0:
        _work(steps, write_end)
    os.close(write_end)
    deadline = time.monotonic() + TRIAL_S
    while not os.waitpid(pid, os.WNOHANG)[0]:
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            break
        time.sleep(0.002)
    os.set_blocking(read_end, False)  # another fork may hold the other end
    with open(read_end, "rb") as file:
        return (file.read(SAID) or b"").decode("utf-8", "replace").split("\n")[:-1]


def _work(steps: Sequence[Callable[[], str]], told: int) -> NoReturn:
    """Take the steps within bounds, and end this process."""
    try:
        faulthandler.disable()
        os.environ["RUST_BACKTRACE"] = "0"  # a backtrace takes memory: where there is none, it waits for itself
        signal.signal(signal.SIGXCPU, signal.SIG_DFL)
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        os.dup2(null, 2)
        with contextlib.suppress(OSError, ValueError):  # a Mac has other files, and takes no such limit
            mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (mapped + TRIAL_MIB * 2**20,) * 2)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_CPU, (TRIAL_CPU_S, TRIAL_CPU_S))
        for step in steps:
            os.write(told, f"{shortened(step(), 400)}\n".encode("utf-8", "replace"))
    finally:
        os._exit(0)
