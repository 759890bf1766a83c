"""The directory of a run: settings, metrics, episodes, and checkpoints.

Iterations count from 1; 0 is before training (the first evaluation). Checkpoint `step_N` holds the state
after iteration N, and the lines of iteration N are on disk before it is written, so resuming from it keeps lines up
to N and drops the rest. (Only the evaluation after iteration N comes later than its checkpoint; it is dropped and
repeated.) Wall-clock values live in `timings.jsonl` only, which lets a resumed run have the
same `metrics.jsonl` and `episodes.jsonl`, byte for byte, as one that was never interrupted.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from mafrt.core import atomic_files
from mafrt.core.errors import ConfigError
from mafrt.storage import checkpoint, transcript_files
from mafrt.storage.args_file import ARGS, plain, read_args, write_args
from mafrt.storage.json_lines import JsonLines, copy_until, keep_until
from mafrt.storage.load_path import BEST
from mafrt.storage.report import SUMMARY
from mafrt.storage.run_record import RECORD, RunRecord

if TYPE_CHECKING:
    from mafrt.storage.load_path import LoadSource

log = logging.getLogger(__name__)

LINE_FILES = ("metrics", "evaluations", "episodes", "timings")
PARSED = ("metrics", "evaluations", "timings")
"""Files whose lines are read as JSON when a run goes on; episodes may be gigabytes."""

_NOT_SETTINGS = frozenset({"load_path", "config"})


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
        loaded: LoadSource | None = None,
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
        if not here and path.exists():
            _check_unused(path)
        made = not path.exists()
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"{path} cannot be made ({error.strerror}); give another --run_dir") from error
        if here:
            check_entries(path)
        run = cls(path, step=step)
        try:
            if not here:
                _check_unused(path)  # again: another process may have begun and ended since
        except ConfigError:
            run.close()
            raise
        try:
            if record is not None:
                record.save(path)  # before args.yaml: settings without a record mean a run of an earlier version
            if here:
                run._go_on(args)
            else:
                run._begin(args, loaded)
        except BaseException:
            if made:  # by this process, whose command then begins again, as after a full disk
                shutil.rmtree(path, ignore_errors=True)
            elif not here:
                _empty(path)
            run.close()
            raise
        return run

    def _begin(self, args: Mapping[str, Any], loaded: LoadSource | None) -> None:
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
            keep_until(self.path / f"{name}.jsonl", _last_line(name, step), parse=name in PARSED)
        transcript_files.drop_after(self.path, step)
        before = read_args(self.path / ARGS) if (self.path / ARGS).is_file() else {}
        args = plain({**args, **{name: before[name] for name in _NOT_SETTINGS if name in before}})
        changed = sorted(name for name in {*before, *args} if before.get(name) != args.get(name))
        if changed:
            file_name = f"args.until_{max(step, 0):06d}.yaml"
            if before:
                log.warning("settings changed (the old ones are in %s): %s", file_name, ", ".join(changed))
                write_args(self.path / file_name, before)
            write_args(self.path / ARGS, args)

    def _copy_history(self, source: Path) -> None:
        step = -1 if self.step is None else self.step
        for name in LINE_FILES:
            file = f"{name}.jsonl"
            if (source / file).is_file():
                copy_until(source / file, self.path / file, _last_line(name, step), parse=name in PARSED)
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


def check_entries(path: Path) -> None:
    """Refuse a run that cannot go on since one of its files or folders is something else, before any is written.

    Raises:
        ConfigError: such as a folder, a pipe or a link to nothing in the place of a file.
    """
    files = (*(f"{name}.jsonl" for name in LINE_FILES), ARGS, RECORD, checkpoint.ORIGIN, SUMMARY, ".lock")
    for names, what, is_one in (
        (files, "file", Path.is_file),
        (("checkpoints", transcript_files.FOLDER, "tensorboard", BEST), "folder", Path.is_dir),
    ):
        for name in names:
            entry = path / name
            if (entry.exists() or entry.is_symlink()) and not (is_one(entry) and os.access(entry, os.R_OK | os.W_OK)):
                raise ConfigError(
                    f"{entry} is no regular {what} that can be read and written; move it away, or take the run from a "
                    "copy"
                )


def _last_line(name: str, step: int) -> int:
    """The last iteration whose lines stay. The team of `step_N` is evaluated after its checkpoint is written."""
    return step - 1 if name == "evaluations" else step


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


def _check_unused(path: Path) -> None:
    """Raise ConfigError if a new run in `path` would be mixed up with what is there."""
    if not path.is_dir() or not is_unused(path):
        raise ConfigError(
            f"{path} {'already holds a run' if path.is_dir() else 'is a file'}; give another --run_dir, or go on "
            f"with it: --config {path / ARGS} --load_path {path}"
        )


def _empty(path: Path) -> None:
    """Remove all but the hidden files of a folder that was unused."""
    for entry in path.iterdir():
        if not entry.name.startswith("."):
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()


def is_unused(path: Path) -> bool:
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
