"""Tiers for the sandbox's tests: bubblewrap is installed if that can be done; what could not be run is said aloud."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import time
from pathlib import Path

from mafrt.sandbox.inside import landlock

NOT_RUN: dict[str, str] = {}
"""Tier -> why its tests did not run; the end of pytest's output shows it."""

SECRET = "sk-hostile-0123456789"
"""Stands in the environment as OPENAI_API_KEY while the sandboxes of the tests are opened and used."""


@functools.cache
def ensure_bubblewrap() -> None:
    """Install it as root with apt where it is missing. Where that fails, the tests that need it fail."""
    if shutil.which("bwrap") is None and os.getuid() == 0 and shutil.which("apt-get"):
        environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        for command in (["apt-get", "update", "-qq"], ["apt-get", "install", "-qq", "-y", "bubblewrap"]):
            subprocess.run(command, env=environment, check=False, capture_output=True)


def why_not(tier: str) -> str | None:
    """Why this machine has no such tier. Never for bwrap: without it the tests are to fail."""
    if tier == "degraded" and not landlock.version():
        NOT_RUN[tier] = "this kernel has no Landlock"
        return NOT_RUN[tier]
    return None


def descendants(pid: int) -> list[int]:
    """Processes below this one, from its point of view on this machine."""
    parents: dict[int, int] = {}
    for status in Path("/proc").glob("[0-9]*/status"):
        try:
            lines = dict(line.split(":", 1) for line in status.read_text().splitlines() if ":" in line)
        except OSError:
            continue
        parents[int(lines["Pid"])] = int(lines["PPid"])
    found, edge = [], [pid]
    while edge:
        edge = [child for child, parent in parents.items() if parent in edge]
        found += edge
    return found


def settled(pid: int, at_most: int, within_s: float = 20.0) -> int:
    """How many processes stay below `pid`, once there are no more than `at_most` or time is up."""
    deadline = time.monotonic() + within_s
    while (count := len(descendants(pid))) > at_most and time.monotonic() < deadline:
        time.sleep(0.05)
    return count
