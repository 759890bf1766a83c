"""Resource limits of a snippet (setrlimit)."""

from __future__ import annotations

import contextlib
import os
import resource
from pathlib import Path

MIB = 2**20

OUTPUT_HEAD_BYTES = 32 * 1024
OUTPUT_TAIL_BYTES = 32 * 1024
"""Of stdout and of stderr: the beginning and the end that are kept."""
OUTPUT_BYTES = 64 * MIB
"""Of both together; a snippet that writes more is ended."""

CODE_BYTES = 2**20
"""The longest program; it travels as JSON, in which a character may take six times its bytes."""
NAMES_BYTES = 2**20
"""Of the names of all files that a program begins with."""

WORKDIR_MIB = 256
WORKDIR_INODES = 4096
"""Files and folders in the workdir, and as many again in /tmp."""
TMP_MIB = 64
FILE_MIB = 128
"""The longest file a snippet can write."""

SHOWN_NAME = 1024
"""Characters of a name that cannot be a file's, as it is told to the trainer."""
FETCH_FILES = 512
FETCH_FILE_MIB = 64
FETCH_TOTAL_MIB = 128

PROCESSES, OPEN_FILES = 64, 256
"""Processes and threads together; open files of each process."""
GROUP_EXTRA_MIB = 128
"""Added to a snippet's memory in the limit of its control group: copies of the warm interpreter's pages, page tables,
pipes and sockets."""

FEWER_PROCESSES, FEWER_OPEN_FILES = 16, 64
"""In place of those above where there are no control groups: together they bound the kernel's memory."""
LEAST_AVAILABLE_MIB = 768
"""Without control groups, snippets are ended when the machine has less memory available than this."""

SPARE = 2
"""Supervisors that stand ready, so that a request waits for no fork."""

WATCH_EVERY_S = 0.05
"""How often the memory of all processes together is looked at."""
WATCH_MORE_OFTEN_S = 0.01
"""The same where there are no control groups."""


def lower(kind: int, value: int) -> None:
    """Lower the soft and hard limit; a limit that is already lower stays."""
    hard = resource.getrlimit(kind)[1]
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(kind, (value, value))


def apply(mapped: int, memory_mib: int, timeout_s: float, processes: int, open_files: int) -> None:
    """Limit this process and its children. `memory_mib` is added to the `mapped` bytes of the warm interpreter.

    The supervisor enforces the deadline; the CPU-time limit is only a backstop, and wide, since threads on several
    cores add up.
    """
    # Address space counts what the warm interpreter has mapped, so that comes on top.
    lower(resource.RLIMIT_AS, mapped + memory_mib * MIB)
    # A second net under the deadline; later than it, so that the deadline is named as the reason.
    lower(resource.RLIMIT_CPU, int(timeout_s * (os.cpu_count() or 1)) + 10)
    lower(resource.RLIMIT_FSIZE, FILE_MIB * MIB)
    lower(resource.RLIMIT_NPROC, processes)
    lower(resource.RLIMIT_NOFILE, open_files)
    # A core file of a warm interpreter would fill the disk with hundreds of megabytes.
    lower(resource.RLIMIT_CORE, 0)
    lower(resource.RLIMIT_MEMLOCK, 0)
    # As most systems have it, so that deep recursion ends alike on a host whose stack is unlimited.
    lower(resource.RLIMIT_STACK, 8 * MIB)
    for name in ("RLIMIT_MSGQUEUE", "RLIMIT_RTPRIO", "RLIMIT_NICE"):
        with contextlib.suppress(AttributeError, ValueError, OSError):
            lower(getattr(resource, name), 0)


def mapped_bytes() -> int:
    """Address space of this process."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
