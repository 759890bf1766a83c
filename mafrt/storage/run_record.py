"""Inputs of a run: `run.json`, written beside `args.yaml` when the run starts.

`args.yaml` holds the settings; this file identifies the things they refer to: the environment (path, arguments,
hash of its source), the whole team, data and rubric files (absolute path, hash), the base (hashes of its
configuration and of its weights' headers), the sandbox and the machine's choices. A run is resumed and evaluated from
these two files alone, and every later change is reported by name.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from mafrt import __version__
from mafrt.config import permission
from mafrt.config.team import Team
from mafrt.core.atomic_files import load_json, save_json
from mafrt.core.errors import CheckpointError, ConfigError
from mafrt.core.text import shortened

RECORD = "run.json"
FORMAT = 1
_REMOTE = "mafrt.environment.remote."
"""Where environments on servers come from; they compare the environment itself when they connect."""


@dataclass(frozen=True)
class FileRecord:
    """A file or folder that a setting names."""

    path: str
    """absolute"""
    sha256: str


@dataclass(frozen=True)
class EnvironmentRecord:
    """An environment, as far as it can be built again."""

    path: str
    """registered name, or `package.module:Class`"""
    arguments: dict[str, Any] | None
    """keyword arguments of its constructor; None: they have no JSON form, so only the run's own command can build it"""
    file: str | None = None
    """absolute path of the source file; None for an environment that ships with mafrt"""
    sha256: str | None = None
    """of the source file"""


@dataclass(frozen=True)
class BaseRecord:
    """The frozen base."""

    name: str
    """as `--model_name_or_path` named it"""
    fingerprint: str
    """of shapes and the first rows of the embedding (`SharedBase.fingerprint`)"""
    config_sha256: str | None = None
    """of config.json; None for a base that is not a local folder"""
    header_sha256: str | None = None
    """of the names, shapes and types in the headers of all safetensors files"""
    path: str | None = None
    """absolute path of a local folder"""


@dataclass(frozen=True)
class RunRecord:
    """Everything that a run depends on besides its settings."""

    team: list[dict[str, Any]]
    """content of a team file"""
    command: str | None = None
    """script that started it, such as `train_math`; None: it was started from Python"""
    environment: EnvironmentRecord | None = None
    """None: the run learns from records"""
    eval_environment: EnvironmentRecord | None = None
    """None: evaluations play `environment`"""
    files: dict[str, FileRecord] = field(default_factory=dict)
    """setting -> the file or folder that it names"""
    base: BaseRecord | None = None
    bases: dict[str, BaseRecord] = field(default_factory=dict)
    """`model` of the team file -> that base, of the agents that do not sit on `base`"""
    sandbox: str | None = None
    """where programs of agents run; None: the environment runs none"""
    machine: dict[str, Any] = field(default_factory=dict)
    """number format, device, threads and kernels that were chosen"""

    def save(self, run_dir: Path) -> None:
        """Write `run.json`, atomically. Raises CheckpointError if the disk refuses."""
        save_json(run_dir / RECORD, {"format": FORMAT, "mafrt": __version__, **asdict(self)})

    def agents(self) -> Team:
        """The team. Raises ConfigError if the record was edited by hand and is none."""
        # A record holds what each agent is; the key names a function that makes one.
        if any(isinstance(entry, Mapping) and "agent" in entry for entry in self.team):
            raise ConfigError(
                f"the team in {RECORD} has the key 'agent', which no record has; take the run's own record"
            )
        try:
            return Team.parse(self.team)
        except ConfigError as error:
            raise ConfigError(f"the team in {RECORD}: {error}") from error


def load_record(run_dir: Path) -> RunRecord:
    """Read `run.json`.

    Raises:
        CheckpointError: it is missing (a run of an earlier version of mafrt), or damaged.
    """
    path = run_dir / RECORD
    permission.reading(run_dir)
    if not path.is_file():
        raise CheckpointError(
            f"{run_dir} has no {RECORD}, so it was written by an earlier version of mafrt, which this one cannot go on "
            "with; copy the adapter folders of its newest checkpoint into a folder and give that to --load_path."
        )
    remedy = "take it from a copy of the run, or give --load_path the run's folder best or one of adapter folders"
    try:
        stored = load_json(path)
    except CheckpointError as error:
        raise CheckpointError(f"{error}; {remedy}.") from error
    try:
        if stored["format"] != FORMAT:
            raise CheckpointError(f"{path} has format {stored['format']}; this version of mafrt reads format {FORMAT}.")
        stored.setdefault("bases", {})  # runs of one base have none
        values = {item.name: stored[item.name] for item in fields(RunRecord)}
        values["bases"] = {name: BaseRecord(**entry) for name, entry in values["bases"].items()}
        for name, kind in (
            ("environment", EnvironmentRecord),
            ("eval_environment", EnvironmentRecord),
            ("base", BaseRecord),
        ):
            values[name] = None if values[name] is None else kind(**values[name])
        values["files"] = {name: FileRecord(**entry) for name, entry in values["files"].items()}
        record = RunRecord(**values)
        parts = [record, record.environment, record.eval_environment, record.base, *record.bases.values()]
        for part in [*parts, *record.files.values()]:
            if part is not None:
                _check_kinds(part)
        return record
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} is damaged ({type(error).__name__}: {error}); {remedy}.") from error


