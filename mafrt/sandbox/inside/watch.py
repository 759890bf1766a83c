"""Total usage of all processes of a snippet, which resource limits count per process only."""

from __future__ import annotations

import os
from pathlib import Path

from . import limits, workdir

DEEPEST = 64
"""Levels of folders, where the workdir lies on a real disk."""


def processes(alone: bool) -> list[int]:
    """The snippet's processes: all but this one in a pid namespace, otherwise whatever descends from this one."""
    here = os.getpid()
    processes = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    if alone:
        return [pid for pid in processes if pid != here]
    # Found by descent, since without namespaces other processes of the user are none of ours.
    parents = {pid: parent for pid in processes if (parent := _parent(pid))}
    return [pid for pid in parents if _descends(pid, here, parents)]


def memory_bytes(pids: list[int], shared: int) -> int:
    """Resident memory of the processes, less the `shared` bytes each inherited from the warm interpreter by fork."""
    return sum(max(0, own_bytes(pid) - shared) for pid in pids)


def own_bytes(pid: int | str) -> int:
    """Resident memory that no file on disk stands behind; 0 for a process that is gone."""
    total = 0
    for line in _lines(f"/proc/{pid}/status"):
        # Pages of files are shared with the warm interpreter, and cost the machine nothing more.
        if line.startswith((b"RssAnon:", b"RssShmem:")):
            total += 1024 * int(line.split()[1])
    return total


def available_bytes() -> int:
    """Memory of the machine that can be had without swapping, as the kernel estimates it."""
    for line in _lines("/proc/meminfo"):
        if line.startswith(b"MemAvailable:"):
            return 1024 * int(line.split()[1])
    # Without /proc/meminfo there is nothing to watch, and no snippet is ended for it.
    return 2**63


def tasks_of(uid: int) -> int:
    """Processes and threads of a user on this machine, which the limit on their number counts together."""
    count = 0
    for name in os.listdir("/proc"):
        if name.isdigit():
            lines = {line.split(b":")[0]: line.split()[1:] for line in _lines(f"/proc/{name}/status") if b":" in line}
            if lines.get(b"Uid", [b"-1"])[0] == str(uid).encode():
                count += int(lines.get(b"Threads", [b"1"])[0])
    return count


def folder_fault(folder: str) -> str | None:
    """Why this folder has become too large, or None. For the tier whose workdir has no quota of its own."""
    total = 0
    for files, (path, about, is_folder) in enumerate(workdir.entries(folder, DEEPEST), start=1):
        if is_folder and path.count("/") + 1 >= DEEPEST:
            return f"folders nested more than {DEEPEST} deep"
        # Blocks and not lengths, since a file may have holes.
        total += about.st_blocks * 512
        if files > limits.WORKDIR_INODES:
            return f"more than {limits.WORKDIR_INODES} files"
        if total > limits.WORKDIR_MIB * limits.MIB:
            return f"more than {limits.WORKDIR_MIB} MiB of files"
    return None


def _parent(pid: int) -> int:
    for line in _lines(f"/proc/{pid}/status"):
        if line.startswith(b"PPid:"):
            return int(line.split()[1])
    return 0


def _descends(pid: int, ancestor: int, parents: dict[int, int]) -> bool:
    while pid := parents.get(pid, 0):
        if pid == ancestor:
            return True
    return False


def _lines(path: str) -> list[bytes]:
    try:
        return Path(path).read_bytes().splitlines()
    except OSError:
        return []
