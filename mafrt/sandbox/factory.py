"""From a name to a sandbox; and one sandbox per name that a whole process shares."""

from __future__ import annotations

import atexit
import os
import sys
import threading

from mafrt.core.errors import ConfigError, SandboxError
from mafrt.sandbox.fusion import FusionSandbox, check_address
from mafrt.sandbox.types import TIERS, Sandbox
from mafrt.sandbox.zygote_sandbox import WarmSandbox

_lock = threading.Lock()
_shared: dict[str, tuple[int, Sandbox]] = {}


def open_sandbox(name: str = "bwrap", workers: int = 2) -> Sandbox:
    """`bwrap`, `fusion:http://host:port` or `degraded`; at most `workers` snippets run at the same time.

    `bwrap-nocgroup` and `degraded-nocgroup` are the same without control groups. `bwrap` and `degraded` fall back to
    them, with a warning, where this process can make no control groups.

    Raises ConfigError for another name, SandboxError where this machine cannot do it.
    """
    check_sandbox(name)
    if workers < 1:
        raise ConfigError(f"found {workers} workers for the sandbox, expected at least 1")
    if name.startswith("fusion:"):
        return FusionSandbox(name.removeprefix("fusion:"), workers)
    if sys.platform != "linux":
        raise SandboxError(
            f"programs of agents run on this machine in sandboxes of Linux only, and this is {sys.platform}; start a "
            "SandboxFusion server in a container and give --sandbox fusion:http://HOST:PORT (docs/sandbox.md), or run "
            "all of mafrt in a Linux container"
        )
    return WarmSandbox(name, workers)


def check_sandbox(name: str) -> None:
    """Raises ConfigError for a name that `open_sandbox` does not know, or a malformed address; opens nothing."""
    if name.startswith("fusion:"):
        check_address(name.removeprefix("fusion:"))
    elif name not in TIERS or name == "fusion":
        raise ConfigError(f"found the sandbox {name!r}, expected bwrap, fusion:http://HOST:PORT or degraded")


def shared_sandbox(name: str = "bwrap") -> Sandbox:
    """The process's one sandbox of this name: opened on first use, closed at exit. A fork opens its own."""
    with _lock:
        owner, sandbox = _shared.get(name, (0, None))
        if sandbox is None or owner != os.getpid():
            if not _shared:
                atexit.register(_close_shared)
            sandbox = open_sandbox(name, workers=max(2, os.cpu_count() or 1))
            _shared[name] = (os.getpid(), sandbox)
        return sandbox


def tiers_in_use() -> str | None:
    """Tiers of the sandboxes that this process shares, with commas between them; None if it has opened none."""
    with _lock:
        return ", ".join(sorted({sandbox.tier for _, sandbox in _shared.values()})) or None


def _close_shared() -> None:
    with _lock:
        for _, sandbox in _shared.values():
            sandbox.close()
        _shared.clear()
