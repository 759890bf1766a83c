"""The Python tool that environments hand to agents: a program in, its output or its failure out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias, TypedDict

from mafrt.core.errors import EnvError
from mafrt.environment.tool_calls import shorten
from mafrt.sandbox import SandboxError, Workspace, shared_sandbox

if TYPE_CHECKING:
    from mafrt.sandbox import Execution, Sandbox

Ran: TypeAlias = "Execution"
"""How a program went."""


class SandboxOptions(TypedDict, total=False):
    """Keyword arguments of environments that run programs: where, and with which limits. All may be left out."""

    sandbox: str
    """`bwrap`, `fusion:URL` or `degraded`"""
    timeout_s: float
    """seconds that a program may take"""
    memory_mib: int
    """MiB of memory that it may take"""


@dataclass(frozen=True)
class PythonTool:
    """Runs programs in a sandbox that all environments of the process share.

    Raises SandboxError when it is made, if there is no such sandbox here. One that fails later loses the episode, and
    is never taken for a program that failed: `run` raises EnvError then.
    """

    sandbox: str = "bwrap"
    """`bwrap`, `fusion:URL` or `degraded`"""
    timeout_s: float = 10.0
    memory_mib: int = 1024
    shown: int = 2000
    """Characters of the output that the chat gets."""

    def __post_init__(self) -> None:
        self._opened()

    def _opened(self) -> Sandbox:
        return shared_sandbox(self.sandbox)

    def run(self, code: str, files: Mapping[str, bytes] | None = None, fetch: Sequence[str] = ()) -> Execution:
        """Run a program. Raises EnvError if the sandbox, not the program, failed."""
        try:
            return self._opened().execute(
                code, files or {}, fetch, timeout_s=self.timeout_s, memory_mib=self.memory_mib
            )
        except SandboxError as error:
            raise EnvError(f"the sandbox failed, so nothing is known about a program: {error}") from error

    def run_in_workspace(
        self, code: str, files: Mapping[str, bytes], quota_mib: int, max_files: int
    ) -> tuple[Execution, dict[str, bytes]]:
        """Run a program with files, and the files as it leaves them. Raises EnvError if the sandbox failed."""
        place = Workspace(self._opened(), quota_mib, max_files)
        place.files.update(files)
        try:
            ran = place.run(code, timeout_s=self.timeout_s, memory_mib=self.memory_mib)
        except SandboxError as error:
            raise EnvError(f"the sandbox failed, so nothing is known about a program: {error}") from error
        return ran, place.files

    def says(self, ran: Execution) -> str:
        """The text for the agent; empty if the program printed nothing."""
        parts = [ran.stdout.rstrip()]
        if ran.status == "error":
            parts.append(ran.stderr.rstrip() or f"The program ended with exit code {ran.exit_code}.")
        elif ran.status != "ok":
            parts.append(
                {
                    "timeout": f"The program was stopped after {self.timeout_s:g} s.",
                    "memory": f"The program needed more than {self.memory_mib} MiB of memory.",
                    "killed": "The program was killed.",
                }[ran.status]
            )
        return shorten("\n".join(part for part in parts if part), self.shown)
