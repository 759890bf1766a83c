"""Files that come with mafrt: profiles, configs and the teaching base."""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parents[1]

SHIPPED = _PACKAGE if (_PACKAGE / "profiles").is_dir() else _PACKAGE.parent
"""Holds `profiles/` and `configs/`: the installed package, or the checkout."""

TEACHING_BASE = _PACKAGE / "assets" / "teaching_base"
"""Folder of the base model that `--model_name_or_path teaching-base` names."""


def shipped(path: str) -> Path:
    """`path` if it exists, else the shipped file of that name (`profiles/math_dual.json`)."""
    here = Path(path).expanduser()
    own = SHIPPED / here
    if not here.exists() and here.parts[:1] in (("profiles",), ("configs",)) and own.is_file():
        return own
    return here
