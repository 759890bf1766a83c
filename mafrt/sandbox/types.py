"""Request and result types shared by all sandbox tiers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, runtime_checkable

Status = Literal["ok", "error", "timeout", "memory", "killed"]
"""`error`: an exception, a syntax error or a nonzero exit. `memory`: it wanted more than it was given. `killed`: ended
by a signal, a crash for example, or by the sandbox for a limit that `stderr` names. `timeout`: the deadline passed."""

TIERS = ("bwrap", "bwrap-nocgroup", "fusion", "degraded", "degraded-nocgroup")
"""`-nocgroup`: without control groups, which bound the kernel's memory of a snippet. `fusion` runs elsewhere."""

EVERYTHING = "*"
"""As the only entry of `fetch`: every file that the snippet made or changed."""


@dataclass(frozen=True)
class Execution:
    """One snippet's run. All fields but `tier` and `seconds` are controlled by untrusted code: data, not facts."""

    status: Status
    stdout: str
    """Decoded as UTF-8 with replacement of invalid bytes; long output keeps beginning and end."""
    stderr: str
    exit_code: int | None
    """None after a deadline; minus the signal's number after a signal."""
    files: dict[str, bytes] = field(default_factory=dict)
    """Those of `fetch` that were there."""
    missing: tuple[str, ...] = ()
    """Those of `fetch` that were not, or were refused."""
    refused: dict[str, str] = field(default_factory=dict)
    """Name -> reason, for files that were not returned: a link, a folder, too large, outside the workspace."""
    seconds: float = 0.0
    """From the snippet's first instruction to its end."""
    tier: str = ""


@runtime_checkable
class Sandbox(Protocol):
    """Runs snippets of Python; many threads may call `execute` at once."""

    tier: str

    @property
    def description(self) -> str:
        """The tier and its means, in one line."""
        ...

    def execute(
        self,
        code: str,
        files: Mapping[str, bytes] = {},
        fetch: Sequence[str] = (),
        timeout_s: float = 10.0,
        memory_mib: int = 1024,
    ) -> Execution:
        """Run `code` in an empty folder that holds `files`; give back those of `fetch`.

        Raises SandboxError when it could not be run: that says nothing about the code.
        """
        ...

    def close(self) -> None: ...

    def __enter__(self) -> Sandbox: ...

    def __exit__(self, *error: object) -> None: ...
