"""The two confinements of a snippet: namespaces (tier `bwrap`), or path rules on the host (tier `degraded`).

A confinement creates the supervisor's process, prepares its workdir, and applies the last restrictions in the snippet's
own process. Privileged steps come first; the snippet itself has no privileges.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import tempfile
from pathlib import Path
from typing import Protocol

from . import landlock, libc, limits, seccomp

WORKDIR = "/sandbox"
"""Where a snippet runs in the tier `bwrap`; in `degraded` it is a folder for temporary files."""
INNER_ID = 1000
"""User and group inside, of the tier `bwrap`."""
READABLE = "MAFRT_SANDBOX_READABLE"
"""Environment variable of the tier `degraded`: JSON of paths that may be read, and of folders that may be listed."""
ALWAYS = (
    *(f"/dev/{name}" for name in ("null", "zero", "random", "urandom")),
    *("/etc/ld.so.cache", "/etc/localtime", "/etc/alternatives", "/sys/devices/system/cpu"),
    *(f"/proc/{name}" for name in ("cpuinfo", "meminfo", "stat", "sys/vm/overcommit_memory")),
)
"""Facts and devices that Python and its libraries need, under `degraded`."""
UNPRIVILEGED_ID = 60999
"""Whom root becomes: the limit on processes does not count root's."""

_ROOM = (
    libc.CLONE_NEWUSER
    | libc.CLONE_NEWPID
    | libc.CLONE_NEWNS
    | libc.CLONE_NEWIPC
    | libc.CLONE_NEWNET
    | libc.CLONE_NEWUTS
    | libc.CLONE_NEWCGROUP
)


class Confinement(Protocol):
    alone: bool
    """Whether the supervisor sees its snippet's processes only, and may end all it sees."""

    def fork(self) -> int:
        """Like `os.fork`, into the room if there is one."""
        ...

    def prepare(self) -> str:
        """In the supervisor: make the workdir, and return it."""
        ...

    def enclose(self, workdir: str) -> None:
        """In the snippet's process, before there is a snippet: give up every right there is."""
        ...

    def clean(self, workdir: str) -> None:
        """In the supervisor, when all processes are gone."""
        ...

    def leave(self) -> None:
        """In the zygote, when it ends."""
        ...


class Namespaces:
    """Namespaces of its own: user, processes, mounts, ipc, network, host name, control groups."""

    alone = True

    def __init__(self) -> None:
        self.outer = (os.getuid(), os.getgid())

    def fork(self) -> int:
        return libc.fork_into(_ROOM)

    def prepare(self) -> str:
        uid, gid = self.outer
        # The kernel demands this before an unprivileged process may map its group.
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{INNER_ID} {uid} 1")
        Path("/proc/self/gid_map").write_text(f"{INNER_ID} {gid} 1")
        safe = libc.MS_NOSUID | libc.MS_NODEV
        # Private first, or the mounts below would show outside as well.
        libc.mount(None, "/", None, libc.MS_REC | libc.MS_PRIVATE)
        # A fresh /proc: the old one shows the processes of the room around this one.
        libc.mount("proc", "/proc", "proc", safe | libc.MS_NOEXEC)
        for place, size in ((WORKDIR, limits.WORKDIR_MIB), ("/tmp", limits.TMP_MIB)):
            options = f"mode=0700,size={size}m,nr_inodes={limits.WORKDIR_INODES}"
            libc.mount("tmpfs", place, "tmpfs", safe, options)
        # Without this, snippets could read and change the supervisor through /proc.
        libc.prctl(libc.PR_SET_DUMPABLE, 0)
        return WORKDIR

    def enclose(self, workdir: str) -> None:
        libc.prctl(libc.PR_SET_DUMPABLE, 1)
        # Although the namespace bounds them: a right inside still opens more of the kernel to a snippet.
        drop_capabilities()
        seccomp.install(attributes=True, signals_to_others=True)

    def clean(self, workdir: str) -> None:
        """It goes with its namespace."""

    def leave(self) -> None:
        """Nothing outlives it."""


