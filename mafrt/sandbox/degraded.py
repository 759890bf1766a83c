"""The command line of the tier without namespaces, and the warning that its users get."""

from __future__ import annotations

import atexit
import json
import logging
import os
import shutil
import tempfile
from pathlib import Path

from mafrt.core.errors import SandboxError
from mafrt.sandbox.image import executable, image
from mafrt.sandbox.inside import confine, landlock
from mafrt.sandbox.zygote_process import ENVIRONMENT, Options, interpreter

log = logging.getLogger(__name__)


def command(control: int, tell: int, options: Options) -> tuple[list[str], dict[str, str]]:
    """Arguments and environment of a zygote on this machine itself."""
    inside = str(Path(landlock.__file__).parent)
    packages = _packages()
    read, listed = image().readable()
    environment = {
        **ENVIRONMENT,
        "HOME": "/",
        "PYTHONPATH": packages,
        confine.READABLE: json.dumps([read, [packages, *listed]]),
    }
    return [executable(), *interpreter("degraded", control, inside, options)], environment


def _packages() -> str:
    """A folder of links to the declared packages, so that no other is found.

    The zygote removes it when it ends, also after this process was killed.
    """
    folder = tempfile.mkdtemp(prefix="mafrt-packages-")
    os.chmod(folder, 0o755)
    for name, path in image().packages:
        os.symlink(path, os.path.join(folder, name))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def announce() -> None:
    """List the missing guarantees; raises SandboxError if the kernel lacks even the minimum."""
    if not landlock.version():
        raise SandboxError(
            "found a kernel without Landlock, which the sandbox tier 'degraded' stands on (Linux 5.13 or newer, with "
            "landlock among its security modules); use the tier bwrap or fusion"
        )
    log.error(
        "sandbox tier 'degraded': model-written code runs on this machine with resource limits, Landlock and seccomp "
        "only. It shares processes, network stack and disk with everything else here; use it for code you would run."
    )
