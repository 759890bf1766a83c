"""The filter on system calls, as a classic BPF program put together here (seccomp(2), filter.txt of the kernel).

Calls that no data analysis needs and that have reached other processes, the kernel or the machine in published
escapes are refused with EPERM; calls newer than this list with ENOSYS, so that libraries take the older way. The call
convention of another architecture (32 bit, x32) ends the process, for its numbers mean other things.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from collections.abc import Mapping

from . import libc

# name: number on x86_64, on aarch64 (None: it has no such call)
REFUSED: dict[str, tuple[int | None, int | None]] = {
    # other processes
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "process_madvise": (440, 440),
    "process_mrelease": (448, 448),
    "kcmp": (312, 272),
    "pidfd_getfd": (438, 438),
    "perf_event_open": (298, 241),
    # namespaces, mounts, roots
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    "fanotify_init": (300, 262),
    "fanotify_mark": (301, 263),
    "lookup_dcookie": (212, 18),
    "uselib": (134, None),
    "ustat": (136, None),
    "sysfs": (139, None),
    # files that are shared with the host: who opens them, and who waits for a lock, which a reader may take whole
    "inotify_init": (253, None),
    "inotify_init1": (294, 26),
    "inotify_add_watch": (254, 27),
    "flock": (73, 32),
    # the network; socketpair(2), which only reaches oneself, is left
    "socket": (41, 198),
    # the clock and the machine
    "settimeofday": (164, 170),
    "adjtimex": (159, 171),
    "clock_settime": (227, 112),
    "clock_adjtime": (305, 266),
    "reboot": (169, 142),
    "sethostname": (170, 161),
    "setdomainname": (171, 162),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "acct": (163, 89),
    "syslog": (103, 116),
    "vhangup": (153, 58),
    "iopl": (172, None),
    "ioperm": (173, None),
    # the kernel
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "bpf": (321, 280),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "modify_ldt": (154, None),
    "personality": (135, 92),
    "seccomp": (317, 277),
    # memory that belongs to no process, which no limit counts
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "shmat": (30, 196),
    "semget": (64, 190),
    "msgget": (68, 186),
    "mq_open": (240, 180),
    # memory of other nodes and processes
    "mbind": (237, 235),
    "set_mempolicy": (238, 237),
    "set_mempolicy_home_node": (450, 450),
    "migrate_pages": (256, 238),
    "move_pages": (279, 239),
}

# Only on oneself: name -> (numbers, argument -> the value that it must have). The two priorities also take groups and
# whole users, of which 0 is the caller's own: without namespaces that is everything that the user runs.
ONLY_SELF: dict[str, tuple[tuple[int, int], dict[int, int]]] = {
    "prlimit64": ((302, 261), {0: 0}),
    "setpriority": ((141, 140), {0: 0, 1: 0}),
    "ioprio_set": ((251, 30), {0: 1, 1: 0}),
    "sched_setparam": ((142, 118), {0: 0}),
    "sched_setscheduler": ((144, 119), {0: 0}),
    "sched_setaffinity": ((203, 122), {0: 0}),
    "sched_setattr": ((314, 274), {0: 0}),
}

# Only to oneself, where no pid namespace hides the others: name -> (numbers, argument with the pid)
SIGNALS: dict[str, tuple[tuple[int, int], int]] = {
    "kill": ((62, 129), 0),
    "tgkill": ((234, 131), 0),
    "rt_sigqueueinfo": ((129, 138), 0),
    "rt_tgsigqueueinfo": ((297, 240), 0),
}
SIGNALS_REFUSED: dict[str, tuple[int, int]] = {"tkill": (200, 130), "pidfd_send_signal": (424, 424)}

# What Landlock does not look at and a mount namespace makes harmless: the attributes of files that the user owns, and
# on older kernels their length.
ATTRIBUTES: dict[str, tuple[int | None, int | None]] = {
    "truncate": (76, 45),
    "chmod": (90, None),
    "fchmod": (91, 52),
    "fchmodat": (268, 53),
    "chown": (92, None),
    "fchown": (93, 55),
    "lchown": (94, None),
    "fchownat": (260, 54),
    "utime": (132, None),
    "utimes": (235, None),
    "futimesat": (261, None),
    "utimensat": (280, 88),
    "setxattr": (188, 5),
    "lsetxattr": (189, 6),
    "fsetxattr": (190, 7),
    "removexattr": (197, 14),
    "lremovexattr": (198, 15),
    "fremovexattr": (199, 16),
}

# Options of calls that are needed otherwise: name -> (numbers, argument that names the option, options)
OPTIONS: dict[str, tuple[tuple[int, int], int, tuple[int, ...]]] = {
    # buffers of the kernel that a process may enlarge: SO_SNDBUF, SO_RCVBUF, and the same by force
    "setsockopt": ((54, 208), 2, (7, 8, 32, 33)),
    # the same, F_SETPIPE_SZ; and F_SETOWN, F_SETSIG, F_SETOWN_EX, by which the kernel sends another process a signal
    # where a descriptor can be read (before Landlock looked at signals: Linux 6.12); F_SETLEASE and F_NOTIFY, by which
    # it is told who opens a file; F_OFD_SETLK and F_OFD_SETLKW, as flock above (SQLite has F_SETLK)
    "fcntl": ((72, 25), 1, (1031, 8, 10, 15, 1024, 1026, 37, 38)),
    # TIOCSTI and TIOCLINUX put input into the parent's terminal; FIOSETOWN and SIOCSPGRP are F_SETOWN
    "ioctl": ((16, 29), 1, (0x5412, 0x541C, 0x8901, 0x8902)),
}

CLONE = (56, 220)
CLONE3 = (435, 435)
NEWEST = 450
"""Newest system call known to this list; calls with higher numbers fail with ENOSYS in a snippet."""

NAMESPACES = 0x7E020000
"""All CLONE_NEW* flags that clone(2) takes."""

ARCHITECTURE = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}

_LOAD, _JUMP_EQUAL, _JUMP_GREATER, _JUMP_SET, _RETURN = 0x20, 0x15, 0x25, 0x45, 0x06
_ALLOW, _ERRNO, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_NUMBER, _ARCH = 0, 4


def _low_word(argument: int) -> int:
    return 16 + 8 * argument  # both architectures are little-endian


def program(machine: str, *, attributes: bool = True, own_pid: int | None = None) -> list[tuple[int, int, int, int]]:
    """The instructions (code, jump if true, jump if false, constant) for one architecture.

    `attributes`: whether those of files may be changed. `own_pid`: signals only to this process; None: to whatever the
    pid namespace or Landlock lets it reach.
    """
    # One function, long as it is: the instructions are a list whose jumps count lines, and are checked in their order.
    column = libc.COLUMN[machine]
    lines: list[tuple[int, int, int, int]] = [
        (_LOAD, 0, 0, _ARCH),
        (_JUMP_EQUAL, 1, 0, ARCHITECTURE[machine]),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER),
        (_JUMP_GREATER, 0, 1, NEWEST),
        (_RETURN, 0, 0, _ERRNO | errno.ENOSYS),
    ]

    def refuse(number: int | None, code: int = errno.EPERM) -> None:
        if number is not None:
            lines.extend([(_JUMP_EQUAL, 0, 1, number), (_RETURN, 0, 0, _ERRNO | code)])

    def unless(number: int, values: Mapping[int, int]) -> None:
        """Allowed if the arguments have these values, refused otherwise."""
        lines.append((_JUMP_EQUAL, 0, 2 * len(values) + 2, number))
        for left, (argument, value) in zip(range(len(values) - 1, -1, -1), values.items(), strict=True):
            lines.extend([(_LOAD, 0, 0, _low_word(argument)), (_JUMP_EQUAL, 0, 2 * left + 1, value)])
        lines.extend([(_RETURN, 0, 0, _ALLOW), (_RETURN, 0, 0, _ERRNO | errno.EPERM)])

    def refuse_option(number: int, argument: int, values: tuple[int, ...]) -> None:
        """Refused if the argument has one of these values."""
        lines.extend([(_JUMP_EQUAL, 0, len(values) + 3, number), (_LOAD, 0, 0, _low_word(argument))])
        for place, value in enumerate(values):
            lines.append((_JUMP_EQUAL, len(values) - place, 0, value))
        lines.extend([(_RETURN, 0, 0, _ALLOW), (_RETURN, 0, 0, _ERRNO | errno.EPERM)])

    for numbers in REFUSED.values():
        refuse(numbers[column])
    for pair, argument, options in OPTIONS.values():
        refuse_option(pair[column], argument, options)
    if not attributes:
        for numbers in ATTRIBUTES.values():
            refuse(numbers[column])
    # Its flags are in memory, where a filter cannot look; glibc then takes clone(2).
    refuse(CLONE3[column], errno.ENOSYS)
    for pair, values in ONLY_SELF.values():
        unless(pair[column], values)
    if own_pid is not None:
        for pair, argument in SIGNALS.values():
            unless(pair[column], {argument: own_pid})
        for pair in SIGNALS_REFUSED.values():
            refuse(pair[column])
    lines.extend(
        [
            (_JUMP_EQUAL, 0, 3, CLONE[column]),
            (_LOAD, 0, 0, _low_word(0)),
            (_JUMP_SET, 0, 1, NAMESPACES),
            (_RETURN, 0, 0, _ERRNO | errno.EPERM),
            (_RETURN, 0, 0, _ALLOW),
        ]
    )
    return lines


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("lines", ctypes.c_char_p)]


def install(*, attributes: bool, signals_to_others: bool) -> None:
    """Filter this process and all it starts, for good. Needs no privilege, since none can be gained afterwards."""
    lines = program(libc.MACHINE, attributes=attributes, own_pid=None if signals_to_others else os.getpid())
    code = b"".join(struct.pack("=HBBI", *line) for line in lines)
    libc.prctl(libc.PR_SET_NO_NEW_PRIVS, 1)
    libc.prctl(libc.PR_SET_SECCOMP, 2, ctypes.byref(_Program(len(lines), code)))
