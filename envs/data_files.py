"""Reads the JSON files that hold a user's tasks: regular files in UTF-8, one sentence for each fault, clean texts.

A lone surrogate (`"\\ud83d"`), NUL or another control character of a data set would end a run in the tokenizer or in a
file name much later; a pipe or device would never end. Both are settled here, before any model is loaded.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mafrt.core import reading
from mafrt.core.errors import DataError
from mafrt.core.hf_datasets import dataset_rows, is_dataset
from mafrt.core.text import clean_deep, error_line

MOST_MIB = 4096
"""Largest data file."""


def read_bytes(path: Path) -> bytes:
    """The content of a regular file. Raises DataError."""
    try:
        return reading.read_file(path, most_mib=MOST_MIB)
    except FileNotFoundError:
        raise DataError(f"data file {path} cannot be read: it does not exist") from None
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror or error}); give a regular file") from error


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


def line_records(path: Path) -> Iterator[tuple[str, Any]]:
    """`FILE, line 3` and its value, of JSON lines, or of the rows of a data set's folder. Raises DataError."""
    if is_dataset(path):
        yield from dataset_rows(path)
    else:
        yield from ((f"{path}, {place}", value) for place, value in json_lines(path, read_text(path)))


def clean_record(where: str, record: Any) -> Any:
    """A record whose texts are valid Unicode without control characters.

    Raises:
        DataError: it is nested too deeply.
    """
    try:
        return clean_deep(record)
    except ValueError as error:
        raise DataError(f"{where}: {error}; make it flatter or leave it out") from error
