"""Checks that the settings of every rule share, and the nearest name for one that is not known."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable
from typing import Any

from mafrt.core.errors import ConfigError


def unknown(kind: str, name: object, known: Iterable[str]) -> ConfigError:
    """The error for a name that does not exist: what was found, the nearest one, and all there are."""
    names = sorted(known)
    near = difflib.get_close_matches(str(name), names, n=1, cutoff=0.4)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return ConfigError(
        f"unknown {kind} {name!r}{hint} Known: {', '.join(names)}."
        if near
        else f"unknown {kind} {name!r}. Known: {', '.join(names)}."
    )


def choice(setting: str, value: object, known: Iterable[str]) -> None:
    """Raise `ConfigError` unless `value` is one of `known`."""
    if value not in tuple(known):
        raise unknown(f"value for {setting}", value, known)


def number(setting: str, value: Any, low: float = -math.inf, high: float = math.inf) -> None:
    """Raise `ConfigError` unless `value` is a finite number in [low, high]."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ConfigError(f"{setting} is {value!r}; expected a finite number.")
    if not low <= value <= high:
        raise ConfigError(f"{setting} is {value}; expected a number from {low} to {high}.")


def flag(setting: str, value: object) -> None:
    """Raise `ConfigError` unless `value` is True or False."""
    if not isinstance(value, bool):
        raise ConfigError(f"{setting} is {value!r}; expected true or false.")
