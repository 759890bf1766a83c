"""Checkpoints on disk: `tinker://RUN/weights/NAME` (adapter and optimizer) and `tinker://RUN/sampler_weights/NAME`.

A checkpoint is a PEFT folder in the folder of its run, with the optimizer's state beside it in safetensors, and a
manifest that is written last. Whose it is stands in the run's own file.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mafrt.core.atomic_files import fsync, load_json, new_folder, save_json, write_atomic
from mafrt.core.errors import CheckpointError
from mafrt.core.text import shortened
from mafrt.scripts.tinker_server.limits import refused

if TYPE_CHECKING:
    from torch import Tensor

RUN, MANIFEST, OPTIMIZER = "run.json", "checkpoint.json", "optimizer.safetensors"
KINDS = {"weights": "training", "sampler_weights": "sampler"}
RUN_ID = re.compile(r"([0-9a-f]{32}):train:(\d{1,9})", re.ASCII)
NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,99}", re.ASCII)


@dataclass(frozen=True)
class Place:
    """Where a checkpoint is, or will be."""

    run: str
    """id of its training run"""
    kind: str
    """a key of `KINDS`"""
    name: str

    @property
    def path(self) -> str:
        return f"tinker://{self.run}/{self.kind}/{self.name}"


def place_of(run: str, kind: str, name: str, asked: str = "") -> Place:
    """Raises RefusedError, with the path that was asked for, for a name or id that could lead out of the folder."""
    if not RUN_ID.fullmatch(run) or kind not in KINDS or not NAME.fullmatch(name):
        raise refused(
            f"{shortened(asked or f'tinker://{run}/{kind}/{name}', 200)!r} is no path of this server; it has the form "
            "tinker://SESSION:train:NUMBER/weights/NAME or .../sampler_weights/NAME, NAME of letters, digits and ._-"
        )
    return Place(run, kind, name)


def parse_path(path: str) -> Place:
    """The place that a `tinker://` path names. Raises RefusedError."""
    parts = path.removeprefix("tinker://").split("/")
    run, kind, name = parts if path.startswith("tinker://") and len(parts) == 3 else ("", "", "")
    return place_of(run, kind, name, path)


class Checkpoints:
    """The folder of all runs.

    Args:
        folder: made if it does not exist.
        most: of a run.
    """

    def __init__(self, folder: Path, most: int) -> None:
        self.folder, self.most = folder, most
        (folder / "runs").mkdir(parents=True, exist_ok=True)
        # What a snapshot held was of use to the process that made it.
        shutil.rmtree(folder / "snapshots", ignore_errors=True)
        (folder / "snapshots").mkdir()
        # A process that died within `new_folder` leaves these.
        for unfinished in folder.glob("runs/*/*/.*.tmp"):
            shutil.rmtree(unfinished, ignore_errors=True)
        for old in folder.glob("runs/*/*/.*.old"):
            final = old.with_name(old.name[1:].removesuffix(".old"))
            if final.exists():
                shutil.rmtree(old, ignore_errors=True)
            else:
                os.rename(old, final)

    def _run(self, run: str) -> Path:
        found = RUN_ID.fullmatch(run)
        if found is None:
            raise refused(f"{shortened(run)!r} is no training run of this server", 404)
        return self.folder / "runs" / f"{found[1]}_train_{found[2]}"

    def folder_of(self, place: Place) -> Path:
        return self._run(place.run) / place.kind / place.name

    # ----------------------------------------------------------------------------------------------------------- runs

    def begin(self, run: str, about: Mapping[str, Any], *, again: bool = False) -> None:
        """Record a new run, or `again` one whose record is gone."""
        if not (again and (self._run(run) / RUN).is_file()):
            self._run(run).mkdir(parents=True, exist_ok=True)
            save_json(self._run(run) / RUN, dict(about))

    def about(self, run: str, owner: str) -> dict[str, Any]:
        """What `begin` recorded. Raises RefusedError (404) if there is none, or it is somebody else's."""
        file = self._run(run) / RUN
        found = load_json(file) if file.is_file() else None
        # The same words for both, so that nobody learns what others have.
        if not isinstance(found, dict) or found.get("owner") != owner:
            raise refused(f"there is no training run {shortened(run)} of yours", 404)
        return found

    def runs(self, owner: str) -> list[tuple[str, dict[str, Any]]]:
        """The runs of a client, the newest first."""
        found = []
        for folder in (self.folder / "runs").iterdir():
            run = folder.name.replace("_train_", ":train:")
            if (folder / RUN).is_file() and (about := load_json(folder / RUN)).get("owner") == owner:
                found.append((run, about))
        return sorted(found, key=lambda each: each[1].get("created", 0.0), reverse=True)

    # ---------------------------------------------------------------------------------------------------- checkpoints

    def manifest(self, place: Place, owner: str) -> dict[str, Any]:
        """The manifest of a checkpoint. Raises RefusedError (404)."""
        self.about(place.run, owner)
        file = self.folder_of(place) / MANIFEST
        found = load_json(file) if file.is_file() else None
        if not isinstance(found, dict):
            raise refused(f"there is no checkpoint {place.path} of yours", 404)
        if (ends := found.get("expires")) is not None and time.time() > ends:
            self.delete(place, owner)
            raise refused(f"the checkpoint {place.path} has expired", 404)
        return found

    def all_of(self, run: str, owner: str) -> list[tuple[Place, dict[str, Any]]]:
        """The checkpoints of a run, the oldest first."""
        self.about(run, owner)
        found = []
        for kind in KINDS:
            folder = self._run(run) / kind
            for each in sorted(folder.iterdir()) if folder.is_dir() else ():
                if (each / MANIFEST).is_file() and NAME.fullmatch(each.name):
                    found.append((Place(run, kind, each.name), load_json(each / MANIFEST)))
        return sorted(found, key=lambda each: each[1].get("time", 0.0))

    def refuse_taken(self, place: Place, owner: str, *, overwrite: bool) -> None:
        """Raise RefusedError if a checkpoint of that name cannot be written."""
        if self.folder_of(place).exists() and not overwrite:
            raise refused(f"there is a checkpoint {place.path} already; give another name, or overwrite=True", 422)
        if len(self.all_of(place.run, owner)) >= self.most:
            raise refused(f"the training run has {self.most} checkpoints; delete some", 422)

    def write(
        self, place: Place, files: Mapping[str, bytes], moments: Mapping[str, Tensor] | None, about: Mapping[str, Any]
    ) -> None:
        """Write a checkpoint; a process that dies meanwhile, or a full disk, leaves the one before it."""
        from safetensors.torch import save

        final, contents = self.folder_of(place), dict(files)
        if moments is not None:
            contents[OPTIMIZER] = save(dict(moments))
        size = sum(map(len, contents.values()))
        hashes = {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()}
        with new_folder(final) as draft:
            draft.mkdir(parents=True)
            for name, content in contents.items():
                write_atomic(draft / name, content)
            save_json(draft / MANIFEST, {**about, "time": time.time(), "size": size, "sha256": hashes})
            fsync(draft)
        fsync(final.parent)

    def verify(self, place: Place, manifest: Mapping[str, Any]) -> Path:
        """The folder of a checkpoint whose files are as they were written. Raises CheckpointError."""
        folder = self.folder_of(place)
        for name, known in manifest["sha256"].items():
            file = folder / os.path.basename(name)
            if not file.is_file() or hashlib.sha256(file.read_bytes()).hexdigest() != known:
                raise CheckpointError(f"{place.path}: {name} is damaged; take another checkpoint")
        return folder

    def moments(self, place: Place) -> dict[str, Tensor] | None:
        """The optimizer's state; None if the checkpoint has none."""
        from safetensors.torch import load

        file = self.folder_of(place) / OPTIMIZER
        return load(file.read_bytes()) if file.is_file() else None

    def delete(self, place: Place, owner: str) -> None:
        self.about(place.run, owner)
        shutil.rmtree(self.folder_of(place), ignore_errors=True)


def described(place: Place, manifest: Mapping[str, Any]) -> dict[str, Any]:
    """A checkpoint in the words of the API."""
    ends = manifest.get("expires")
    return {
        "checkpoint_id": f"{place.kind}/{place.name}",
        "checkpoint_type": KINDS[place.kind],
        "time": at(manifest["time"]),
        "tinker_path": place.path,
        "size_bytes": manifest["size"],
        "public": False,
        "user_metadata": manifest.get("metadata") or None,
        "expires_at": None if ends is None else at(ends),
    }


def at(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()


def owner_of(key: str) -> str:
    """The name under which a client's runs are kept: a hash of its API key, which is stored nowhere."""
    return hashlib.sha256(b"mafrt tinker " + key.encode()).hexdigest()[:32]


def dumps(value: Any) -> bytes:
    return json.dumps(value, allow_nan=False).encode()
