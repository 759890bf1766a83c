"""Runs a command and ends everything that it has started. A script of its own; only the standard library.

A program may start others, in sessions of their own, which would go on after the episode, call its address and hold its
output open. This process is the one that Linux gives such orphans to (PR_SET_CHILD_SUBREAPER): when the command has
ended, or SIGTERM asks for it, or the trainer is gone, it kills all that descend from it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Sequence

_DEATH_SIGNAL, _SUBREAPER = 1, 36


class TerminationRequested(Exception):
    """SIGTERM: the episode is given up."""


def descendants(root: int) -> list[int]:
    """All processes below one, whatever their sessions."""
    children: defaultdict[int, list[int]] = defaultdict(list)
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError), open(f"/proc/{entry}/stat", "rb") as file:
                # The name in brackets may hold anything, brackets too.
                children[int(file.read().rpartition(b")")[2].split()[1])].append(int(entry))
    found, waiting = [], [root]
    while waiting:
        below = children.get(waiting.pop(), [])
        found += below
        waiting += below
    return found


def end_all() -> None:
    """Kill until nothing is left."""
    while True:
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        living = descendants(os.getpid())
        if not living:
            return
        # First none may go on forking, then all end.
        for kind in (signal.SIGSTOP, signal.SIGKILL):
            for pid in living:
                with contextlib.suppress(OSError):
                    os.kill(pid, kind)
        time.sleep(0.002)


def main(words: Sequence[str]) -> int:
    def asked(signum: int, frame: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise TerminationRequested

    parent = os.getppid()
    signal.signal(signal.SIGTERM, asked)
    libc = ctypes.CDLL(None)
    libc.prctl(_SUBREAPER, 1)
    libc.prctl(_DEATH_SIGNAL, int(signal.SIGTERM))
    status = 128 + signal.SIGTERM
    try:
        if os.getppid() != parent:
            raise TerminationRequested  # the trainer was gone before it could be watched
        pid = os.posix_spawnp(words[0], list(words), os.environ, setsigdef=[signal.SIGTERM, signal.SIGPIPE])
        # Its streams are the command's alone, so that they end with it.
        null = os.open(os.devnull, os.O_RDWR)
        for stream in range(3):
            os.dup2(null, stream)
        while True:
            done, how = os.waitpid(-1, 0)
            if done == pid:
                code = os.waitstatus_to_exitcode(how)
                status = code if code >= 0 else 128 - code
                break
    except TerminationRequested:
        pass
    except OSError as error:
        sys.stderr.write(f"{words[0]}: {error.strerror}\n")
        status = 127
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    end_all()
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
