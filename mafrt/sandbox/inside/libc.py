"""The system calls that Python has no function for, through ctypes. x86_64 and aarch64."""

from __future__ import annotations

import ctypes
import os
import platform
import sys
from typing import Any

MACHINE = platform.machine()

CLONE_NEWNS = 0x00020000
CLONE_NEWCGROUP = 0x02000000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC = 1, 2, 4, 8
MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 32, 4096, 16384, 1 << 18
MNT_DETACH = 2

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_KEEPCAPS = 1, 4, 8
PR_SET_SECCOMP, PR_CAPBSET_DROP, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 22, 24, 36, 38
PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL = 47, 4

CAP_DAC_READ_SEARCH = 2

NUMBERS = {
    # name: (x86_64, aarch64); None where an architecture never had the call
    "clone": (56, 220),
    "capset": (126, 91),
    "landlock_create_ruleset": (444, 444),
    "landlock_add_rule": (445, 445),
    "landlock_restrict_self": (446, 446),
}
COLUMN = {"x86_64": 0, "aarch64": 1}

_libc = ctypes.CDLL(None, use_errno=True)
# PyDLL keeps the interpreter's lock during the call: the child of a clone must not come back without it.
_locked = ctypes.PyDLL(None, use_errno=True)


def number(name: str) -> int:
    """This machine's number of a system call."""
    if MACHINE not in COLUMN:
        raise OSError(f"found a {MACHINE} machine, expected one of {', '.join(COLUMN)}")
    return NUMBERS[name][COLUMN[MACHINE]]


def checked(result: int, what: str) -> int:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")
    return result


def syscall(name: str, *arguments: Any) -> int:
    return checked(_libc.syscall(ctypes.c_long(number(name)), *arguments), name)


def prctl(option: int, *values: Any) -> int:
    words = [ctypes.c_ulong(value) if isinstance(value, int) else value for value in values]
    words += [ctypes.c_ulong(0)] * (4 - len(words))
    return checked(_libc.prctl(ctypes.c_int(option), *words), f"prctl {option}")


def mount(source: str | None, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    encoded = [text.encode() if text is not None else None for text in (source, target, kind, options)]
    result = _libc.mount(encoded[0], encoded[1], encoded[2], ctypes.c_ulong(flags), encoded[3])
    checked(result, f"mount on {target}")


def unmount(target: str) -> None:
    checked(_libc.umount2(target.encode(), ctypes.c_int(MNT_DETACH)), f"unmount {target}")


def advise(address: int, size: int, advice: int) -> bool:
    """Whether the kernel took the advice on this memory."""
    return bool(_libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(size), ctypes.c_int(advice)) == 0)


def set_capabilities(mask: int) -> None:
    """Exactly these, effective and permitted, none inheritable. Two words of 32 for each of the three sets."""
    low, high = mask & 0xFFFFFFFF, mask >> 32
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    data = (ctypes.c_uint32 * 6)(low, low, 0, high, high, 0)
    syscall("capset", ctypes.byref(header), ctypes.byref(data))


def fork_into(flags: int) -> int:
    """`os.fork` whose child is in new namespaces from the start, and so the first process of a new pid namespace.

    Everything that CPython asks of a program that clones itself is done (`PyOS_BeforeFork` and the two after it). The
    caller must have one thread only.
    """
    python = ctypes.pythonapi
    sys.stdout.flush()
    sys.stderr.flush()
    python.PyOS_BeforeFork()
    zero = ctypes.c_ulong(0)
    signal_to_parent = 17  # SIGCHLD
    pid = _locked.syscall(
        ctypes.c_long(number("clone")), ctypes.c_ulong(flags | signal_to_parent), zero, zero, zero, zero
    )
    code = ctypes.get_errno()
    if pid == 0:
        python.PyOS_AfterFork_Child()
        return 0
    python.PyOS_AfterFork_Parent()
    if pid < 0:
        raise OSError(code, f"clone: {os.strerror(code)}")
    return int(pid)
