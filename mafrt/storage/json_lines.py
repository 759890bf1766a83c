"""Files of JSON lines: append durably, encode safely, and drop lines after an iteration."""

from __future__ import annotations

import json
import logging
import math
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from mafrt.core import atomic_files
from mafrt.core.errors import CheckpointError
from mafrt.core.reading import lines_of

log = logging.getLogger(__name__)

_ITERATION = re.compile(rb'\{"iteration": (\d{1,18})[,}]')
_PLAIN = {int, str, bool, type(None)}
# Legal inside JSON strings, but `str.splitlines` of a reader would cut the line there.
_LINE_BREAKS = {0x85: "\\u0085", 0x2028: "\\u2028", 0x2029: "\\u2029"}


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
            # Unbuffered, so that a kill loses no line that was reported as written.
            self._file = open(self.path, "ab", buffering=0)  # noqa: SIM115 (kept open for the whole run)
            atomic_files.fsync(self.path.parent)
        end = os.fstat(self._file.fileno()).st_size
        try:
            view = memoryview(data)
            while view:
                view = view[self._file.write(view) :]
            os.fsync(self._file.fileno())
        except OSError as error:
            # Half a line would make the file unreadable for other tools.
            os.ftruncate(self._file.fileno(), end)
            raise CheckpointError(
                f"cannot append to {self.path}: {error}; {atomic_files.remedy(error, 'free some space')}, then go on "
                "with --load_path"
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
        # NaN is no JSON, and most readers refuse the whole line.
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): json_safe(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        kinds = set(map(type, value))
        # Long lists of numbers are most of what is written: nothing is done for each of their entries.
        if kinds <= _PLAIN or (kinds == {float} and all(map(math.isfinite, value))):
            return list(value) if isinstance(value, (list, tuple)) else sorted(value, key=str)
        return [
            json_safe(entry) for entry in (sorted(value, key=str) if isinstance(value, (set, frozenset)) else value)
        ]
    if hasattr(value, "item") and getattr(value, "ndim", 1) == 0:  # a scalar of numpy or torch
        return json_safe(value.item())
    return str(value)


def keep_until(path: Path, step: int, *, parse: bool = False) -> None:
    """Drop the lines after iteration `step` from a file of JSON lines, and half a line at the end if there is one.

    Only lines that `JsonLines` wrote are known: the iteration is read off their first bytes. Damaged lines of other
    iterations are taken out with a warning, and the file as it was is kept as `NAME.damaged`.

    Args:
        path: of the file; nothing is done if there is none.
        step: the last iteration whose lines stay.
        parse: whether lines are read as JSON too, which takes seconds for each gigabyte.

    Raises:
        CheckpointError: `path` is a folder, a device or a pipe.
    """
    if not path.is_file():
        # Opening a pipe that nothing reads waits for ever.
        if path.exists():
            raise CheckpointError(f"{path} is no regular file; move it away, or take the run from a copy")
        return
    length = holes = 0
    is_prefix = True
    damaged: list[int] = []
    for number, (line, keep, bad) in enumerate(_judged(path, step, parse), start=1):
        length += len(line) if keep else 0
        is_prefix = is_prefix and not (keep and holes)
        holes += not keep
        damaged += [number] if bad else []
    if damaged:
        aside = _free_name(path)
        shutil.copyfile(path, aside)
        log.warning(
            "%s: %d damaged %s (number %s), of which nothing can be read any more, %s left out; the file as it was is "
            "%s",
            *(path, len(damaged), "lines" if len(damaged) > 1 else "line", ", ".join(map(str, damaged[:5]))),
            *("are" if len(damaged) > 1 else "is", aside),
        )
    # Cut in place where possible, since episodes of a long run are gigabytes.
    if is_prefix:
        with open(path, "rb+") as file:
            file.truncate(length)
            os.fsync(file.fileno())
        return
    atomic_files.write_atomic(path, b"".join(line for line, keep, _ in _judged(path, step, parse) if keep))


def copy_until(source: Path, target: Path, step: int, *, parse: bool = False) -> None:
    """Write the whole lines of `source` up to iteration `step` to `target`, with a warning about damaged ones."""
    damaged = 0
    with open(target, "wb") as file:
        for line, keep, bad in _judged(source, step, parse):
            damaged += bad
            if keep:
                file.write(line)
    if damaged:
        log.warning("%s: %d damaged line%s left out of %s", source, damaged, " is" if damaged == 1 else "s are", target)


def _free_name(path: Path) -> Path:
    names = (path.with_name(f"{path.name}.damaged{f'.{number}' if number else ''}") for number in range(1000))
    return next(name for name in names if not name.exists())


def _judged(path: Path, step: int, parse: bool) -> Iterator[tuple[bytes, bool, bool]]:
    """(line, whether it is whole and of an iteration up to `step`, whether it is damaged)."""
    with open(path, "rb") as file:
        for line in _lines(path, file):
            prefix = _ITERATION.match(line)
            whole = prefix is not None and line.endswith(b"}\n") and b"\0" not in line and not (parse and _is_cut(line))
            early = prefix is not None and int(prefix[1]) <= step
            # A machine that lost its power may leave zeros or half a line at the end, of an iteration after `step`.
            bad = not whole and (early if prefix is not None else line.endswith(b"\n"))
            yield line, whole and early, bad


def _lines(path: Path, file: IO[bytes]) -> Iterator[bytes]:
    try:
        yield from lines_of(file)
    except OSError as error:
        raise CheckpointError(f"{path} {error.strerror}; move it away, or take the run from a copy") from None


def _is_cut(line: bytes) -> bool:
    """Whether a line is no JSON, such as two of which the first lost its end."""
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return True
    return False
