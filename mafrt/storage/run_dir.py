"""The directory of a run: settings, metrics, episodes, and checkpoints.

Iterations count from 1; 0 is before training (the first evaluation). Checkpoint `step_N` holds the state
after iteration N, and the lines of iteration N are on disk before it is written, so resuming from it keeps lines up
to N and drops the rest. (Only the evaluation after iteration N comes later than its checkpoint; it is dropped and
repeated.) Wall-clock values live in `timings.jsonl` only, which lets a resumed run have the
same `metrics.jsonl` and `episodes.jsonl`, byte for byte, as one that was never interrupted.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from mafrt.core import atomic_files
from mafrt.core.errors import CheckpointError, ConfigError
from mafrt.core.reading import parse_yaml, read_text
from mafrt.core.types import Episode, Evidence, Scored
from mafrt.storage import checkpoint, transcript_files
from mafrt.storage.run_record import RunRecord

if TYPE_CHECKING:
    from mafrt.storage.load_path import Loadable

log = logging.getLogger(__name__)

ARGS = "args.yaml"
LINE_FILES = ("metrics", "evaluations", "episodes", "timings")

_ITERATION = re.compile(rb'\{"iteration": (\d+)[,}]')
_NOT_SETTINGS = frozenset({"load_path", "config"})
_SECRET = re.compile(r"(api_?key|secret|password|_token)$", re.IGNORECASE)
# Legal inside JSON strings, but `str.splitlines` of a reader would cut the line there.
_LINE_BREAKS = {0x85: "\\u0085", 0x2028: "\\u2028", 0x2029: "\\u2029"}


class RunDir:
    """An open run directory, locked against a second process. Make one with `RunDir.open`; `close` it, or use `with`.

    `metrics`, `evaluations`, `episodes` and `timings` are `JsonLines`; `checkpoints`, `tensorboard` and
    `transcripts` are paths.
    """

    def __init__(self, path: Path, *, step: int | None = None) -> None:
        self.path = path
        self.step = step
        """The checkpoint that the run goes on from, None if it starts from the beginning."""
        self.checkpoints = path / "checkpoints"
        self.tensorboard = path / "tensorboard"
        self.transcripts = path / transcript_files.FOLDER
        if str(path.resolve()) in _LOCKED:
            raise ConfigError(f"this process is already writing to {path}; close that run first")
        self._lock = _lock(path)
        self._held = str(path.resolve())
        _LOCKED.add(self._held)
        self.metrics, self.evaluations, self.episodes, self.timings = (
            JsonLines(path / f"{name}.jsonl") for name in LINE_FILES
        )

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        args: Mapping[str, Any],
        loaded: Loadable | None = None,
        record: RunRecord | None = None,
    ) -> RunDir:
        """Start a run in `path`, or go on with one.

        `loaded` is the resolved `--load_path`. If it belongs to the run in `path`, that run goes on: lines and
        checkpoints beyond its step are dropped and set aside. If it belongs to another run, `path` has to be empty,
        and the history up to its step is copied. `record` goes to `run.json`. Raises ConfigError if `path` holds
        anything that would be mixed up with the new run's files, or if another process is writing there.
        """
        path = Path(path).expanduser()
        step = loaded.checkpoint.step if loaded and loaded.checkpoint else None
        here = loaded is not None and _same(loaded.run, path)
        if not here and path.exists() and (not path.is_dir() or not _is_unused(path)):
            raise ConfigError(
                f"{path} {'already holds a run' if path.is_dir() else 'is a file'}; give another --run_dir, or go on "
                f"with it: --config {path / ARGS} --load_path {path}"
            )
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"{path} cannot be made ({error.strerror}); give another --run_dir") from error
        run = cls(path, step=step)
        try:
            if record is not None:
                record.save(path)  # before args.yaml: settings without a record mean a run of an earlier version
            if here:
                run._go_on(args)
            else:
                run._begin(args, loaded)
        except BaseException:
            run.close()
            raise
        return run

    def _begin(self, args: Mapping[str, Any], loaded: Loadable | None) -> None:
        if loaded is not None:
            # First of all, so that a run that is killed before its first checkpoint starts from there again.
            atomic_files.save_json(self.path / checkpoint.ORIGIN, {"load_path": str(loaded.path.resolve())})
            if loaded.checkpoint is not None and loaded.run is not None:
                self._copy_history(loaded.run)
        write_args(self.path / ARGS, args)
        self.checkpoints.mkdir()

    def _go_on(self, args: Mapping[str, Any]) -> None:
        step = -1 if self.step is None else self.step
        self.checkpoints.mkdir(exist_ok=True)
        # Before lines are dropped: a kill in between must not leave checkpoints without their lines.
        for path in checkpoint.set_aside_after(self.checkpoints, step):
            log.warning("going on from step %d; a later checkpoint is now %s", step, path)
        for name in LINE_FILES:
            keep_until(self.path / f"{name}.jsonl", _last_line(name, step))
        transcript_files.drop_after(self.path, step)
        before = read_args(self.path / ARGS) if (self.path / ARGS).is_file() else {}
        args = _plain({**args, **{name: before[name] for name in _NOT_SETTINGS if name in before}})
        changed = sorted(name for name in {*before, *args} if before.get(name) != args.get(name))
        if changed:
            kept = f"args.until_{max(step, 0):06d}.yaml"
            if before:
                log.warning("settings changed (the old ones are in %s): %s", kept, ", ".join(changed))
                write_args(self.path / kept, before)
            write_args(self.path / ARGS, args)

    def _copy_history(self, source: Path) -> None:
        step = -1 if self.step is None else self.step
        for name in LINE_FILES:
            if (source / f"{name}.jsonl").is_file():
                with open(self.path / f"{name}.jsonl", "wb") as file:
                    file.writelines(
                        line for line, keep in _lines(source / f"{name}.jsonl", _last_line(name, step)) if keep
                    )
        transcript_files.copy_until(source, self.path, step)

    def close(self) -> None:
        for lines in (self.metrics, self.evaluations, self.episodes, self.timings):
            lines.close()
        if self._lock is not None:
            self._lock.close()
            self._lock = None
        _LOCKED.discard(self._held)

    def __enter__(self) -> RunDir:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class JsonLines:
    """A file of JSON lines that is only ever appended to, durably, and never left with half a line by an error."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: IO[bytes] | None = None

    def append(self, iteration: int, records: Iterable[Mapping[str, Any]]) -> None:
        """Write the records of one iteration, each as `{"iteration": N, ...}`, and wait until they are on disk.

        Values that are not finite become null. Raises CheckpointError if the disk refuses; nothing is written then.
        """
        data = b"".join(encode_line({"iteration": iteration, **record}) for record in records)
        if self._file is None:
            self._file = open(self.path, "ab", buffering=0)  # noqa: SIM115 (kept open for the whole run)
            atomic_files.fsync(self.path.parent)
        end = os.fstat(self._file.fileno()).st_size
        try:
            view = memoryview(data)
            while view:
                view = view[self._file.write(view) :]
            os.fsync(self._file.fileno())
        except OSError as error:
            os.ftruncate(self._file.fileno(), end)
            raise CheckpointError(
                f"cannot append to {self.path}: {error}; free some space, then go on with --load_path"
            ) from error

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def encode_line(record: Mapping[str, Any]) -> bytes:
    """One JSON line, readable (not ASCII-only) and safe for readers that split at Unicode line breaks."""
    text = json.dumps(json_safe(record), ensure_ascii=False, allow_nan=False).translate(_LINE_BREAKS)
    try:
        return text.encode() + b"\n"
    except UnicodeEncodeError:  # half a surrogate pair, which a model can write
        return json.dumps(json_safe(record), allow_nan=False).encode() + b"\n"


