"""Landlock: per-process file system access rules without namespaces (landlock(7)). For the tier `degraded`."""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Iterable

from . import libc

EXECUTE, WRITE_FILE, READ_FILE, READ_DIR = 1, 1 << 1, 1 << 2, 1 << 3
REFER, TRUNCATE, IOCTL_DEV = 1 << 13, 1 << 14, 1 << 15
FIRST = (1 << 13) - 1
"""Every access of the first version; REFER came with 2, TRUNCATE with 3, IOCTL_DEV with 5."""
READ = EXECUTE | READ_FILE | READ_DIR
OF_A_FILE = EXECUTE | WRITE_FILE | READ_FILE | TRUNCATE | IOCTL_DEV
DEVICES = (1 << 6) | (1 << 11)
TCP = 3
ABSTRACT_SOCKETS, SIGNALS = 1, 2

HAS_SCOPES = 6
"""Version from which signals and abstract sockets can be kept in."""


def version() -> int:
    """The kernel's version of Landlock, 0 without it."""
    try:
        return libc.syscall("landlock_create_ruleset", None, ctypes.c_size_t(0), ctypes.c_uint32(1))
    except OSError:
        return 0


def confine(readable: Iterable[str], writable: Iterable[str], listed: Iterable[str] = ()) -> None:
    """From now on this process and all it starts read below `readable` only, and write below `writable` only.

    Below `listed` they see the names of files.
    """
    abi = version()
    everything = FIRST | (REFER if abi >= 2 else 0) | (TRUNCATE if abi >= 3 else 0) | (IOCTL_DEV if abi >= 5 else 0)
    words = [everything]
    if abi >= 4:
        words.append(TCP)
    if abi >= HAS_SCOPES:
        words.append(ABSTRACT_SOCKETS | SIGNALS)
    attributes = struct.pack(f"={len(words)}Q", *words)
    ruleset = libc.syscall(
        "landlock_create_ruleset", ctypes.c_char_p(attributes), ctypes.c_size_t(len(attributes)), ctypes.c_uint32(0)
    )
    try:
        for path in readable:
            _allow(ruleset, path, READ)
        for path in listed:
            _allow(ruleset, path, READ_DIR)
        for path in writable:
            _allow(ruleset, path, everything & ~DEVICES & ~IOCTL_DEV)
        libc.prctl(libc.PR_SET_NO_NEW_PRIVS, 1)
        libc.syscall("landlock_restrict_self", ctypes.c_int(ruleset), ctypes.c_uint32(0))
    finally:
        os.close(ruleset)


def _allow(ruleset: int, path: str, access: int) -> None:
    try:
        place = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        if not os.path.isdir(path):
            access &= OF_A_FILE
        rule = struct.pack("=Qi", access, place)
        libc.syscall(
            "landlock_add_rule", ctypes.c_int(ruleset), ctypes.c_int(1), ctypes.c_char_p(rule), ctypes.c_uint32(0)
        )
    finally:
        os.close(place)
