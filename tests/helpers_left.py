"""Processes that a test leaves behind."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path


def children(pid: int | str = "self") -> set[int]:
    """Processes that a process has started and that live, or have not been waited for. Linux only."""
    found: set[int] = set()
    with contextlib.suppress(OSError):  # it has ended
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):
                found.update(map(int, (task / "children").read_text().split()))
    return found


def end(pid: int) -> None:
    """Kill a process and all that it has started."""
    for child in children(pid):
        end(child)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
