"""Checkpoints that survive kill -9, a full disk and a flipped byte.

A checkpoint is the folder `step_000100`: adapters, critic, optimizers, random states, and a `manifest.json` with the
SHA-256 of every other file. It is written under another name, made durable, and appears by one rename, so that a
folder with the final name is either complete or was damaged later, which the hashes tell.

Names beside the checkpoints, all ignored by `latest` unless said otherwise:
`step_N.tmp` is unfinished or half removed; `step_N.old` is the one being replaced (it counts while `step_N` does not
exist); `step_N.aside` is newer than the step from which a run was resumed.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import platform
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib import metadata
from pathlib import Path, PurePosixPath
from typing import Any

from mafrt.core.atomic_files import fsync, load_json, remedy, save_json
from mafrt.core.errors import CheckpointError, ConfigError

log = logging.getLogger(__name__)

MANIFEST = "manifest.json"
REFERENCE = "reference.pt"
"""Among the state: the adapters that are the reference of a KL penalty, as tensors."""
CRITIC = "critic.pth"
ORIGIN = "origin.json"
"""In a run directory: the load path that gave the run its first weights, if there was one."""
RESERVED = frozenset({MANIFEST, CRITIC, "state"})
"""Names inside a checkpoint that no adapter may take."""

_FORMAT = "mafrt-checkpoint"
_FORMAT_VERSION = 1
_STEP = re.compile(r"step_(\d{6,})(\.old)?")

Writer = Callable[[Path], object]
"""Writes one file or one folder at the path it is given."""


@dataclass(frozen=True)
class Checkpoint:
    """A verified checkpoint: every file is present and matches its hash."""

    path: Path
    step: int
    """Iterations completed when it was written."""
    files: dict[str, str]
    """Relative path -> SHA-256."""
    versions: dict[str, str]
    sandbox_tier: str | None
    meta: dict[str, Any]
    skipped: tuple[str, ...] = ()
    """Why newer checkpoints beside it were passed over, one sentence each."""


# ---------------------------------------------------------------------------------------------------------- writing


def step_name(step: int) -> str:
    """The folder name of a step."""
    return f"step_{step:06d}"


def save(
    root: str | os.PathLike[str],
    step: int,
    writers: Mapping[str, Writer],
    *,
    meta: Mapping[str, Any] | None = None,
    sandbox_tier: str | None = None,
    keep_last: int = 2,
    keep_every: int = 0,
) -> Path:
    """Write checkpoint `step` under `root`, atomically and durably, then thin out old ones (see `thin`).

    `writers` maps a relative path ("solver", "critic.pth", "state/run.json") to its writer.
    `meta` is any JSON. A step that exists is left alone if it is intact and holds the same files, else replaced.
    Raises CheckpointError, with earlier checkpoints untouched and nothing left behind, if it cannot be written.
    """
    root = Path(root)
    _check_names(writers)
    final, temporary = root / step_name(step), root / f"{step_name(step)}.tmp"
    part = str(final)
    try:
        if not root.is_dir():
            root.mkdir(parents=True)
            # The name of a new folder lies in its parent, and is lost with the power if that was not written.
            fsync(root.parent)
        clean(root)
        temporary.mkdir()
        for name, write in writers.items():
            part = f"{name} of {final}"
            (temporary / name).parent.mkdir(parents=True, exist_ok=True)
            write(temporary / name)
            if not (temporary / name).exists():
                raise FileNotFoundError(errno.ENOENT, "its writer wrote nothing", name)
        part = str(final)
        # Through JSON and back, so that it compares equal with a manifest that was read from disk.
        manifest = _seal(temporary, step, json.loads(json.dumps(meta or {}, allow_nan=False)), sandbox_tier)
        _publish(temporary, final, manifest)
    except BaseException as error:
        shutil.rmtree(temporary, ignore_errors=True)
        if _is_disk_error(error):
            raise CheckpointError(
                f"cannot write {part}: {error} ({_free_mib(root)} MiB free); earlier checkpoints are untouched: "
                f"{remedy(error, 'free some space or lower --keep_last')}, then go on with --load_path {root.parent}"
            ) from error
        raise
    try:
        # Old ones go only after the new one stands, and a failure to remove them must not cost the run.
        thin(root, keep_last=keep_last, keep_every=keep_every, trusted=final)
    except OSError as error:
        log.warning("%s is written, but old checkpoints could not be removed: %s", final, error)
    return final


def _check_names(writers: Mapping[str, Writer]) -> None:
    for name in writers:
        if not _is_safe(name) or name == MANIFEST:
            raise ConfigError(f"{name!r} cannot be the name of a part of a checkpoint; expected a relative path")
        for parent in PurePosixPath(name).parents:
            if str(parent) in writers:
                raise ConfigError(
                    f"{str(parent)!r} is reserved in a checkpoint because of {name!r}; rename the adapter"
                )


def _seal(folder: Path, step: int, meta: dict[str, Any], sandbox_tier: str | None) -> dict[str, Any]:
    """Make every file of `folder` durable and write the manifest last."""
    files: dict[str, dict[str, Any]] = {}
    folders = [folder]
    for path in sorted(folder.rglob("*")):
        if path.is_symlink() or not (path.is_dir() or path.is_file()):
            raise CheckpointError(f"{path} is neither a file nor a folder; a checkpoint holds nothing else")
        if path.is_dir():
            folders.append(path)
        else:
            fsync(path)
            files[path.relative_to(folder).as_posix()] = {"sha256": _sha256(path), "size": path.stat().st_size}
    manifest: dict[str, Any] = {
        "format": _FORMAT,
        "format_version": _FORMAT_VERSION,
        "step": step,
        "sandbox_tier": sandbox_tier,
        "versions": versions(),
        "meta": meta,
        "files": files,
    }
    manifest["manifest_sha256"] = _manifest_hash(manifest)
    # Last of all files: without it the folder is known to be unfinished.
    save_json(folder / MANIFEST, manifest)
    # Inner folders first, so that what an outer one names is on disk before it.
    for path in reversed(folders):
        fsync(path)
    return manifest


def _publish(temporary: Path, final: Path, manifest: dict[str, Any]) -> None:
    root, old = final.parent, final.with_name(f"{final.name}.old")
    if final.exists():
        try:
            there = verify(final)
        except CheckpointError as error:
            log.warning("replacing a damaged checkpoint: %s", error)
        else:
            # The same step again, as after a resumed evaluation: what is there stays, and nothing is at risk.
            if there.meta == manifest["meta"] and there.files == _hashes(manifest):
                shutil.rmtree(temporary)
                return
        os.replace(final, old)
    os.replace(temporary, final)
    fsync(root)
    if old.exists():
        _remove(old)


def thin(
    root: str | os.PathLike[str], *, keep_last: int, keep_every: int = 0, trusted: Path | None = None
) -> list[Path]:
    """Remove old checkpoints and return their paths.

    The newest `keep_last` stay, every multiple of `keep_every` steps (0: none), and the newest one that is intact,
    regardless of these. `trusted` was verified just now.
    """
    if keep_last < 1:
        raise ConfigError(f"keep_last is {keep_last}; at least the newest checkpoint has to stay, so give 1 or more")
    everything = [(step, path) for step, path in candidates(Path(root)) if path.suffix != ".old"]
    keep = {path for _, path in everything[:keep_last]}
    keep |= {path for step, path in everything if keep_every and step % keep_every == 0}
    for _, path in everything:
        # At least one must be intact, whatever its age, or damage to the newest would end the run.
        if path == trusted or _is_intact(path):
            keep.add(path)
            break
    removed = [path for _, path in everything if path not in keep]
    for path in removed:
        _remove(path)
    return removed


def clean(root: str | os.PathLike[str]) -> None:
    """Clean up after a killed process. Only the process that writes into `root` may call it."""
    for path in sorted(Path(root).glob("step_*")):
        if path.name.endswith(".tmp"):
            log.info("removing the unfinished %s", path)
            shutil.rmtree(path, ignore_errors=True)
        elif path.name.endswith(".old"):
            final = path.with_suffix("")
            if final.exists():
                _remove(path)
            else:
                os.replace(path, final)


def set_aside_after(root: str | os.PathLike[str], step: int) -> list[Path]:
    """Rename checkpoints beyond `step` to `step_N.aside`: the run goes on from `step`, and they are not its future."""
    moved: list[Path] = []
    for later, path in candidates(Path(root)):
        if later <= step:
            continue
        aside = path.with_name(f"{step_name(later)}.aside")
        if aside in moved:  # a `.old` whose replacement has just become the `.aside`
            _remove(path)
            continue
        if aside.exists():
            _remove(aside)
        os.replace(path, aside)
        moved.append(aside)
    if moved:
        fsync(Path(root))
    return moved


def _remove(path: Path) -> None:
    # Renamed first, so that a kill half-way leaves nothing that looks like a checkpoint.
    gone = path.with_name(f"{path.name}.gone.tmp")
    shutil.rmtree(gone, ignore_errors=True)
    os.replace(path, gone)
    shutil.rmtree(gone, ignore_errors=True)


# ---------------------------------------------------------------------------------------------------------- reading


def verify(path: str | os.PathLike[str]) -> Checkpoint:
    """Read the manifest and hash every file. Raises CheckpointError for the first mismatch."""
    path = Path(path)
    manifest = _read_manifest(path)
    named = _STEP.fullmatch(path.name)
    if named and int(named[1]) != manifest["step"]:
        raise CheckpointError(f"{path} was written as step {manifest['step']}; give it back its name")
    for name, entry in manifest["files"].items():
        _verify_file(path, name, entry)
    hashes = _hashes(manifest)
    for extra in path.rglob("*"):
        name = extra.relative_to(path).as_posix()
        if not extra.is_dir() and name != MANIFEST and name not in hashes:
            log.warning("%s is not part of the checkpoint and is ignored", extra)
    return Checkpoint(
        path, manifest["step"], hashes, manifest["versions"], manifest.get("sandbox_tier"), manifest["meta"]
    )


def latest(root: str | os.PathLike[str]) -> Checkpoint:
    """The newest intact checkpoint under `root` (a run's `checkpoints/`).

    Damaged ones are passed over with a logged error each, and listed in `skipped`. Raises CheckpointError if none is
    left. Writes nothing.
    """
    root = Path(root)
    broken: dict[Path, str] = {}
    for _, path in candidates(root):
        try:
            point = verify(path)
        except CheckpointError as error:
            broken[path] = str(error)
        else:
            for newer, why in broken.items():
                log.error("%s cannot be used, falling back to %s: %s", newer, path.name, why)
            return replace(point, skipped=tuple(broken.values()))
    if broken:
        raise CheckpointError(f"no checkpoint in {root} is intact ({'; '.join(broken.values())}); start a new run")
    raise CheckpointError(f"{root} holds no finished checkpoint; start a new run")


def candidates(root: Path) -> list[tuple[int, Path]]:
    """(step, folder), newest first; a `.old` comes right after the one that replaces it."""
    matches = [(m, path) for path in root.glob("step_*") if (m := _STEP.fullmatch(path.name)) and path.is_dir()]
    matches.sort(key=lambda pair: (-int(pair[0][1]), pair[0][2] is not None))
    return [(int(m[1]), path) for m, path in matches]


def _is_intact(path: Path) -> bool:
    try:
        verify(path)
    except CheckpointError:
        return False
    return True


def _read_manifest(path: Path) -> dict[str, Any]:
    where = path / MANIFEST
    manifest = load_json(where)
    if not isinstance(manifest, dict) or manifest.get("format") != _FORMAT:
        raise CheckpointError(f"{where} is not the manifest of a mafrt checkpoint")
    if manifest.get("format_version") != _FORMAT_VERSION:
        raise CheckpointError(
            f"{where} has format {manifest.get('format_version')}, this mafrt reads {_FORMAT_VERSION}"
        )
    if manifest.get("manifest_sha256") != _manifest_hash(manifest):
        raise CheckpointError(f"{where} is damaged: it does not match its own hash")
    kinds = {"step": int, "files": dict, "versions": dict, "meta": dict}
    for key, kind in kinds.items():
        if not isinstance(manifest.get(key), kind):
            raise CheckpointError(f"{where} has {key}: {manifest.get(key)!r}; expected a {kind.__name__}")
    for name, entry in manifest["files"].items():
        if not isinstance(entry, dict) or not entry.keys() >= {"sha256", "size"}:
            raise CheckpointError(f"{where} gives no hash and size for {name!r}")
    return manifest


def _verify_file(root: Path, name: str, entry: dict[str, Any]) -> None:
    if not _is_safe(name):
        raise CheckpointError(f"{root / MANIFEST} names {name!r}, which leads out of the checkpoint; do not trust it")
    path = root / name
    for part in (path, *(root / parent for parent in PurePosixPath(name).parents if str(parent) != ".")):
        # A link could lead to a file outside, which the hash alone would not show.
        if part.is_symlink():
            raise CheckpointError(f"{part} is a symbolic link; a checkpoint holds files only")
    if not path.is_file():
        raise CheckpointError(f"{path} is missing")
    try:
        size, digest = path.stat().st_size, _sha256(path)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if (size, digest) != (entry["size"], entry["sha256"]):
        raise CheckpointError(f"{path} is damaged: its size or SHA-256 is not the one in {MANIFEST}")


def _is_safe(name: str) -> bool:
    parts = name.split("/")
    return not any(part in ("", ".", "..") or "\\" in part or ":" in part or "\0" in part for part in parts)


def _hashes(manifest: dict[str, Any]) -> dict[str, str]:
    return {name: entry["sha256"] for name, entry in manifest["files"].items()}


def _manifest_hash(manifest: dict[str, Any]) -> str:
    rest = {key: value for key, value in manifest.items() if key != "manifest_sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


# ------------------------------------------------------------------------------------------------------------- files


def versions() -> dict[str, str]:
    """Versions of the packages that a resumed run must share to give the same numbers."""
    names = ("mafrt", "torch", "transformers", "peft")
    return {"python": platform.python_version()} | {name: _package_version(name) for name in names}


@cache
def _package_version(name: str) -> str:
    # Kept, since each look parses the package's whole description.
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "absent"


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        # In pieces, since weights may be larger than the memory that is free.
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _is_disk_error(error: BaseException) -> bool:
    """Whether the disk, not our code, is to blame. safetensors and torch hide the errno in messages of their own."""
    if isinstance(error, CheckpointError) or not isinstance(error, Exception):
        return False
    # safetensors and torch raise errors of their own for a full disk, with the reason in the text only.
    hidden = ("os error 28", "No space left", "inline_container")
    return isinstance(error, OSError) or any(text in str(error) for text in hidden)


def _free_mib(path: Path) -> int:
    while not path.exists():
        path = path.parent
    return shutil.disk_usage(path).free >> 20
