"""The built-in tasks of DSBench, which take seconds to make: once for all processes of a test run."""

from __future__ import annotations

import fcntl
import os
import tempfile
from functools import cache
from pathlib import Path

from helpers_warm import ADDRESS

from mafrt.envs.dsbench import builtin


@cache
def tasks_folder() -> Path:
    """A value for `MAFRT_CACHE` with the tasks made. Tests only read it."""
    shared = os.environ.get(ADDRESS)
    folder = Path(shared).parent / "dsbench" if shared else Path(_own().name)
    folder.mkdir(exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the others wait, and do not make them as well
        builtin.ensure(folder)
    return folder


@cache
def _own() -> tempfile.TemporaryDirectory:
    return tempfile.TemporaryDirectory()
