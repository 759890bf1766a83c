"""Where `--demonstrations` of a command go: checked before they are played, never written over another file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mafrt.config.schema import check_number
from mafrt.core.atomic_files import write_atomic
from mafrt.core.errors import ConfigError
from mafrt.core.reading import is_writable
from mafrt.core.text import counted
from mafrt.scripts.cli.command import Settings
from mafrt.storage.run_dir import set_aside


def demonstrations_file(settings: Settings) -> Path:
    """The file that is asked for. Raises ConfigError if it is a folder, or no episodes are asked for."""
    path, episodes = Path(settings["demonstrations"]).expanduser(), settings["demonstration_episodes"]
    check_number("demonstration_episodes", episodes, least=1)
    if path.exists() and not path.is_file():
        kind = "a folder" if path.is_dir() else "a device or a pipe"
        raise ConfigError(f"demonstrations {path} is {kind}; name a file.")
    if (why := is_writable(path.parent)) is not None:
        raise ConfigError(f"demonstrations {path} cannot be written ({why}); name a file elsewhere.")
    return path


def save_demonstrations(path: Path, records: Sequence[dict[str, Any]]) -> None:
    """Write records as JSON lines, rename an earlier file, and print the next command."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if aside := set_aside(path):
        print(f"The earlier file is now {aside}.")
    write_atomic(path, "".join(json.dumps(record) + "\n" for record in records).encode())
    print(f"{counted(len(records), 'records')} in {path}; imitate them with train_sft --records_path {path}")
