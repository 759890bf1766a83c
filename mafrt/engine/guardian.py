"""Ends processes whose trainer is gone. vLLM's would live on after a kill -9, and keep a GPU's memory for ever.

    python guardian.py TRAINER_PID FOLDER PID...

waits until it is no longer the trainer's child, then kills the given processes and removes the folder of adapters.
It runs by its path, so that it holds nothing but the standard library.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

POLL_S = 0.5


def watch(pids: list[int], folder: Path) -> subprocess.Popen[bytes]:
    """Start a guardian of this process. Whoever ends the processes in good order ends the guardian first."""
    words = [str(word) for word in (os.getpid(), folder, *pids)]
    # In a session of its own: Ctrl-C is for the trainer to deal with.
    return subprocess.Popen([sys.executable, __file__, *words], stdin=subprocess.DEVNULL, start_new_session=True)


def children(pid: int) -> set[int]:
    """Processes that `pid` has started. Linux only; elsewhere none are found."""
    return set(_tree().get(pid, []))


def descendants(pid: int) -> set[int]:
    """Processes that `pid` has started, and theirs."""
    tree = _tree()
    found: set[int] = set()
    todo = [pid]
    while todo:
        new = [child for child in tree.get(todo.pop(), []) if child not in found]
        found.update(new)
        todo += new
    return found


def alive(pid: int, born: str | None) -> bool:
    """Whether the process that `birth` was asked about still runs."""
    return born is not None and birth(pid) == born


def tracks(pid: int) -> bool:
    """Whether it is Python's resource tracker: left alone, it removes the shared memory of the others, and ends."""
    try:
        return b"multiprocessing.resource_tracker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def _tree() -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            # The name, in brackets, may hold spaces; the parent is the second field behind it.
            parent = int(entry.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[1])
            found.setdefault(parent, []).append(int(entry.parent.name))
    return found


def main(trainer: int, folder: str, pids: list[int]) -> None:
    # A number may be given to another process once its own is gone: what is killed is what was there at the start.
    born = {pid: birth(pid) for pid in pids}
    while os.getppid() == trainer:
        time.sleep(POLL_S)
    for pid in pids:
        if alive(pid, born[pid]) and not tracks(pid):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
    shutil.rmtree(folder, ignore_errors=True)


def birth(pid: int) -> str | None:
    """When a process was started, in the kernel's ticks; None if it has ended."""
    try:
        found = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        return None if found[0] in "ZX" else found[19]
    except (OSError, IndexError):
        return None


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], [int(word) for word in sys.argv[3:]])
