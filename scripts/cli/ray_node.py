"""The part of `--ray` that runs on the cluster's nodes: an actor that holds processes of ours and says how they are.

It is sent by value, so that the Python of a Ray cluster needs no mafrt, and uses the standard library only.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

_PR_SET_PDEATHSIG = 1
_DEVICES = "CUDA_VISIBLE_DEVICES"
"""set for the actor by Ray, which has given it these GPUs"""
WAIT_S = 0.5
"""Longest time that `report` waits for something to report."""


@dataclass(frozen=True)
class Report:
    """What happened since the last report."""

    lines: list[tuple[int, str]]
    """1 (stdout) or 2 (stderr), and a line of a process"""
    codes: list[int | None]
    """exit code of each process as of `subprocess`; None: it runs"""


class RayNode:
    """Processes on one node, which end with the actor. Ray calls its methods one after the other.

    Not by threads: the kernel ends a process that asked for it when the thread that started it ends.
    """

    def __init__(self) -> None:
        util: Any = importlib.import_module("ray.util")
        self.address: str = util.get_node_ip_address()
        self._processes: list[subprocess.Popen[str]] = []
        self._readers: list[threading.Thread] = []
        self._lines: queue.SimpleQueue[tuple[int, str]] = queue.SimpleQueue()
        self._taken: list[socket.socket] = []

    def look(self, needed: Sequence[str], given: str, reply: str) -> tuple[str, list[str]]:
        """This node's address, and the paths that it does not see, of `needed` and of the file `given`.

        Writes the file `reply` beside `given`, for the caller to see in turn.
        """
        missing = [path for path in [*needed, given] if not Path(path).exists()]
        if given not in missing:
            with contextlib.suppress(OSError):
                Path(reply).write_text("", encoding="utf-8")
        return self.address, missing

    def free_place(self) -> tuple[str, int]:
        """This node's address, and a port on which nobody listens, kept for a process of this node.

        Bound and not listening, it is given to no other program, and one that reuses addresses, as servers do, can
        still listen on it.
        """
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((self.address, 0))
        self._taken.append(listener)
        return self.address, int(listener.getsockname()[1])

    def start(self, commands: Sequence[tuple[Sequence[str], Mapping[str, str]]], folder: str) -> None:
        """Start processes in `folder`: their words and their environments. What they print is reported."""
        for words, environment in commands:
            process = self._begin(words, environment, folder, subprocess.PIPE)
            for number, stream in ((1, process.stdout), (2, process.stderr)):
                assert stream is not None
                reader = threading.Thread(target=self._read, args=(number, stream), daemon=True)
                reader.start()
                self._readers.append(reader)

    def serve(
        self, words: Sequence[str], environment: Mapping[str, str], folder: str, log: str, timeout_s: float
    ) -> str:
        """Start a server with `--host` and `--port` added to its words; its HOST:PORT, once it listens.

        Raises:
            RuntimeError: it ended, or does not listen within `timeout_s`.
        """
        host, port = self.free_place()
        with open(log, "ab") as out:
            words = [*words, "--host", host, "--port", str(port)]
            process = self._begin(words, environment, folder, out)
        until = time.monotonic() + timeout_s
        while time.monotonic() < until:
            if process.poll() is not None:
                raise RuntimeError(f"ended with status {process.returncode}")
            with contextlib.suppress(OSError), socket.create_connection((host, port), 1.0):
                return f"{host}:{port}"
            time.sleep(0.2)
        raise RuntimeError(f"does not listen after {timeout_s:g} s")

    def report(self) -> Report:
        """What happened, as soon as there is something and after `WAIT_S` seconds at the latest."""
        codes = [process.poll() for process in self._processes]
        lines = []
        with contextlib.suppress(queue.Empty):
            if None in codes:
                lines.append(self._lines.get(timeout=WAIT_S))
            else:
                for reader in self._readers:
                    reader.join(2.0)  # a process that lives on may hold the other end
            while True:
                lines.append(self._lines.get_nowait())
        return Report(lines, codes)

    def signal(self, number: int) -> None:
        """Send a signal to every process that runs."""
        for process in self._processes:
            process.send_signal(number)

    def end(self) -> None:
        """Kill every process, and wait until it is gone."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait()

    def _begin(
        self, words: Sequence[str], environment: Mapping[str, str], folder: str, out: int | IO[bytes]
    ) -> subprocess.Popen[str]:
        devices = {_DEVICES: os.environ[_DEVICES]} if _DEVICES in os.environ else {}
        process = subprocess.Popen(
            words,
            cwd=folder,
            env={**environment, **devices},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.PIPE if out == subprocess.PIPE else subprocess.STDOUT,
            text=True,
            errors="replace",
            preexec_fn=_as_from_a_shell(),
        )
        self._processes.append(process)
        return process

    def _read(self, number: int, stream: IO[str]) -> None:
        for line in stream:
            self._lines.put((number, line))


def _as_from_a_shell() -> Callable[[], None] | None:
    """What a process does before it becomes another: it ends with its parent, and hears the signals that end a run.

    Ray blocks Ctrl-C in all that it starts, and a cluster that was started by `nohup` ignores SIGHUP.
    """
    if sys.platform != "linux":
        return None
    libc = ctypes.CDLL(None)  # loaded here, since a fork of a process with threads should do little

    def prepare() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        ending = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        for number in ending:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, ending)

    return prepare
