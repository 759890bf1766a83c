"""The command line of the tier without namespaces, and what is said aloud when somebody chooses it."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path

from mafrt.core.errors import SandboxError
from mafrt.sandbox.inside import landlock
from mafrt.sandbox.zygote_process import ENVIRONMENT, Options, interpreter

log = logging.getLogger(__name__)


def command(control: int, tell: int, options: Options) -> tuple[list[str], dict[str, str]]:
    """Arguments and environment of a zygote on this machine itself."""
    inside = str(Path(landlock.__file__).parent)
    return [os.path.abspath(sys.executable), *interpreter("degraded", control, inside, options)], {
        **ENVIRONMENT,
        "HOME": "/",
    }


def announce() -> None:
    """Say what is missing; raises SandboxError where the kernel cannot even do this much."""
    if not landlock.version():
        raise SandboxError(
            "found a kernel without Landlock, which the sandbox tier 'degraded' stands on (Linux 5.13 or newer, with "
            "landlock among its security modules); use the tier bwrap or fusion"
        )
    log.error(
        "sandbox tier 'degraded': model-written code runs on this machine with resource limits, Landlock and seccomp "
        "only. It shares processes, network stack and disk with everything else here; use it for code you would run."
    )
