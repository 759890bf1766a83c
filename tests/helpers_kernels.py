"""The kernels in C as they are compiled for a processor with AVX2 and nothing later."""

from __future__ import annotations

import ctypes
import fcntl
import os
import subprocess
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

from helpers_warm import ADDRESS

from mafrt.cpu.library import FLAGS, SOURCE


@cache
def without_avx512() -> ctypes.CDLL:
    """Compiled once by all processes of a test run, and without optimising, which takes most of the time."""
    shared = os.environ.get(ADDRESS)
    out = Path(shared).parent / "narrow.so" if shared else Path(mkdtemp()) / "narrow.so"
    flags = [flag for flag in FLAGS if not flag.startswith(("-march", "-O"))]
    sources = [str(path) for path in sorted(SOURCE.glob("*.c"))]
    made = out.with_suffix(".new")
    with open(out.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not out.exists():
            command = ["cc", "-O0", "-march=x86-64-v3", *flags, *sources, "-lm", "-o", str(made)]
            subprocess.run(command, check=True, capture_output=True)
            made.rename(out)
    return ctypes.CDLL(str(out))
