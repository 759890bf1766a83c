"""The schema of a settings dataclass: name, type, default, help and choices of every field.

Flags, `--help`, YAML keys and `args.yaml` are generated from it, so a setting is declared once. Standard library only.
"""

from __future__ import annotations

import ast
import difflib
import inspect
import math
import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from functools import cache
from typing import Any, Literal, get_args, get_origin, get_type_hints

from mafrt.core.errors import ConfigError


@dataclass(frozen=True)
class Setting:
    """One field as the command line sees it."""

    name: str
    kind: type
    """bool, int, float or str; of the elements where `many`"""
    default: Any
    help: str
    optional: bool
    many: bool
    choices: tuple[str, ...] | None


@cache
def describe(kind: type) -> dict[str, Setting]:
    """The settings of one section: types and defaults from the fields, help from the text under each field."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(kind))).body[0]
    assert isinstance(tree, ast.ClassDef)
    helps: dict[str, str] = {}
    for before, after in zip(tree.body, tree.body[1:], strict=False):
        if isinstance(before, ast.AnnAssign) and isinstance(before.target, ast.Name) and isinstance(after, ast.Expr):
            helps[before.target.id] = ast.literal_eval(after.value)
    hints = get_type_hints(kind)
    found = {}
    for item in fields(kind):
        hint, optional, many, choices = hints[item.name], False, False, None
        if type(None) in get_args(hint):
            optional = True
            hint = next(arg for arg in get_args(hint) if arg is not type(None))
        if get_origin(hint) is tuple:
            many, hint = True, get_args(hint)[0]
        if get_origin(hint) is Literal:
            choices, hint = get_args(hint), str
        found[item.name] = Setting(item.name, hint, item.default, helps[item.name], optional, many, choices)
    return found


def unknown(what: str, name: str, known: Iterable[str] | Mapping[str, Any]) -> str:
    """The sentence for an unknown name, with the nearest known one."""
    names = sorted(known)
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(names)}."
    return f"There is no {what} {name!r}; {hint}"


def at_least(config: Any, least: float, *names: str) -> None:
    """Raise ConfigError unless each named field of `config` is a finite number of at least `least`."""
    for name in names:
        value = getattr(config, name)
        if not (isinstance(value, (int, float)) and math.isfinite(value) and value >= least):
            raise ConfigError(f"{name} is {value!r}; choose a value of at least {least}.")


def check_choices(config: Any) -> None:
    """Raise ConfigError unless every Literal field of `config` has one of its values."""
    kind: type = type(config)
    for name, setting in describe(kind).items():
        value = getattr(config, name)
        if setting.choices and value not in setting.choices and not (setting.optional and value is None):
            raise ConfigError(f"{name} is {value!r}; choose one of {', '.join(setting.choices)}.")
