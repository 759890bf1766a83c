"""Files that come with mafrt (profiles, configs, the teaching base), and the folders of bases that have a name."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from mafrt.core.errors import ConfigError, ModelError

_PACKAGE = Path(__file__).resolve().parents[1]

SHIPPED = _PACKAGE if (_PACKAGE / "profiles").is_dir() else _PACKAGE.parent
"""Holds `profiles/` and `configs/`: the installed package, or the checkout."""

TEACHING_BASE = _PACKAGE / "assets" / "teaching_base"
"""Folder of the base model that `--model_name_or_path teaching-base` names."""

SHIPPED_BASES = {"teaching-base": TEACHING_BASE, "games-base": _PACKAGE / "assets" / "games_base"}
"""Name of a base that ships -> its folder."""

FETCHED = ("smollm2",)
"""Names of bases that `mafrt get_base NAME` puts into the user's cache."""


def shipped(path: str) -> Path:
    """`path` if it exists, else the shipped file of that name (`profiles/math_dual.json`)."""
    here = Path(path).expanduser()
    file = SHIPPED / here
    if not here.exists() and here.parts[:1] in (("profiles",), ("configs",)) and file.is_file():
        return file
    return here


def shipped_table(module: str, name: str) -> Any:
    """The content of the YAML file `name` that ships beside a module; `module` is its `__file__`."""
    import yaml

    return yaml.safe_load((Path(module).parent / name).read_text(encoding="utf-8"))


def base_folder(name: str) -> Path | None:
    """Folder of a base that has a name (`games-base`, `smollm2`), there or not; None for a path or hub id."""
    return cached_bases() / name if name in FETCHED else SHIPPED_BASES.get(name)


def require_base(name: str) -> None:
    """Raise ModelError if `name` is that of a base which has to be fetched first. Paths and hub ids pass."""
    folder = base_folder(name)
    if name in FETCHED and folder is not None and not (folder / "config.json").is_file():
        raise ModelError(
            f"the base {name} is not here yet: found no {folder}, expected the folder that `mafrt get_base {name}` "
            "makes; run that command once"
        )


def cached_bases() -> Path:
    """Folder of fetched bases, in the user's cache."""
    return user_cache() / "bases"


def user_cache() -> Path:
    """Folder of all that mafrt keeps for a user: `mafrt` in `XDG_CACHE_HOME`, by default `~/.cache`.

    A relative path is passed over, as the XDG Base Directory Specification asks: libraries are loaded from there, and
    what lies in the current directory may be anyone's.

    Raises:
        ConfigError: neither is there.
    """
    named = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(named):
        return Path(named) / "mafrt"
    try:
        return Path.home() / ".cache" / "mafrt"
    except RuntimeError as error:
        raise ConfigError("this user has no home folder; name a folder for the cache in XDG_CACHE_HOME.") from error
