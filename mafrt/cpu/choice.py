"""The kernels of the CPU that a run computes with: this machine's, unless the run that goes on had torch's."""

from __future__ import annotations

import os
from dataclasses import dataclass

from mafrt.core.errors import ConfigError
from mafrt.core.text import shortened
from mafrt.cpu import library

_TITLES = {"c": "C", "c in decoding": "C in decoding", "torch": "torch"}


@dataclass(frozen=True)
class KernelChoice:
    """The kernels, the reason for the log, and those that the run was recorded with."""

    name: str
    """`c` or `torch`"""
    reason: str
    recorded: str | None = None

    def __str__(self) -> str:
        line = f"Kernels of the CPU: {_TITLES[self.name]} ({self.reason})."
        if self.recorded in (None, self.name):
            return line
        return (
            f"{line}\nThe run was recorded with those of {_TITLES[self.recorded]}: from here on its numbers differ "
            "from an uninterrupted run's in their last bits."
        )


def choose_kernels(recorded: str | None = None, dtype: str | None = None) -> KernelChoice:
    """Choose before anything is computed: the kernels stay the same as long as the process lives.

    Args:
        recorded: those of the run that goes on, so that it stays repeatable; `MAFRT_KERNELS` wins.
        dtype: the number format of that run.

    Raises:
        ConfigError: `MAFRT_KERNELS` names none.
    """
    recorded = recorded if recorded in _TITLES else None
    asked = os.environ.get(library.SWITCH)
    if asked not in (None, "", "c", "torch"):
        raise ConfigError(f"the environment variable {library.SWITCH} is {shortened(asked)!r}; expected c or torch.")
    if recorded == "torch" and not asked and library.use_torch():
        return KernelChoice("torch", "as before", recorded)
    if library.library() is not None:
        if recorded == "c" and dtype == "float32" and not asked and not library.wide():
            os.environ[library.SWITCH] = "c"
        reason = "compiled once by this machine's cc"
        if not library.wide() and os.environ.get(library.SWITCH) != "c":
            reason += "; in float32 learning is torch's, which is faster without AVX-512"
            if dtype == "float32" and recorded == "c in decoding":
                recorded = None  # nothing changes for this run
        return KernelChoice("c", reason, recorded)
    if asked == "torch":
        reason = f"{library.SWITCH}=torch"
    elif not library.tried():
        reason = "those in C are for Linux"
    elif library.find_compiler() is None:
        reason = "no C compiler found; install gcc to be faster"
    else:
        reason = "those in C could not be compiled"
    return KernelChoice("torch", reason, recorded)