_KINDS: dict[str, tuple[type, ...]] = {
    "str": (str,),
    "str | None": (str, type(None)),
    "dict[str, Any]": (dict,),
    "dict[str, Any] | None": (dict, type(None)),
    "list[dict[str, Any]]": (list,),
}
"""Annotation of a field -> the classes of its values, where JSON has them as they are."""


def _check_kinds(part: Any) -> None:
    """Raise TypeError for a field of another kind than it is declared with."""
    for item in fields(part):
        value = getattr(part, item.name)
        listed = value if isinstance(value, list) else []
        known = isinstance(value, _KINDS.get(str(item.type), (object,)))
        if not known or not all(isinstance(entry, dict) for entry in listed):
            raise TypeError(f"{item.name} is {shortened(repr(value))}")


def changes(then: RunRecord, now: RunRecord) -> list[str]:
    """Names of everything that differs and that results depend on; values known on one side only do not count."""
    differences = []
    for name in ("environment", "eval_environment"):
        old, new = getattr(then, name), getattr(now, name)
        if old is None or new is None:
            continue
        if old.path != new.path:
            differences.append(f"the {name.replace('_', ' ')} ({old.path}, now {new.path})")
        elif old.sha256 and new.sha256 and old.sha256 != new.sha256:
            source = f"the source of the environment ({new.file})"
            if source not in differences:
                differences.append(source)
        elif old.arguments is not None and new.arguments is not None and old.arguments != new.arguments:
            keys = sorted(
                key for key in {*old.arguments, *new.arguments} if old.arguments.get(key) != new.arguments.get(key)
            )
            if old.path.startswith(_REMOTE) and keys == ["address"]:
                continue  # servers may be exchanged
            differences.append(f"arguments of the {name.replace('_', ' ')} ({', '.join(keys)})")
    differences += _team_changes(then.team, now.team)
    for name in sorted(then.files.keys() & now.files.keys()):
        if then.files[name].sha256 != now.files[name].sha256:
            differences.append(f"the content of {name} ({now.files[name].path})")
    pairs = [(then.base, now.base), *((then.bases[name], now.bases[name]) for name in then.bases if name in now.bases)]
    for before, after in pairs:
        if before is None or after is None:
            continue
        for name in ("config_sha256", "header_sha256"):
            old, new = getattr(before, name), getattr(after, name)
            if old and new and old != new:
                differences.append(f"the base model ({before.name}, now {after.name})")
                break
    return differences


def _team_changes(then: list[dict[str, Any]], now: list[dict[str, Any]]) -> list[str]:
    old, new = ({agent.get("role"): agent for agent in team} for team in (then, now))
    if list(old) != list(new):
        return [f"the team ({', '.join(map(str, old))}, now {', '.join(map(str, new))})"]
    return [
        f"{', '.join(sorted(keys))} of agent {role}"
        for role in old
        if (keys := {key for key in {*old[role], *new[role]} if old[role].get(key) != new[role].get(key)})
    ]


# ------------------------------------------------------------------------------------------------------------ hashes


def file_record(path: str | Path) -> FileRecord | None:
    """Absolute path and hash of a file, or of a folder by the names and sizes of its files; None: there is nothing."""
    path = Path(path).expanduser()
    if path.is_file():
        with open(path, "rb") as file:
            return FileRecord(str(path.resolve()), hashlib.file_digest(file, "sha256").hexdigest())
    if path.is_dir():
        listing = sorted(
            (str(entry.relative_to(path)), entry.stat().st_size) for entry in path.rglob("*") if entry.is_file()
        )
        return FileRecord(str(path.resolve()), hashlib.sha256(json.dumps(listing).encode()).hexdigest())
    return None


def base_hashes(folder: Path) -> tuple[str | None, str | None]:
    """Hashes of a base's config.json and of the headers of its safetensors files; None where missing."""
    config = folder / "config.json"
    config_hash = hashlib.sha256(config.read_bytes()).hexdigest() if config.is_file() else None
    headers = hashlib.sha256()
    weights = sorted(path for path in folder.glob("*.safetensors") if path.is_file())
    for path in weights:
        with open(path, "rb") as file:
            # The format: eight bytes with the length of the header, little-endian, then the header as JSON.
            length = int.from_bytes(file.read(8), "little")
            headers.update(file.read(min(length, 1 << 27)))
    return config_hash, headers.hexdigest() if weights else None


def as_json(arguments: Mapping[str, Any]) -> dict[str, Any] | None:
    """`arguments` as JSON would give them back, or None if they have no exact JSON form."""
    try:
        copy = json.loads(json.dumps(dict(arguments), allow_nan=False))
    except (TypeError, ValueError):
        return None
    return copy if _listed(dict(arguments)) == copy else None


def _listed(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _listed(entry) for key, entry in value.items()}
    return [_listed(entry) for entry in value] if isinstance(value, (list, tuple)) else value
