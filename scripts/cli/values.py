"""Values of settings, from the text of a command line or from a YAML file."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mafrt.config.schema import Setting
from mafrt.core.errors import ConfigError
from mafrt.core.reading import parse_yaml, read_text
from mafrt.core.text import shortened


def convert(setting: Setting, value: Any, where: str) -> Any:
    """`value` (command-line text, or a YAML value) as the setting's type; `none` for an optional one."""
    if setting.many:
        if value is None or value in ("none", ["none"]):
            return ()
        if isinstance(value, Mapping):  # `env_kwargs: {name: value}` in a YAML file
            value = [f"{key}={item}" for key, item in value.items()]
        items = list(value) if isinstance(value, (list, tuple)) else [value]
        if any(isinstance(item, str) and not item.strip() for item in items):
            raise ConfigError(f"{where} holds an empty text; give a value, or leave it out.")
        parts = [part for item in items for part in (_split(item) if isinstance(item, str) else [item])]
        return tuple(_scalar(setting, part, where) for part in parts)
    if setting.optional and (value is None or (value == "none" and "none" not in (setting.choices or ()))):
        return None
    return _scalar(setting, value, where)


def read_yaml(path: Path) -> dict[str, Any]:
    """A flat mapping of settings from a YAML file; ConfigError in one sentence otherwise."""
    import yaml

    try:
        text = read_text(path)
    except OSError as error:
        raise ConfigError(
            f"--config {path} cannot be read ({error.strerror}); give a YAML file of settings."
        ) from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"--config {path} is not text; give a YAML file of settings.") from error
    try:
        stored = parse_yaml(text)
    except yaml.YAMLError as error:
        # The excerpt with its arrow is of use on lines of its own only.
        problem = re.sub(r"\s+", " ", str(error).replace(' in "<unicode string>",', " at"))
        raise ConfigError(f"--config {path} is not valid YAML: {problem}") from error
    if stored is None:
        return {}
    if not isinstance(stored, dict):
        raise ConfigError(f"--config {path} holds a {type(stored).__name__}; expected lines of `name: value`.")
    return stored


def _split(text: str) -> list[str]:
    """Comma-separated words; `key=value` and JSON are left whole."""
    return [text] if "=" in text or text.lstrip().startswith("{") else [part for part in text.split(",") if part]


def _scalar(setting: Setting, value: Any, where: str) -> Any:
    if setting.kind is bool and isinstance(value, bool):
        return value
    if setting.kind is str and isinstance(value, (str, int, float)) and not isinstance(value, bool):
        if setting.choices and value not in setting.choices:
            raise ConfigError(f"{where} is {shortened(repr(value))}; choose one of {', '.join(setting.choices)}.")
        if not str(value).strip():
            raise ConfigError(f"{where} is empty; give a value, or leave it out.")
        return str(value)
    wanted = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}[setting.kind]
    try:
        if setting.kind in (bool, str) or isinstance(value, (bool, list, dict)) or value is None:
            raise ValueError
        if setting.kind is int and isinstance(value, float):
            raise ValueError
        number = setting.kind(value)
        if not math.isfinite(number):
            raise ValueError
    except (ValueError, TypeError, OverflowError):
        raise ConfigError(f"{where} is {shortened(repr(value))}; expected {wanted}.") from None
    return number
