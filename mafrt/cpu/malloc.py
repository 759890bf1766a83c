"""Make the C allocator keep freed memory.

glibc returns every large block to the kernel as soon as it is freed. A training loop on a CPU frees and asks for the
same activations thousands of times a minute, and then spends up to half its time having pages zeroed.
"""

from __future__ import annotations

import ctypes
import platform

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3
_LIMIT = 1 << 30
"""bytes: smaller blocks come from the heap; glibc caps the option below 2 GiB"""
_NEVER = -1


def keep_freed_memory() -> bool:
    """Let blocks below 1 GiB come from a heap that does not shrink. Returns whether the allocator took it (glibc)."""
    if platform.libc_ver()[0] != "glibc":
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    return bool(
        mallopt(_M_MMAP_THRESHOLD, _LIMIT) and mallopt(_M_TRIM_THRESHOLD, _NEVER) and mallopt(_M_TOP_PAD, 256 << 20)
    )
