"""Memory of this machine, or of the container or batch job that this process is in where that has less.

A container's limit stands in its control group; `/proc/meminfo` and `sysconf` tell of the whole machine there, too.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

PROC, GROUPS = Path("/proc"), Path("/sys/fs/cgroup")
_V1, _V2 = (
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ("memory.max", "memory.current", "inactive_file"),
)
"""files with a group's limit and use, and the line of `memory.stat` with what can be let go, by version"""


def memory_bytes() -> int:
    """Bytes of memory that this process and all beside it may have."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([machine, *(limit for limit, _ in _bounds())])


def free_memory() -> float | None:
    """Bytes that are free; None where it cannot be known."""
    available = re.search(r"MemAvailable:\s+(\d+) kB", _text(PROC / "meminfo"))
    if available is None:
        return None
    return float(min([int(available[1]) * 1024, *(max(0, limit - used) for limit, used in _bounds())]))


def _bounds() -> Iterator[tuple[int, int]]:
    """Limit and use, in bytes, of each control group around this process that has a limit."""
    for line in _text(PROC / "self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        root, names = (GROUPS / "memory", _V1) if controllers else (GROUPS, _V2)
        group = root / path.lstrip("/")  # which a container may not see: its own group is the root there
        for folder in [group, *(each for each in group.parents if each.is_relative_to(root))]:
            limit, used, reclaimable = (_text(folder / name).strip() for name in (*names[:2], "memory.stat"))
            if limit.isdecimal() and used.isdecimal():
                cache = re.search(rf"^{names[2]} (\d+)$", reclaimable, re.MULTILINE)
                yield int(limit), int(used) - (int(cache[1]) if cache else 0)


def _text(path: Path) -> str:
    """Of a file of the kernel; empty where there is none."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""
