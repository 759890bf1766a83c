"""The command line of bubblewrap: an empty root with Python and the system's libraries in it, read-only."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from mafrt.core.errors import SandboxError
from mafrt.sandbox.image import executable, image, within
from mafrt.sandbox.inside import confine
from mafrt.sandbox.zygote_process import ENVIRONMENT, Options, interpreter

INSIDE = "/inside"
"""Where the folder of that name stands, in there."""
PACKAGES = "/packages"
"""Where the declared packages stand, in there."""
SETTINGS = ("/etc/ld.so.cache", "/etc/alternatives", "/etc/localtime")
DEVICES = ("null", "zero", "full", "random", "urandom")


def command(control: int, tell: int, options: Options) -> tuple[list[str], dict[str, str]]:
    """Arguments and environment; raises SandboxError where bubblewrap is not installed."""
    program = shutil.which("bwrap")
    if program is None:
        raise SandboxError(
            "found no bubblewrap, without which code that a model wrote is not run; "
            "install it with: apt-get install -y bubblewrap"
        )
    # Noticed here, since inside it would show as an interpreter that finds no module, without a word about the reason.
    if hidden := [folder for folder in image().folders if within(folder, "/tmp")]:
        raise SandboxError(
            f"found Python itself in {hidden[0]}, but a snippet has a /tmp of its own, so that it could not import "
            "anything; use an interpreter that is installed elsewhere (a virtual environment may lie in /tmp)"
        )
    arguments = [program, *_namespaces(), *root(), "--info-fd", str(tell)]
    arguments += ["--chdir", "/", "--remount-ro", "/dev", "--remount-ro", "/", "--", executable()]
    environment = {**ENVIRONMENT, "HOME": confine.WORKDIR, "TMPDIR": "/tmp", "PYTHONPATH": PACKAGES}
    return [*arguments, *interpreter("bwrap", control, INSIDE, options)], environment


def _namespaces() -> Iterator[str]:
    yield from ("--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try")
    # A session of its own cuts the terminal off, into which a program could otherwise type.
    yield from ("--as-pid-1", "--new-session", "--hostname", "sandbox")
    if os.getuid() != 0:
        yield "--unshare-user"
        return
    # Root's own user namespace is needed to become another user; the zygote does that first of all.
    for capability in ("CAP_SETUID", "CAP_SETGID", "CAP_SYS_ADMIN"):
        yield from ("--cap-add", capability)


def root() -> Iterator[str]:
    """Options for all that is to be seen in there; for the benchmark too."""
    shown = image()
    for folder in shown.folders:
        # On most systems /bin and /lib are links into /usr; bound as folders they would be shown twice.
        if os.path.islink(folder) and folder.count("/") == 1:
            yield from ("--symlink", os.readlink(folder), folder)
            continue
        # Bubblewrap makes missing parents by itself, but for root only.
        for parent in reversed(Path(folder).parents[:-1]):
            yield from ("--dir", str(parent))
        yield from ("--ro-bind", folder, folder)
    empty = list(shown.masked)
    yield from ("--dir", PACKAGES)
    for name, path in shown.packages:
        yield from ("--ro-bind", path, f"{PACKAGES}/{name}")
    for name in shown.hidden:
        source = os.path.join(os.path.dirname(dict(shown.packages)[name.split("/")[0]]), name)
        if os.path.isdir(source):
            empty.append(f"{PACKAGES}/{name}")
        else:
            # An empty file in its place, since a single file cannot be left out of a bound folder.
            yield from ("--ro-bind", "/dev/null", f"{PACKAGES}/{name}")
    for folder in empty:
        yield from ("--tmpfs", folder, "--remount-ro", folder)
    for path in SETTINGS:
        yield from ("--ro-bind-try", path, path)
    yield from ("--ro-bind", str(Path(confine.__file__).parent), INSIDE)
    # Devices are listed one by one, because bubblewrap's own --dev brings a terminal along.
    yield from ("--tmpfs", "/dev")
    for name in DEVICES:
        yield from ("--dev-bind", f"/dev/{name}", f"/dev/{name}")
    for name, target in (("fd", "/proc/self/fd"), ("shm", "/tmp"), ("stdout", "fd/1"), ("stderr", "fd/2")):
        yield from ("--symlink", target, f"/dev/{name}")
    yield from ("--proc", "/proc", "--dir", confine.WORKDIR, "--dir", "/tmp")
