"""Environments without mafrt, in which a test installs it as a reader would."""

from __future__ import annotations

import subprocess
import sysconfig
import venv
from pathlib import Path

import pytest


def fresh_environment(home: Path, *, with_pip: bool = False) -> tuple[Path, Path]:
    """Make a virtual environment. Returns its interpreter and its folder of packages.

    Dependencies are those of the tests' environment; its own mafrt, which leads to the sources, is not seen.
    """
    venv.create(home, with_pip=with_pip, symlinks=True)
    python = home / "bin" / "python"
    ask = [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    packages = Path(subprocess.run(ask, capture_output=True, text=True, check=True).stdout.strip())
    theirs = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), str(Path(pytest.__file__).parents[1])}
    (packages / "dependencies.pth").write_text("\n".join(sorted(theirs)) + "\n")
    return python, packages