class Landlocked:
    """No namespaces: another user if we are root, Landlock, and a stricter filter."""

    alone = False

    def __init__(self) -> None:
        self.version = landlock.version()
        if not self.version:
            raise OSError("this kernel has no Landlock (Linux 5.13, and `landlock` in its list of security modules)")
        self.become = UNPRIVILEGED_ID if os.getuid() == 0 else None
        self.readable, self.listed = json.loads(os.environ.pop(READABLE, "[[], []]"))
        # An interpreter in root's own home can be read by no other user; Landlock then limits this right to the image.
        closed = self.become is not None and not all(open_to_others(path) for path in self.readable)
        self.keep = 1 << libc.CAP_DAC_READ_SEARCH if closed else 0

    def fork(self) -> int:
        return os.fork()

    def prepare(self) -> str:
        # Processes whose parent ended come to the supervisor then, and cannot escape by forking twice.
        libc.prctl(libc.PR_SET_CHILD_SUBREAPER, 1)
        libc.prctl(libc.PR_SET_DUMPABLE, 0)
        workdir = tempfile.mkdtemp(prefix="mafrt-sandbox-", dir="/tmp")
        os.mkdir(f"{workdir}/tmp")
        os.mkdir(f"{workdir}/work")
        if self.become is not None:
            for path in (workdir, f"{workdir}/tmp", f"{workdir}/work"):
                os.chown(path, self.become, self.become)
        return f"{workdir}/work"

    def enclose(self, workdir: str) -> None:
        os.environ["HOME"] = workdir
        os.environ["TMPDIR"] = tempfile.tempdir = f"{os.path.dirname(workdir)}/tmp"
        if self.become is not None:
            libc.prctl(libc.PR_SET_KEEPCAPS, 1)
            # Groups first: after the change of user there is no right to drop them.
            os.setgroups([])
            os.setresgid(self.become, self.become, self.become)
            os.setresuid(self.become, self.become, self.become)
            libc.set_capabilities(1 << libc.CAP_DAC_READ_SEARCH)  # to open the folders of the rules
        libc.prctl(libc.PR_SET_DUMPABLE, 1)
        landlock.confine([*ALWAYS, *self.readable], [os.path.dirname(workdir), "/dev/null"], self.listed)
        drop_capabilities(self.keep)
        # Set after the change of user, which clears it.
        libc.prctl(libc.PR_SET_PDEATHSIG, signal.SIGKILL)
        seccomp.install(attributes=False, signals_to_others=self.version >= landlock.HAS_SCOPES)

    def clean(self, workdir: str) -> None:
        # In Python, as many nested folders as a snippet can make end in a RecursionError.
        subprocess.run(["rm", "-rf", os.path.dirname(workdir)], check=False, stderr=subprocess.DEVNULL)

    def leave(self) -> None:
        # The links to packages, first in the list: the trainer may have been killed, and removes nothing then.
        shutil.rmtree(self.listed[0], ignore_errors=True)


def drop_capabilities(keep: int = 0) -> None:
    """All of them, from every set, so that no program that is started gets any back."""
    for capability in range(64):
        try:
            libc.prctl(libc.PR_CAPBSET_DROP, capability)
        except OSError:
            break  # there are no more, or, as an ordinary user, none that could be dropped
    libc.prctl(libc.PR_CAP_AMBIENT, libc.PR_CAP_AMBIENT_CLEAR_ALL)
    libc.set_capabilities(keep)


def open_to_others(path: str) -> bool:
    """Whether any user can get into this folder, or the folder of this file."""
    real = Path(path).resolve()
    real = real if real.is_dir() else real.parent
    return all(folder.stat().st_mode & 0o005 == 0o005 for folder in (real, *real.parents))
