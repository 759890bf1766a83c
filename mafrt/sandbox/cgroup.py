"""Control groups: one per snippet, which bounds its memory (the kernel's share included) and its processes.

Resource limits count neither socket buffers, pipes and page tables nor the processes of a snippet together; a control
group counts all of it. Version 2 is used where its memory controller is enabled, version 1 (the `memory` and `pids`
hierarchies) otherwise. Groups are made below the one that this process is in, or below the nearest ancestor that
allows it; no group of anyone else is changed.

The supervisor of a snippet runs in namespaces that show no control groups, so it is handed open files: the kernel
checks permissions against the process that opened them.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mafrt.sandbox.inside import limits

log = logging.getLogger(__name__)

PREFIX = "mafrt-snippet-"
CONTROLLERS = ("memory", "pids")
CLOSE_S = 2.0
"""Longest wait for the members of groups to end."""


@dataclass(frozen=True)
class Group:
    """The control group of one snippet: a folder per hierarchy (one in version 2, two in version 1)."""

    name: str
    folders: tuple[Path, ...]
    version: int

    def open(self) -> list[int]:
        """Descriptors for `inside.group.ControlGroup`: memory limit, out-of-memory events, member lists."""
        limit, events = ("memory.max", "memory.events") if self.version == 2 else _V1_FILES
        paths = [(self.folders[0] / limit, os.O_WRONLY), (self.folders[0] / events, os.O_RDONLY)]
        paths += [(folder / "cgroup.procs", os.O_WRONLY) for folder in self.folders]
        opened: list[int] = []
        try:
            for path, flags in paths:
                opened.append(os.open(path, flags | os.O_CLOEXEC))
        except OSError:
            close(opened)
            raise
        return opened

    def remove(self) -> bool:
        """Whether it is gone; it stays as long as a process is in it."""
        for folder in self.folders:
            try:
                folder.rmdir()
            except FileNotFoundError:
                continue
            except OSError:
                return False
        return True


_V1_FILES = ("memory.limit_in_bytes", "memory.oom_control")


@dataclass
class Groups:
    """Makes and removes control groups below `parents`, one folder per hierarchy. Safe to share among threads."""

    version: int
    parents: tuple[Path, ...]
    _made: dict[str, Group] = field(default_factory=dict)
    _ended: list[Group] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def description(self) -> str:
        return f"control groups, version {self.version}"

    def make(self) -> Group:
        """A group without members whose limits are set, but for that on memory. Raises OSError."""
        name = f"{PREFIX}{os.getpid()}-{secrets.token_hex(6)}"
        group = Group(name, tuple(parent / name for parent in self.parents), self.version)
        try:
            for folder in group.folders:
                folder.mkdir()
            (group.folders[-1] / "pids.max").write_text(str(limits.PROCESSES))
            if self.version == 2:
                # The whole group ends together, so that no half of a program goes on after its other half was killed.
                (group.folders[0] / "memory.oom.group").write_text("1")
                # Without this, memory over the limit would go to the disk, and the machine would slow down for all.
                _write_if_there(group.folders[0] / "memory.swap.max", "0")
            else:
                _write_if_there(group.folders[0] / "memory.swappiness", "0")
        except OSError:
            group.remove()
            raise
        with self._lock:
            self._made[name] = group
        return group

    def ended(self, name: str) -> None:
        """The snippet of this group is over; the group is removed as soon as its last process is gone."""
        with self._lock:
            if (group := self._made.pop(name, None)) is not None:
                self._ended.append(group)
            # Tried again at each end: the kernel keeps a group until its last process is reaped.
            self._ended = [group for group in self._ended if not group.remove()]

    def close(self) -> None:
        """Remove every group, once its members are gone: the kernel takes a moment to end them."""
        deadline = time.monotonic() + CLOSE_S
        with self._lock:
            left = [*self._ended, *self._made.values()]
            while (left := [group for group in left if not group.remove()]) and time.monotonic() < deadline:
                time.sleep(0.01)
            self._ended, self._made = left, {}


def find() -> Groups | None:
    """Where this process can make control groups that bound memory and processes, or None."""
    for candidate in _candidates():
        with contextlib.suppress(OSError):
            _sweep(candidate)
            # Tried and not only looked at: in containers the files are often there and refuse to be written.
            if _works(candidate):
                return candidate
    return None


def close(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        with contextlib.suppress(OSError):
            os.close(descriptor)


def _candidates() -> list[Groups]:
    """Places to try, best first: version 2, then version 1; the own group first, then its ancestors."""
    mounts, own_groups = _mounts(), _own_groups()
    groups: list[Groups] = []
    if "" in mounts and "" in own_groups:
        root = mounts[""]
        place = root / own_groups[""].lstrip("/")
        for folder in [place, *place.parents]:
            if folder != root and root not in folder.parents:
                break
            if _enabled(folder):
                groups.append(Groups(2, (folder,)))
    if all(name in mounts and name in own_groups for name in CONTROLLERS):
        parents = tuple(mounts[name] / own_groups[name].lstrip("/") for name in CONTROLLERS)
        roots = tuple(mounts[name] for name in CONTROLLERS)
        groups += [Groups(1, parents), Groups(1, roots)] if parents != roots else [Groups(1, parents)]
    return groups


def _mounts() -> dict[str, Path]:
    """Controller -> mount point of its version 1 hierarchy; the empty name stands for version 2."""
    mounts: dict[str, Path] = {}
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/mounts").read_text().splitlines():
            _, place, kind, options, *_ = line.split()
            if kind == "cgroup2":
                mounts.setdefault("", Path(place))
            elif kind == "cgroup":
                mounts.update({name: Path(place) for name in CONTROLLERS if name in options.split(",")})
    return mounts


def _own_groups() -> dict[str, str]:
    """Controller -> path of the group that this process is in; the empty name stands for version 2."""
    paths: dict[str, str] = {}
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, names, path = line.split(":", 2)
            paths.update(dict.fromkeys(names.split(","), path))
    return paths


def _enabled(folder: Path) -> bool:
    """Whether groups below this one have the controllers. The root group may switch them on for its children."""
    try:
        enabled = (folder / "cgroup.subtree_control").read_text().split()
    except OSError:
        return False
    missing = [name for name in CONTROLLERS if name not in enabled]
    if not missing:
        return True
    if (folder / "cgroup.type").exists():
        return False  # not the root: with members of its own, the kernel would refuse
    try:
        (folder / "cgroup.subtree_control").write_text(" ".join(f"+{name}" for name in missing))
    except OSError:
        return False
    return True


def _works(groups: Groups) -> bool:
    """Whether a process can be moved into a group with a limit, and its memory is counted there."""
    group = groups.make()
    descriptors: list[int] = []
    process = subprocess.Popen(
        [sys.executable, "-ISc", "import time; time.sleep(60)"], cwd="/", stdin=subprocess.DEVNULL
    )
    try:
        descriptors = group.open()
        os.write(descriptors[0], str(64 * limits.MIB).encode())
        for members in descriptors[2:]:
            os.write(members, str(process.pid).encode())
        listed = [(folder / "cgroup.procs").read_text().split() for folder in group.folders]
        return all(str(process.pid) in pids for pids in listed)
    except OSError:
        return False
    finally:
        process.kill()
        process.wait()
        close(descriptors)
        groups.ended(group.name)


def _sweep(groups: Groups) -> None:
    """Remove groups that a trainer left behind when it was killed."""
    for parent in groups.parents:
        for folder in parent.glob(f"{PREFIX}*"):
            owner = folder.name.removeprefix(PREFIX).split("-")[0]
            # Groups of a trainer that runs beside this one are in use.
            if owner.isdigit() and not Path(f"/proc/{owner}").exists():
                with contextlib.suppress(OSError):
                    folder.rmdir()


def _write_if_there(path: Path, text: str) -> None:
    if path.exists():
        path.write_text(text)
