"""Writes constraints.txt: every package that requirements.txt needs, itself or through another one, as installed here.

    bash scripts/install.sh && .venv/bin/python .ci/constraints.py

Packages that are installed for other reasons are left out, and so is the build of torch (`+cpu`).
"""

from __future__ import annotations

import re
import sys
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
TARGET = ROOT / "constraints.txt"
HEAD = """\
# Every package at the version that mafrt is tested with, those that come along included: pip install -c constraints.txt
# Made by .ci/constraints.py on Linux with Python 3.11; change requirements.txt and run it again.
"""


def pins(text: str) -> dict[str, str]:
    """Name -> version of the `name==version` lines of a file; other lines, but for comments, are an error."""
    found = {}
    for line in text.splitlines():
        if line.strip() and not line.startswith("#"):
            match = re.fullmatch(r"([\w.-]+)==([\w.!+-]+)", line.strip())
            if match is None:
                raise SystemExit(f"error: {line!r} is no pin; expected name==version.")
            found[canonicalize_name(match[1])] = match[2]
    return found


INSTALLERS = {"pip", "setuptools", "wheel"}
"""Tools that install; whoever installs has a version of their own."""


def closure(names: list[str]) -> dict[str, str]:
    """Name -> installed version, of the packages and all that they need here."""
    found: dict[str, str] = {}
    seen: set[tuple[str, str]] = set()
    queue = [(name, "") for name in names]
    while queue:
        name, extra = queue.pop()
        if (name, extra) in seen or name in INSTALLERS:
            continue
        seen.add((name, extra))
        try:
            package = distribution(name)
        except PackageNotFoundError:
            raise SystemExit(f"error: {name} is not installed; run scripts/install.sh first.") from None
        found[name] = package.version.partition("+")[0]
        for line in package.requires or []:
            needed = Requirement(line)
            if needed.marker is None or needed.marker.evaluate({"extra": extra}):
                queue += [(canonicalize_name(needed.name), one) for one in ("", *needed.extras)]
    return found


def main() -> int:
    wanted = pins((ROOT / "requirements.txt").read_text(encoding="utf-8"))
    found = closure(list(wanted))
    if other := [
        f"{name} is {found[name]}, not {version}" for name, version in wanted.items() if found[name] != version
    ]:
        raise SystemExit(f"error: not what requirements.txt pins: {'; '.join(other)}. Run scripts/install.sh first.")
    TARGET.write_text(HEAD + "".join(f"{name}=={found[name]}\n" for name in sorted(found)), encoding="utf-8")
    print(f"{TARGET.name}: {len(found)} packages")
    return 0


if __name__ == "__main__":
    sys.exit(main())
