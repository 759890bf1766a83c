"""Data sets of Hugging Face's `datasets`: in memory, and folders that `save_to_disk` has written."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mafrt.core.atomic_files import new_folder
from mafrt.core.errors import DataError
from mafrt.core.extras import package
from mafrt.core.text import error_line


def is_dataset(source: object) -> bool:
    """Whether `source` is a `Dataset` or `DatasetDict`, or a folder that holds one."""
    if isinstance(source, (str, os.PathLike)):
        folder = os.fspath(source)
        return any(os.path.isfile(os.path.join(folder, name)) for name in ("dataset_dict.json", "state.json"))
    parts = list(source.values()) if isinstance(source, Mapping) else [source]
    return bool(parts) and all(hasattr(part, "column_names") and hasattr(part, "with_format") for part in parts)


def dataset_rows(source: Any, split: str = "train") -> Iterator[tuple[str, dict[str, Any]]]:
    """`data set FOLDER, row 3` and the row, of each; of several parts those of `split`, or of the only one.

    Raises:
        DataError: the folder cannot be read, or has several parts of which none is `split`.
        MissingExtraError: it needs `datasets`.
    """
    name = "the data set"
    if isinstance(source, (str, os.PathLike)):
        name = f"data set {os.fspath(source)}"
        load = load_datasets(f"{name}, which save_to_disk has written,").load_from_disk
        try:
            source = load(os.fspath(source))
        except Exception as error:  # of pyarrow, json, the file system, and of its own
            raise DataError(f"{name} cannot be read: {error_line(error)}; write it again by save_to_disk") from error
    if isinstance(source, Mapping):
        parts = dict(source)
        if split not in parts and len(parts) != 1:
            raise DataError(
                f"{name} has the parts {', '.join(map(str, parts))} and none of the name {split}; give one of them, "
                "such as FOLDER/NAME of a folder"
            )
        source = parts.get(split) if split in parts else next(iter(parts.values()))
    for number, row in enumerate(source.with_format(None), start=1):
        yield f"{name}, row {number}", dict(row)


def write_dataset(rows: Sequence[Mapping[str, Any]], folder: Path) -> None:
    """Write rows of equal fields as a `Dataset`, whole or not at all. Raises MissingExtraError."""
    datasets = load_datasets()
    datasets.disable_progress_bars()
    made = datasets.Dataset.from_list([dict(row) for row in rows])
    with new_folder(folder) as draft:
        made.save_to_disk(str(draft))


def load_datasets(what: str = "writing a data set") -> Any:
    """The package. Raises MissingExtraError that begins with `what` needs it."""
    return package(what, "datasets", "datasets")
