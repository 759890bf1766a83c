"""Adapters for engines that hold no `SharedBase`: a PEFT folder, a name and a number for every version of each.

A name is never reused for other weights: an engine keys its prompt caches by the name, so cached values of one version
cannot serve the next.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import shutil
import stat
import tempfile
import time
import uuid
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import save

from mafrt.core.errors import ConfigError
from mafrt.engines.local.sampler import NonFiniteLogitsError
from mafrt.models.peft_format import CONFIG, WEIGHTS, finite, keys

if TYPE_CHECKING:
    from mafrt.models.shared_base import SharedBase

log = logging.getLogger(__name__)

MEMORY = Path("/dev/shm")
"""A folder in memory, where there is one."""
BARE = "bare"


@dataclass(frozen=True)
class AdapterVersion:
    """One version of one adapter, as an engine is told of it."""

    name: str
    """unlike that of any other version, run or adapter"""
    number: int
    """1 or more; likewise"""
    path: Path
    version: int
    """its name on `SharedBase`"""


def _remove(folder: Path, held: int) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    os.close(held)


def _clear(place: Path) -> None:
    """Remove the adapters that trainers of this user left who were killed: memory until the machine starts again."""
    for left in place.glob("mafrt-*-*-*"):
        try:
            about = left.lstat()
            # One that was made this minute may not be held yet.
            if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.getuid() or time.time() - about.st_mtime < 60:
                continue
            if Path("/proc", left.name.split("-")[2]).exists():
                continue
            held = os.open(left, os.O_RDONLY | os.O_NOFOLLOW)
        except OSError:
            continue
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(held)
        else:
            _remove(left, held)


class Handover:
    """Writes adapters down as they change, and says which versions are no longer needed.

    The bare base is an adapter too, with all weights zero: vLLM's CPU kernels give rows without an adapter the last
    one loaded, if others in the batch have one (vllm-project/vllm#48421).

    Args:
        base: holds the adapters.
        folder: where to write them; None for a folder in memory that only this user can read. It has to be one that
            the engine sees under the same path.
        run: part of every name; equal in all processes that share an engine, and in no others.
    """

    def __init__(self, base: SharedBase, folder: str | Path | None = None, run: str | None = None) -> None:
        self.base = base
        self.run = run or uuid.uuid4().hex[:8]
        self.folder = self._make(folder)
        # Held as long as this process lives: what a killed one has left in memory is nobody's.
        held = os.open(self.folder, os.O_RDONLY)
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(held, fcntl.LOCK_SH)
        self._close = weakref.finalize(self, _remove, self.folder, held)
        self._current: dict[str | None, tuple[tuple[int, int], AdapterVersion]] = {}
        self._count = 0

    def _make(self, folder: str | Path | None) -> Path:
        # The process id too, since several processes of one run write their adapters into one folder.
        name = f"mafrt-{self.run}-{os.getpid()}"
        if folder is None:
            # In memory where possible: adapters are written anew after every update and read once.
            usable = MEMORY.is_dir() and os.access(MEMORY, os.W_OK)
            place = MEMORY if usable else Path(tempfile.gettempdir())
            _clear(place)
            return Path(tempfile.mkdtemp(prefix=name + "-", dir=place))
        path = Path(folder).expanduser().absolute() / name
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"vllm_adapter_dir {folder} cannot be written ({error.strerror}); give a folder that this process "
                "can write and the servers can read"
            ) from None
        return path

    def parcels(self, adapters: Iterable[str | None]) -> tuple[dict[str | None, AdapterVersion], list[AdapterVersion]]:
        """The current version of each, written down; and those that they replace, for the engine to drop.

        Call `forget` after the engine has dropped a version.

        Raises:
            NonFiniteLogitsError: an adapter's weights are not finite; it names them.
        """
        parcels_by_name: dict[str | None, AdapterVersion] = {}
        replaced = []
        for name in dict.fromkeys(adapters):
            stamp = self._stamp(name)
            known = self._current.get(name)
            # Compared by counts and not by content, since reading all weights before every batch would cost as much as
            # writing them.
            if known is None or known[0] != stamp:
                parcel = self._write(name)
                if known is not None:
                    if known[1].name == parcel.name:
                        parcel = AdapterVersion(parcel.name, known[1].number, parcel.path, parcel.version)
                    else:
                        replaced.append(known[1])
                self._current[name] = (stamp, parcel)
            parcels_by_name[name] = self._current[name][1]
        return parcels_by_name, replaced

    def current(self) -> list[AdapterVersion]:
        """The versions that were handed out last."""
        return [parcel for _, parcel in self._current.values()]

    def forget(self, parcel: AdapterVersion) -> None:
        """Remove the folder of a version that no engine holds any more."""
        if all(parcel.name != current.name for _, current in self._current.values()):
            shutil.rmtree(parcel.path, ignore_errors=True)

    def close(self) -> None:
        """Remove everything that was written."""
        self._close()

    def _stamp(self, name: str | None) -> tuple[int, int]:
        """A key that changes with the adapter's weights: its version, and torch's count of writes to its tensors."""
        if name is None:
            return 0, 0
        return self.base.versions[name], sum(p._version for p in self.base.adapter_parameters(name))

    def _write(self, name: str | None) -> AdapterVersion:
        files = self._bare_files() if name is None else self._files(name)
        digest = hashlib.sha256(f"{name}\x1f".encode())
        # Named by their content: an engine that caches by name can then never answer from another version.
        for file in (CONFIG, WEIGHTS):
            digest.update(files[file])
        self._count += 1
        full = f"{BARE if name is None else name}-{self.run}-{digest.hexdigest()[:16]}"
        path = self.folder / full
        if not path.exists():
            # Whole or not at all, since a folder that is there is not written again.
            scratch = Path(tempfile.mkdtemp(dir=self.folder))
            for file, content in files.items():
                (scratch / file).write_bytes(content)
            # Temporary folders are private, but a server may run as another user.
            scratch.chmod(0o755)
            scratch.rename(path)
        return AdapterVersion(full, self._count, path, 0 if name is None else self.base.versions[name])

    def _files(self, name: str) -> dict[str, bytes]:
        files = self.base.adapter_files(name)
        if not finite(files):
            raise NonFiniteLogitsError([name])
        return files

    def _bare_files(self) -> dict[str, bytes]:
        shapes = self.base.linear_paths()
        path = next(path for path in self.base.adaptable() if path in shapes)
        width, out = shapes[path]
        key_a, key_b = keys(path)
        weights = {key_a: torch.zeros(1, width), key_b: torch.zeros(out, 1)}
        config = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": self.base.name,
            "r": 1,
            "lora_alpha": 1,
            "target_modules": [path],
            "bias": "none",
        }
        return {WEIGHTS: save(weights, metadata={"format": "pt"}), CONFIG: (json.dumps(config) + "\n").encode()}
