"""`args.yaml`: the settings of a run, written and read."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mafrt.config import permission
from mafrt.core import atomic_files
from mafrt.core.errors import ConfigError
from mafrt.core.reading import parse_yaml, read_text

ARGS = "args.yaml"
_SECRET = re.compile(r"(api_?key|secret|password|_token)$", re.IGNORECASE)


def write_args(path: Path, args: Mapping[str, Any]) -> None:
    """Write settings as YAML, atomically. Raises ConfigError for a value that looks like a secret."""
    import yaml

    for name, value in args.items():
        # Refused and not masked, since a masked file could not repeat the run.
        if value and isinstance(value, str) and _SECRET.search(name):
            raise ConfigError(
                f"setting {name!r} looks like a secret, and {path} is no place for one; use the environment"
            )
    data = yaml.safe_dump(plain(args), sort_keys=False, allow_unicode=True)
    atomic_files.write_atomic(path, data.encode())


def read_args(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read settings that `write_args` wrote. Raises ConfigError."""
    import yaml

    permission.reading(Path(path).parent)
    try:
        args = parse_yaml(read_text(path))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path} cannot be read as settings: {' '.join(str(error).split())}") from error
    if args is not None and not isinstance(args, dict):
        raise ConfigError(f"{path} holds a {type(args).__name__}; expected `name: value` lines")
    if args is None:  # no settings at all are written as {}: these were lost, and the defaults would be another run
        raise ConfigError(f"{path} is empty; take the run from a copy")
    return args


def plain(value: Any) -> Any:
    """Only types that `yaml.safe_dump` knows: tuples as lists, paths as text. Infinity stays, it may be a setting."""
    if isinstance(value, Mapping):
        return {str(key): plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(entry) for entry in value]
    return value if value is None or isinstance(value, (str, bool, int, float)) else str(value)
