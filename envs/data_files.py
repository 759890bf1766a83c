"""Reads the files that hold a user's tasks: regular files, one sentence for each fault, clean texts.

A lone surrogate (`"\\ud83d"`), NUL or another control character of a data set would end a run in the tokenizer or in a
file name much later; a pipe or device would never end. Both are settled here, before any model is loaded.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mafrt.core import reading
from mafrt.core.errors import DataError, MissingExtraError
from mafrt.core.hf_datasets import dataset_rows, is_dataset
from mafrt.core.text import brief, clean_deep, error_line

MOST_MIB = 4096
"""Largest data file, unpacked."""
SUFFIXES = (".json", ".jsonl", ".ndjson", ".parquet")
Records = Iterator[tuple[str, Any]]
"""Pairs of where a record stands (`line 3`, `record 3`) and the record."""


def read_bytes(path: Path) -> bytes:
    """The content of a regular file, unpacked if it is gzip's. Raises DataError."""
    try:
        content = reading.read_file(path, most_mib=MOST_MIB)
    except FileNotFoundError:
        raise DataError(f"data file {path} cannot be read: it does not exist") from None
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror or error}); give a regular file") from error
    try:
        return reading.unpacked(content, most_mib=MOST_MIB)
    except OSError as error:
        raise DataError(f"{path} {error.strerror}") from error


def read_text(path: Path) -> str:
    """The text of a regular file in UTF-8. Raises DataError, which names the line of the first byte that is none."""
    content = read_bytes(path)
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise DataError(f"{path}, line {line}: is not UTF-8 text ({error.reason}); convert the file to UTF-8") from None


def load_json(path: Path, text: str) -> Any:
    """The JSON of a whole file; None if the file holds one object per line, as files named .json often do.

    Raises:
        DataError: it is neither.
    """
    try:
        return reading.parse_json(text)
    except json.JSONDecodeError as error:
        if error.msg == "Extra data" and text.lstrip().startswith("{"):
            return None
        raise DataError(f"{path}, line {error.lineno}: is not JSON ({error.msg}, column {error.colno})") from error
    except ValueError as error:
        raise DataError(f"{path}: is not JSON that can be used ({error_line(error)})") from error


def json_lines(path: Path, text: str) -> Iterator[tuple[str, Any]]:
    """`line 3` and its value, for each line that is not blank. Raises DataError."""
    # Not `splitlines`: JSON texts may hold U+2028 and its like unescaped.
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            yield f"line {number}", reading.parse_json(line)
        except json.JSONDecodeError as error:
            raise DataError(f"{path}, line {number}: is not JSON ({error.msg}, column {error.colno})") from error
        except ValueError as error:
            raise DataError(f"{path}, line {number}: is not JSON that can be used ({error_line(error)})") from error


def kind_of(path: Path) -> str:
    """The suffix that tells what a file holds; `.gz` behind it does not."""
    inner = path.with_suffix("") if path.suffix.lower() == ".gz" else path
    return inner.suffix.lower()


def file_records(path: Path) -> Records:
    """The records of a JSON, JSONL or Parquet file, packed by gzip or not, or of a data set. Raises DataError."""
    if is_dataset(path):
        return ((where.rpartition(", ")[2], row) for where, row in dataset_rows(path))
    suffix = kind_of(path)
    if suffix == ".parquet":
        return _parquet_records(path)
    if suffix not in SUFFIXES and path.is_file():  # of what is none, reading it says so
        raise DataError(
            f"{path}: unknown kind of file {suffix or path.suffix!r}; expected one of {', '.join(SUFFIXES)}"
        )
    text = read_text(path)
    if not text.strip():
        raise DataError(f"{path}: is empty; expected records")
    data = None if suffix != ".json" else load_json(path, text)
    return json_lines(path, text) if data is None else _json_records(path, data)


def _json_records(path: Path, data: Any) -> Records:
    if isinstance(data, dict):
        lists = [key for key, value in data.items() if isinstance(value, list)]
        if len(lists) == 1:
            data = data[lists[0]]
        elif not lists:
            data = [data]
        else:
            raise DataError(
                f"{path}: holds several lists ({', '.join(map(repr, lists))}); keep the one with the records"
            )
    if not isinstance(data, list):
        raise DataError(f"{path}: expected a list of records, found {brief(data)}")
    return ((f"record {number}", record) for number, record in enumerate(data, start=1))


def _parquet_records(path: Path) -> Records:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise MissingExtraError(f"{path}: Parquet needs pyarrow: pip install pyarrow") from error
    try:
        content = pyarrow.BufferReader(read_bytes(path))
        rows = pyarrow.parquet.read_table(content).to_pylist()
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{path}: is not a readable Parquet file ({error_line(error)})") from error
    return ((f"record {number}", row) for number, row in enumerate(rows, start=1))


def clean_record(where: str, record: Any) -> Any:
    """A record whose texts are valid Unicode without control characters.

    Raises:
        DataError: it is nested too deeply.
    """
    try:
        return clean_deep(record)
    except ValueError as error:
        raise DataError(f"{where}: {error}; make it flatter or leave it out") from error
