"""The kernels in C as they are compiled for a processor with AVX2 and nothing later."""

from __future__ import annotations

import ctypes
import subprocess
from functools import cache
from tempfile import mkdtemp

from mafrt.cpu.library import FLAGS, SOURCE


@cache
def without_avx512() -> ctypes.CDLL:
    """Compiled once a test process, and without optimising, which takes most of the time."""
    out = f"{mkdtemp()}/narrow.so"
    flags = [flag for flag in FLAGS if not flag.startswith(("-march", "-O"))]
    sources = [str(path) for path in sorted(SOURCE.glob("*.c"))]
    subprocess.run(
        ["cc", "-O1", "-march=x86-64-v3", *flags, *sources, "-lm", "-o", out], check=True, capture_output=True
    )
    return ctypes.CDLL(out)