def json_safe(value: Any) -> Any:
    """`value` in JSON types: non-finite floats become None, unknown types their `str`."""
    if value is None or isinstance(value, (str, bool, int)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): json_safe(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [
            json_safe(entry) for entry in (sorted(value, key=str) if isinstance(value, (set, frozenset)) else value)
        ]
    if hasattr(value, "item") and getattr(value, "ndim", 1) == 0:  # a scalar of numpy or torch
        return json_safe(value.item())
    return str(value)


def episode_record(episode: Episode, *, tokens: bool = False) -> dict[str, Any]:
    """An episode as `episodes.jsonl` holds it: turns, rewards and verdicts; token ids only if asked for."""
    turns = []
    for turn in episode.turns:
        record: dict[str, Any] = {
            "agent": turn.agent,
            "turn": turn.turn,
            "env_step": turn.env_step,
            "text": turn.text,
            "stop": turn.stop,
            "tokens": len(turn.action_ids),
            "prompt_tokens": len(turn.prompt_ids),
            "adapter_version": turn.adapter_version,
            "reward": turn.reward,
        }
        if tokens:
            record |= {"prompt_ids": turn.prompt_ids, "action_ids": turn.action_ids}
        if turn.evidence is not None:
            record["evidence"] = _evidence_record(turn.evidence)
        if turn.coach is not None:
            scored = isinstance(turn.coach, Scored)
            record["coach"] = vars(turn.coach) if scored else {"unscored": turn.coach.why}  # type: ignore[union-attr]
        if turn.advantages:
            record["advantage"] = sum(turn.advantages) / len(turn.advantages)
        turns.append(record)
    record = {"id": episode.id, "group": episode.group, "outcome": episode.outcome, "turns": turns}
    if episode.branches:
        # Alternatives of a tree were not played on, so they stand apart from the turns.
        others = [branch for branch in episode.branches if not branch.info.get("carried")]
        record["alternatives"] = [
            {**alternative, "outcome": branch.outcome}
            for branch in others
            for alternative in episode_record(branch, tokens=tokens)["turns"]
        ]
    return {**record, "info": episode.info}


def _evidence_record(evidence: Evidence) -> dict[str, Any]:
    """Only the fields that the environment gave; `recorded.evidence_of` reads it back."""
    record: dict[str, Any] = {}
    if evidence.tool_output is not None:
        record["tool_output"] = evidence.tool_output
    if evidence.rules is not None:
        record["rules"] = vars(evidence.rules)
    if evidence.facts:
        record["facts"] = evidence.facts
    return record


# --------------------------------------------------------------------------------------------------------- settings


def write_args(path: Path, args: Mapping[str, Any]) -> None:
    """Write settings as YAML, atomically. Raises ConfigError for a value that looks like a secret."""
    import yaml

    for name, value in args.items():
        if value and isinstance(value, str) and _SECRET.search(name):
            raise ConfigError(
                f"setting {name!r} looks like a secret, and {path} is no place for one; use the environment"
            )
    data = yaml.safe_dump(_plain(args), sort_keys=False, allow_unicode=True)
    atomic_files.write_atomic(path, data.encode())


def read_args(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read settings that `write_args` wrote. Raises ConfigError."""
    import yaml

    try:
        args = parse_yaml(read_text(path))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path} cannot be read as settings: {' '.join(str(error).split())}") from error
    if args is not None and not isinstance(args, dict):
        raise ConfigError(f"{path} holds a {type(args).__name__}; expected `name: value` lines")
    return args or {}


def _plain(value: Any) -> Any:
    """Only types that `yaml.safe_dump` knows: tuples as lists, paths as text. Infinity stays, it may be a setting."""
    if isinstance(value, Mapping):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(entry) for entry in value]
    return value if value is None or isinstance(value, (str, bool, int, float)) else str(value)


# ---------------------------------------------------------------------------------------------------------- history


def _last_line(name: str, step: int) -> int:
    """The last iteration whose lines stay. The team of `step_N` is evaluated after its checkpoint is written."""
    return step - 1 if name == "evaluations" else step


def keep_until(path: Path, step: int) -> None:
    """Drop the lines after iteration `step` from a file of JSON lines, and half a line at the end if there is one.

    Only lines that `JsonLines` wrote are known: the iteration is read off their first bytes.
    """
    if not path.is_file():
        return
    kept = holes = 0
    is_prefix = True
    for line, keep in _lines(path, step):
        kept += len(line) if keep else 0
        is_prefix = is_prefix and not (keep and holes)
        holes += not keep
    if is_prefix:
        with open(path, "rb+") as file:
            file.truncate(kept)
            os.fsync(file.fileno())
        return
    atomic_files.write_atomic(path, b"".join(line for line, keep in _lines(path, step) if keep))


def _lines(path: Path, step: int) -> Iterable[tuple[bytes, bool]]:
    """(line, whether it is whole and of an iteration up to `step`)."""
    with open(path, "rb") as file:
        for line in file:
            prefix = _ITERATION.match(line)
            whole = prefix and line.endswith(b"}\n") and b"\0" not in line
            yield line, bool(whole and prefix and int(prefix[1]) <= step)


def set_aside(path: str | os.PathLike[str]) -> Path | None:
    """Rename a run directory to the first free `NAME.1`, `NAME.2`, ...; None if there is nothing at `path`.

    Raises:
        ConfigError: a process is writing there; renaming would make two runs write into each other.
    """
    path = Path(path)
    if not path.exists():
        return None
    if path.is_dir() and is_locked(path):
        raise ConfigError(
            f"{path} cannot be set aside: another process is writing to it; wait for it, or give another --run_dir"
        )
    number = 1
    while (aside := path.with_name(f"{path.name}.{number}")).exists():
        number += 1
    os.replace(path, aside)
    return aside


def _is_unused(path: Path) -> bool:
    """Whether the folder holds only the lock or temporary files of a process that died at once."""
    return all(entry.name.startswith(".") for entry in path.iterdir())


def _same(run: Path | None, path: Path) -> bool:
    return run is not None and path.exists() and os.path.samefile(run, path)


_LOCKED: set[str] = set()
"""Run directories that this process holds: a POSIX lock does not keep out the process that has it."""


def is_locked(path: Path) -> bool:
    """Whether a process, this one included, is writing to the run directory `path`."""
    if str(path.resolve()) in _LOCKED:
        return True
    if not (path / ".lock").is_file():
        return False
    try:
        lock = _lock(path)
    except ConfigError:
        return True
    if lock is not None:
        lock.close()
    return False


def _lock(path: Path) -> IO[bytes] | None:
    """Hold `path/.lock` for this process; the kernel frees it when the process dies, however it dies."""
    try:
        import fcntl
    except ImportError:  # not a POSIX system
        return None
    file = open(path / ".lock", "ab")  # noqa: SIM115 (the open file is the lock)
    try:
        # Not flock: a forked worker would inherit that, and keep it when this process is killed.
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        file.close()
        raise ConfigError(f"another process is writing to {path}; wait for it, or give another --run_dir") from None
    except OSError as error:  # some network file systems have no locks
        log.warning("%s cannot be locked (%s); take care that only one process writes there", path, error)
    return file
