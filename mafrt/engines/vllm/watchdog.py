"""Ends processes whose trainer is gone. vLLM's would live on after a kill -9, and keep a GPU's memory for ever.

    python guardian.py TRAINER_PID FOLDER PID...
    python guardian.py TRAINER_PID FOLDER but PID...

waits until it is no longer the trainer's child, then kills the given processes (or all that the trainer has started,
but the given ones) and removes the folder of adapters.
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
BUT = "but"


def watch(pids: list[int], folder: Path) -> subprocess.Popen[bytes]:
    """Start a guardian of this process. Dismiss the guardian before ending the processes in good order."""
    return _start(folder, *pids)


def watch_what_starts(folder: Path) -> subprocess.Popen[bytes]:
    """Start a guardian of all that this process starts from now on."""
    return _start(folder, BUT, *children(os.getpid()))


def dismiss(guardian: subprocess.Popen[bytes]) -> None:
    """End a guardian; the processes that it watched go on."""
    guardian.kill()
    guardian.wait()


def _start(*arguments: object) -> subprocess.Popen[bytes]:
    words = [str(word) for word in (os.getpid(), *arguments)]
    # In a session of its own: Ctrl-C is for the trainer to deal with.
    return subprocess.Popen([sys.executable, __file__, *words], stdin=subprocess.DEVNULL, start_new_session=True)


def children(pid: int) -> set[int]:
    """Processes that `pid` has started. Linux only; elsewhere none are found."""
    return set(_tree().get(pid, []))


def descendants(pid: int) -> set[int]:
    """Processes that `pid` has started, and theirs."""
    tree = _tree()
    pids: set[int] = set()
    todo = [pid]
    while todo:
        new = [child for child in tree.get(todo.pop(), []) if child not in pids]
        pids.update(new)
        todo += new
    return pids


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
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            # The name, in brackets, may hold spaces; the parent is the second field behind it.
            parent = int(entry.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(entry.parent.name))
    return children


def main(trainer: int, folder: str, words: list[str]) -> None:
    growing = words[:1] == [BUT]
    given = [int(word) for word in words[growing:]]
    # A number may be given to another process once its own is gone: only the process that was seen is killed.
    born = {pid: birth(pid) for pid in given if not growing}
    while os.getppid() == trainer:
        if growing:
            seen = descendants(trainer).difference(born, given, [os.getpid()])
            born |= {pid: birth(pid) for pid in seen}
        time.sleep(POLL_S)
    for pid in [pid for pid in born if alive(pid, born[pid])]:
        born |= {child: birth(child) for child in descendants(pid) - born.keys()}  # they may have started more
    for pid, when in born.items():
        if alive(pid, when) and not tracks(pid):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
    shutil.rmtree(folder, ignore_errors=True)


def birth(pid: int) -> str | None:
    """When a process was started, in the kernel's ticks; None if it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        return None if fields[0] in "ZX" else fields[19]
    except (OSError, IndexError):
        return None


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3:])
