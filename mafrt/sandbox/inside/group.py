"""The supervisor's side of a snippet's control group: open files that the trainer made, see `mafrt.sandbox.cgroup`."""

from __future__ import annotations

import os
from collections.abc import Sequence

from . import limits


class ControlGroup:
    """Descriptors of one control group. The snippet's own process never holds them."""

    def __init__(self, name: str, descriptors: Sequence[int]) -> None:
        self.name = name
        self.descriptors = list(descriptors)
        self._limit, self._events, *self._members = self.descriptors

    def enter(self, pid: int) -> None:
        """Move a process into it. The first move after a pause takes the kernel some 8 ms, those after it none."""
        for members in self._members:
            os.write(members, str(pid).encode())

    def limit(self, memory_mib: int) -> None:
        """Limit the total memory of all members: process memory, tmpfs files and kernel memory."""
        os.write(self._limit, str((memory_mib + limits.GROUP_EXTRA_MIB) * limits.MIB).encode())

    def kills(self) -> int:
        """Members that the kernel ended because the limit was reached."""
        for line in os.pread(self._events, 4096, 0).splitlines():
            if line.startswith(b"oom_kill "):
                return int(line.split()[1])
        return 0

    def close(self) -> None:
        for descriptor in self.descriptors:
            os.close(descriptor)
