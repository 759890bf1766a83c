"""Atomic writes that survive a kill or a full disk, and state files that load without running code."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mafrt.core.errors import CheckpointError
from mafrt.core.flat_tensors import flattened, restored
from mafrt.core.reading import parse_json, read_file


def save_tensors(path: str | os.PathLike[str], state: Any) -> None:
    """Write tensors in plain containers (a `state_dict`), to be read by `load_tensors`."""
    import torch

    # Through memory, so that a full disk is an ordinary OSError instead of an abort inside torch's zip writer.
    buffer = io.BytesIO()
    torch.save(flattened(state), buffer)
    with open(path, "wb") as file:
        file.write(buffer.getbuffer())


def load_tensors(path: str | os.PathLike[str]) -> Any:
    """Load a file of `save_tensors` on the CPU (`weights_only`: no code in it is run). Raises CheckpointError."""
    import torch

    try:
        return restored(torch.load(path, map_location="cpu", weights_only=True))
    except Exception as error:  # torch raises many types of error on damaged input
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise CheckpointError(f"{path} holds no plain tensors that can be loaded: {reason[0]}") from error


def save_json(path: str | os.PathLike[str], value: Any) -> None:
    """Write JSON through a rename, durably: the file holds either the old value or the whole new one."""
    write_atomic(path, (json.dumps(value, indent=1, allow_nan=False) + "\n").encode())


def load_json(path: str | os.PathLike[str]) -> Any:
    """Read JSON. Raises CheckpointError if it is missing or cut."""
    try:
        return parse_json(read_file(path))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON: {error}") from error


def write_atomic(path: str | os.PathLike[str], data: bytes) -> None:
    """Replace a file so that a kill or a full disk leaves the old content or all of the new one."""
    path = Path(path)
    # In the same folder: a rename is atomic only within one file system.
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError):  # that of a full disk names no file
            error.filename = str(path)
        raise
    # The rename itself is only durable once the folder is on disk.
    fsync(path.parent)


def remedy(error: BaseException, of_disk: str) -> str:
    """What to do where a file cannot be written: `of_disk`, or the limit of the process that was met."""
    limits = {errno.EMFILE: "allow more open files (ulimit -n)", errno.EFBIG: "allow larger files (ulimit -f)"}
    return limits.get(error.errno or 0, of_disk) if isinstance(error, OSError) else of_disk


@contextlib.contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """A folder to write into, which takes the place of `path` at the end; a failure leaves the earlier one alone."""
    draft, old = path.with_name(f".{path.name}.tmp"), path.with_name(f".{path.name}.old")
    shutil.rmtree(draft, ignore_errors=True)
    # A folder cannot be replaced by a rename, so the earlier one is first set aside.
    if old.exists() and not path.exists():  # a kill between the two renames
        old.rename(path)
    try:
        yield draft
        if path.exists():
            shutil.rmtree(old, ignore_errors=True)
            path.rename(old)
        draft.rename(path)
        shutil.rmtree(old, ignore_errors=True)
    except OSError as error:
        if error.errno is not None and error.filename is None:  # that of a full disk names no file
            error.filename = str(path)
        raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def fsync(path: Path) -> None:
    """Wait until a file or folder is on disk."""
    if os.name == "nt" and path.is_dir():
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
