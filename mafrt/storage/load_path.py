"""Resolves `--load_path`: a run, one checkpoint, or a folder of adapters."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from mafrt.config import permission
from mafrt.core.atomic_files import load_json
from mafrt.core.errors import CheckpointError
from mafrt.storage.checkpoint import CRITIC, MANIFEST, ORIGIN, Checkpoint, candidates, latest, verify, versions
from mafrt.storage.run_record import RECORD

log = logging.getLogger(__name__)

BEST = "best"
"""folder of a run with the adapters of the best evaluation"""
BEST_SCORE = "best.json"
"""file in that folder: the iteration and its score"""
_ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
_TAKES = "--load_path takes a run directory, one checkpoint (step_...), or a folder that holds adapter folders"


@dataclass(frozen=True)
class LoadSource:
    """Result of resolving `--load_path`."""

    kind: Literal["run", "checkpoint", "adapters"]
    path: Path
    """The folder that holds the adapter folders; the run directory if `checkpoint` is None and `kind` is "run"."""
    adapters: dict[str, Path]
    """Adapter name -> its PEFT folder. Empty for a run that was stopped before its first checkpoint."""
    critic: Path | None
    checkpoint: Checkpoint | None = None
    """None: there is nothing to resume; the adapters, if any, are initial weights."""
    run: Path | None = None
    """The run directory it belongs to, if that is known."""
    best_of: int | None = None
    """The iteration of a run's `best` adapters (`resolve_played`)."""

    @property
    def step(self) -> int:
        """Iterations that the adapters have learnt: 0 unless they are of a checkpoint or a run's best."""
        return self.checkpoint.step if self.checkpoint else self.best_of or 0

    @property
    def resumes(self) -> bool:
        """Whether a run goes on (with optimizers, random states and data position) rather than starts."""
        return self.kind != "adapters" or self.run is not None

    def adapter(self, name: str) -> Path:
        """The folder of one adapter. Raises CheckpointError with the names that are there."""
        if name not in self.adapters:
            raise CheckpointError(
                f"{self.path} holds no adapter {name!r}, only {', '.join(sorted(self.adapters)) or 'none at all'}; "
                "use the team it was trained with, or add the missing adapter folder"
            )
        return self.adapters[name]

    def state(self, name: str) -> Path:
        """The file `state/NAME` of the checkpoint. Raises CheckpointError if it was not saved."""
        if self.checkpoint is None or f"state/{name}" not in self.checkpoint.files:
            raise CheckpointError(f"{self.path} holds no state/{name}, so the run cannot go on exactly from there")
        return self.path / "state" / name


def resolve(load_path: str | os.PathLike[str]) -> LoadSource:
    """The content of `load_path`: a run, one checkpoint, or a folder of adapters. Writes nothing.

    A run yields its newest intact checkpoint. A run stopped before its first checkpoint yields its own initial weights,
    with `run` set to itself. Raises CheckpointError.
    """
    path = Path(load_path).expanduser()
    permission.reading(path)
    if not path.is_dir():
        raise CheckpointError(f"{path} {'is a file' if path.exists() else 'does not exist'}; {_TAKES}")
    if (path / MANIFEST).is_file():
        return _one_checkpoint(path)
    # Its parts may be half-written, so it is not taken for a folder of adapters.
    if path.name.startswith("step_") or (path / "state").is_dir():
        raise CheckpointError(f"{path} is an unfinished checkpoint (it has no {MANIFEST}); give its run directory")
    if candidates(path):
        run = path.parent if path.name == "checkpoints" else None
        return _loadable("run", latest(path), run)
    if any((path / name).exists() for name in ("checkpoints", "args.yaml", ORIGIN)):
        if candidates(path / "checkpoints"):
            return _loadable("run", latest(path / "checkpoints"), path)
        log.warning("%s was stopped before its first checkpoint, so it starts where it started then", path)
        # It began from another run's weights, so it begins there again and not from nothing.
        if (path / ORIGIN).exists():
            return replace(resolve(load_json(path / ORIGIN)["load_path"]), run=path)
        return LoadSource("run", path, {}, None, run=path)
    return _adapter_folders(path)


def resolve_played(load_path: str | os.PathLike[str]) -> LoadSource:
    """`resolve` for a team that is played or handed on: the `best` adapters of a run belong to the run.

    To a training they are initial weights like those of any folder, so `resolve` knows no run of theirs. Raises
    CheckpointError.
    """
    loaded = resolve(load_path)
    run = loaded.path.absolute().parent
    score = loaded.path / BEST_SCORE
    if loaded.kind != "adapters" or loaded.path.name != BEST or not ((run / RECORD).is_file() and score.is_file()):
        return loaded
    best = load_json(score)
    if not isinstance(best, dict) or type(best.get("iteration")) is not int:
        raise CheckpointError(f"{score} names no iteration; give the run directory, or its adapters in another folder")
    return replace(loaded, run=run, best_of=best["iteration"])


def _one_checkpoint(path: Path) -> LoadSource:
    run = path.parent.parent if path.parent.name == "checkpoints" else None
    return _loadable("checkpoint", verify(path), run)


def _loadable(kind: Literal["run", "checkpoint"], point: Checkpoint, run: Path | None) -> LoadSource:
    names = [name.rpartition("/")[0] for name in point.files if name.endswith("/" + _ADAPTER_FILES[0])]
    adapters = {name: point.path / name for name in names if f"{name}/{_ADAPTER_FILES[1]}" in point.files}
    current = versions()
    changed = [f"{k} {v} -> {current.get(k)}" for k, v in point.versions.items() if current.get(k) != v]
    if changed:
        log.warning("%s was written with other versions, so numbers may differ: %s", point.path, ", ".join(changed))
    critic = point.path / CRITIC if CRITIC in point.files else None
    return LoadSource(kind, point.path, adapters, critic, point, run)


def _adapter_folders(path: Path) -> LoadSource:
    if any((path / name).exists() for name in _ADAPTER_FILES):
        raise CheckpointError(f"{path} is itself one adapter; give the folder that holds it, so that it has a name")
    adapters = {}
    for folder in sorted(entry for entry in path.iterdir() if entry.is_dir() and not entry.name.startswith(".")):
        # Both files are needed; one alone is more likely a broken copy than a folder of something else.
        present = [name for name in _ADAPTER_FILES if (folder / name).is_file()]
        if len(present) == len(_ADAPTER_FILES):
            adapters[folder.name] = folder
        elif present or (folder / "adapter_model.bin").exists():
            missing = next(name for name in _ADAPTER_FILES if name not in present)
            raise CheckpointError(
                f"{folder} has no {missing}; expected an adapter folder with {' and '.join(_ADAPTER_FILES)}"
            )
    if not adapters:
        entries = ", ".join(sorted(entry.name for entry in path.iterdir())[:5]) or "nothing"
        raise CheckpointError(f"{path} holds no run, checkpoint or adapter folder (found: {entries}); {_TAKES}")
    critic = path / CRITIC
    return LoadSource("adapters", path, adapters, critic if critic.is_file() else None)
