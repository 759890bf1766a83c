"""The command line of bubblewrap: an empty root with Python and the system's libraries in it, read-only."""

from __future__ import annotations

import os
import shutil
import site
import sys
from collections.abc import Iterator
from pathlib import Path

from mafrt.core.errors import SandboxError
from mafrt.sandbox.inside import confine
from mafrt.sandbox.zygote_process import ENVIRONMENT, Options, interpreter

INSIDE = "/mafrt"
"""Where the folder of that name stands, in there."""
SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
SETTINGS = ("/etc/ld.so.cache", "/etc/alternatives", "/etc/localtime")
PACKAGES = ("site-packages", "dist-packages")
"""Names of folders on the path of modules that are shown."""
DEVICES = ("null", "zero", "full", "random", "urandom")


def command(control: int, tell: int, options: Options) -> tuple[list[str], dict[str, str]]:
    """Arguments and environment; raises SandboxError where bubblewrap is not installed."""
    program = shutil.which("bwrap")
    if program is None:
        raise SandboxError(
            "found no bubblewrap, without which code that a model wrote is not run; "
            "install it with: apt-get install -y bubblewrap"
        )
    arguments = [program, *_namespaces(), *root(), "--info-fd", str(tell)]
    arguments += ["--chdir", "/", "--remount-ro", "/dev", "--remount-ro", "/", "--", os.path.abspath(sys.executable)]
    environment = {**ENVIRONMENT, "HOME": confine.WORKDIR, "TMPDIR": "/tmp"}
    return [*arguments, *interpreter("bwrap", control, INSIDE, options)], environment


def _namespaces() -> Iterator[str]:
    yield from ("--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try")
    yield from ("--as-pid-1", "--new-session", "--hostname", "sandbox")
    if os.getuid() != 0:
        yield "--unshare-user"
        return
    # Root's own user namespace is needed to become another user; the zygote does that first of all.
    for capability in ("CAP_SETUID", "CAP_SETGID", "CAP_SYS_ADMIN"):
        yield from ("--cap-add", capability)


def root() -> Iterator[str]:
    """Options for all that is to be seen in there; for the benchmark too."""
    for folder in SYSTEM:
        if os.path.islink(folder):
            yield from ("--symlink", os.readlink(folder), folder)
        elif os.path.isdir(folder):
            yield from ("--ro-bind", folder, folder)
    for path in SETTINGS:
        yield from ("--ro-bind-try", path, path)
    for path in python_folders():
        # Bubblewrap makes missing parents by itself, but for root only.
        for parent in reversed(Path(path).parents[:-1]):
            yield from ("--dir", str(parent))
        yield from ("--ro-bind", path, path)
    yield from ("--ro-bind", str(Path(confine.__file__).parent), INSIDE)
    yield from ("--tmpfs", "/dev")
    for name in DEVICES:
        yield from ("--dev-bind", f"/dev/{name}", f"/dev/{name}")
    for name, target in (("fd", "/proc/self/fd"), ("shm", "/tmp"), ("stdout", "fd/1"), ("stderr", "fd/2")):
        yield from ("--symlink", target, f"/dev/{name}")
    yield from ("--proc", "/proc", "--dir", confine.WORKDIR, "--dir", "/tmp")


def python_folders() -> list[str]:
    """The interpreter, its library and its packages, where they are not part of the system's folders."""
    # A `.pth` file may name packages that lie outside the environment. The user's own are not imported in there (-s).
    own = site.getusersitepackages()
    packages = [path for path in sys.path if os.path.basename(path) in PACKAGES and path != own and os.path.isdir(path)]
    wanted = [sys.prefix, sys.base_prefix, *packages]
    real = os.path.realpath(sys.executable)
    if not any(_within(real, folder) for folder in (*wanted, *SYSTEM)):
        wanted.append(real)
    found: list[str] = []
    for path in sorted(set(map(os.path.abspath, wanted)), key=len):
        if not any(_within(path, folder) for folder in (*SYSTEM, *found)):
            found.append(path)
    return found


def _within(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder.rstrip("/") + "/")
