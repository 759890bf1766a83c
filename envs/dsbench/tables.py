"""CSV files as people and agents write them: read as text, checked, and compared by the value of a cell.

Cells stay text until their column's meaning is known: `007` may be an id, `1.0` a class that another file calls `1`.
"""

from __future__ import annotations

import csv
import io
import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mafrt.core.errors import DataError, MissingExtraError
from mafrt.core.reading import read_file
from mafrt.core.text import clean_text, counted

if TYPE_CHECKING:
    import pandas

MISSING = frozenset({"", "nan", "na", "n/a", "null", "none", "<na>", "nat"})
"""How a missing cell is written, in lower case."""

MOST_MIB = 4096
"""Largest table that is read."""

MOST_COLUMNS = 50_000
"""Widest table of an agent that is read: pandas takes seconds for more, and minutes for a million."""

_WHOLE = re.compile(r"([+-]?\d+)\.0*")


class TableError(ValueError):
    """A table that cannot be used, in a clause that fits behind the name of the file."""


def pandas_module() -> Any:
    """pandas. Raises MissingExtraError that names the package to install."""
    try:
        import pandas
        import scipy  # noqa: F401
        import sklearn  # noqa: F401
    except ImportError as error:
        # Here, as the room in which files are judged holds the modules that judge, and not this one.
        from mafrt.core.extras import install

        raise MissingExtraError(
            f"DSBench needs pandas, scikit-learn and scipy ({error.name} is missing): {install('dsbench')}"
        ) from error
    return pandas


def header_of(path: Path) -> list[str]:
    """The column names of a CSV file. Raises DataError."""
    return _header(path, _content(path))


def _content(path: Path) -> bytes:
    try:
        return read_file(path, most_mib=MOST_MIB)
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror or error})") from error


def _header(path: Path, content: bytes) -> list[str]:
    try:
        # A CSV row may go over several lines, so that the first line alone does not do.
        names = next(csv.reader(io.TextIOWrapper(io.BytesIO(content), "utf-8-sig", newline="")), None)
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text ({error.reason}); convert the file to UTF-8") from error
    except csv.Error as error:
        raise DataError(f"{path} is not a CSV file ({error})") from error
    if not names or not any(name.strip() for name in names):
        raise DataError(f"{path} is empty; expected a line of column names and rows below it")
    return [clean_text(name).strip() for name in names]


def read_columns(path: Path, columns: Sequence[str]) -> pandas.DataFrame:
    """These columns of a CSV file as text, the spaces around cells taken off. Raises DataError."""
    pd = pandas_module()
    content = _content(path)
    names = _header(path, content)
    for name in columns:
        if name not in names:
            raise DataError(f"{path} has no column {name!r}; it has {shown(names)}")
    try:
        table = pd.read_csv(
            io.BytesIO(content),
            dtype=str,
            keep_default_na=False,
            encoding="utf-8-sig",
            header=0,
            names=names if len(set(names)) == len(names) else None,
            usecols=list(columns),
            index_col=False,
        )
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text ({error.reason}); convert the file to UTF-8") from error
    except (ValueError, pd.errors.ParserError) as error:
        raise DataError(f"{path} is not a readable CSV file ({_first_line(error)})") from error
    if not len(table):
        raise DataError(f"{path} has column names but no rows")
    return table[list(columns)].apply(lambda column: column.fillna("").map(clean_text).str.strip())


def parse_table(data: bytes) -> pandas.DataFrame:
    """A CSV made by an agent, all cells text. Raises TableError."""
    pd = pandas_module()
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise TableError(f"is not UTF-8 text ({error.reason})") from error
    if "\x00" in text:
        raise TableError("holds NUL characters")
    try:
        names = [name.strip() for name in next(csv.reader(io.StringIO(text)), [])]
    except csv.Error as error:
        raise TableError(f"is not a CSV file ({error})") from error
    if not any(names):
        raise TableError("is empty; expected a line of column names and rows below it")
    if len(names) > MOST_COLUMNS:
        raise TableError(f"has {len(names)} columns; at most {MOST_COLUMNS} are read")
    if twice := sorted(name for name, count in Counter(names).items() if count > 1):
        raise TableError(f"has the column {twice[0]!r} twice")
    try:
        table = pd.read_csv(
            io.StringIO(text), dtype=str, keep_default_na=False, header=0, names=names, index_col=False, engine="c"
        )
    except (ValueError, pd.errors.ParserError, pd.errors.EmptyDataError) as error:
        raise TableError(f"is not a readable CSV file ({_first_line(error)})") from error
    return table.apply(lambda column: column.fillna("").astype(str).str.strip())


def missing(cell: str) -> bool:
    """Whether a cell holds no value."""
    return cell.strip().lower() in MISSING


def label(cell: str) -> str:
    """The one spelling of a class: `1.0` and `1` are the same, and so are `true` and `True`."""
    cell = cell.strip()
    if whole := _WHOLE.fullmatch(cell):
        cell = whole[1]
    lower = cell.lower()
    return lower.capitalize() if lower in ("true", "false") else cell


def ordered(classes: Iterable[str]) -> tuple[str, ...]:
    """Classes in their order: numbers by value, False before True, others by the alphabet."""
    labels = sorted(set(classes))
    values = [number(name) for name in labels]
    if all(value is not None for value in values):
        labels.sort(key=float)
    return tuple(labels)


def number(cell: str) -> float | None:
    """The number in a cell, which may be infinite; None if there is none."""
    try:
        # int() and float() also read 1_000, which no CSV means.
        value = float(cell) if "_" not in cell else None
    except ValueError:
        return None
    return None if value is None or math.isnan(value) else value


def places(expected: Sequence[str], given: Sequence[str]) -> list[int]:
    """For each expected id, the row of `given` that has it. Raises TableError.

    Ids are compared as text; where that fails, as numbers or as points in time, since pandas writes `007` as 7 and
    `2020-01-01 00:00:00` as `2020-01-01`.
    """
    if len(given) != len(expected):
        raise TableError(f"has {counted(len(given), 'rows')}; expected {len(expected)}, one for each row of test.csv")
    problem = ""
    for read in (list, _as_numbers, _as_times):
        left, right = read(expected), read(given)
        if left is None or right is None or len(set(left)) < len(expected):
            continue
        row = {name: index for index, name in enumerate(right)}
        wanted = set(left)
        absent = [index for index, name in enumerate(left) if name not in row]
        if not absent:
            return [row[name] for name in left]
        if not problem:
            twice = len(right) - len(row)
            wrong = next((given[i] for i, name in enumerate(right) if name not in wanted), None)
            problem = f"lacks {len(absent)} of the ids, such as {expected[absent[0]]!r}"
            if twice:
                problem += f", and has {twice} of its ids more than once"
            elif wrong is not None:
                problem += f", and has {wrong!r} instead"
    raise TableError(problem)


def _as_numbers(ids: Sequence[str]) -> list[Any] | None:
    numbers = [number(name) for name in ids]
    return None if any(value is None for value in numbers) else numbers


def _as_times(ids: Sequence[str]) -> list[Any] | None:
    pd = pandas_module()
    try:
        return list(pd.to_datetime(pd.Series(ids, dtype=str), format="ISO8601"))
    except (ValueError, OverflowError):
        return None


def shown(names: Sequence[str], most: int = 8) -> str:
    """Names for a sentence; of many the first few."""
    quoted = [repr(name) for name in names[:most]]
    return ", ".join(quoted) + (f" and {len(names) - most} more" if len(names) > most else "")


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
