"""The optional packages, as the installed distribution declares them, and the command that installs them."""

from __future__ import annotations

import importlib.util
import re
import shlex
from importlib import metadata
from typing import Any

from mafrt.core.errors import MissingExtraError

_PART = re.compile(r"""^(?P<requirement>[^;]+?)\s*;.*\bextra\s*==\s*["'](?P<extra>[^"']+)["']""")
_NAME = re.compile(r"[A-Za-z0-9._-]+")


def extras() -> dict[str, tuple[str, ...]]:
    """Extra -> its requirements, such as `httpx>=0.27`; empty where mafrt is not installed."""
    try:
        declared = metadata.requires("mafrt") or []
    except metadata.PackageNotFoundError:
        return {}
    found: dict[str, tuple[str, ...]] = {}
    for part in filter(None, map(_PART.match, declared)):
        found[part["extra"]] = (*found.get(part["extra"], ()), part["requirement"])
    return found


def package_name(requirement: str) -> str:
    """`httpx` of `httpx>=0.27`."""
    name = _NAME.match(requirement)
    return name[0] if name else requirement


def install(extra: str) -> str:
    """The command that installs the packages of an extra, by their own names: mafrt itself is on no package index.

    With an extra that the installed distribution does not declare, the command names it for a checkout.
    """
    wanted = extras().get(extra)
    return shlex.join(["pip", "install", *(wanted or ("-e", f".[{extra}]"))])


def package(what: str, extra: str, *modules: str) -> Any:
    """The first of the modules that `what` needs. MissingExtraError says how to install the extra that has them."""
    try:
        first, *_ = map(importlib.import_module, modules)
        return first
    except ImportError as error:
        raise MissingExtraError(f"{what} needs a package: {install(extra)} ({error})") from error


def check_package(what: str, extra: str, module: str) -> None:
    """MissingExtraError as of `package`, without importing what is there."""
    if importlib.util.find_spec(module) is None:
        raise MissingExtraError(f"{what} needs {module}: {install(extra)}")
