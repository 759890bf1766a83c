"""DSBench's modelling records as people have them on disk: JSON or JSON lines, with the tables beside them.

    {"prompt": ..., "answer": null, "metadata": {"task_id": ..., "data_type": ..., "train_file": ..., "test_file": ...,
     "answer_dir": ...}}

Paths are relative to `data_root`; leading folders that are not there are dropped (`./data/DSBench/data/...` is found
as well where `data_root` is the innermost folder). Which metric, target and id a task has stands in another file,
`dsbench_task_metrics.json`, or in the metadata themselves, which win: `metric`, `target_column`, `id_column`, and, if
known, `baseline_score` and `reference_score`.

An unusable record is reported with its fault, and skipped.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from mafrt.core.errors import DataError
from mafrt.core.text import brief, shortened
from mafrt.envs.data_files import clean_record, json_lines, load_json, read_text
from mafrt.envs.dsbench.tasks import ScoringRule, TabularTask, TaskTables, load_task

METRICS_FILE = "dsbench_task_metrics.json"
PLACES = ("", "data", "data/Bench", "Bench", "data/DSBench", "DSBench", "data_modeling")
"""Folders of a data root in which records and metrics are looked for."""


@dataclass(frozen=True)
class SkippedRecord:
    """A record that was skipped."""

    task: str
    what: str

    def __str__(self) -> str:
        return f"{self.task}: {self.what}"


@dataclass(frozen=True)
class Loaded:
    """Result of reading a file of records."""

    tasks: tuple[TabularTask, ...]
    problems: tuple[SkippedRecord, ...]


def find_records(data_root: Path) -> dict[str, Path]:
    """The files of records of a data root: `train` and `eval` by their names, or one file as `train`.

    Raises DataError if there is none, or more than can be told apart.
    """
    matches = sorted(
        {
            path.resolve()
            for place in PLACES
            for path in (data_root / place).glob("dsbench*.json*")
            if path.name != METRICS_FILE and path.suffix in (".json", ".jsonl")
        }
    )
    if not matches:
        looked = ", ".join(place or "." for place in PLACES)
        raise DataError(f"{data_root} holds no dsbench*.json or .jsonl (looked in {looked}); name it: --dataset_path")
    # A single file is for training, whatever its name.
    if len(matches) == 1:
        return {"train": matches[0]}
    named: dict[str, Path] = {}
    for path in matches:
        part = "train" if "train" in path.stem else "eval" if any(w in path.stem for w in ("eval", "test")) else ""
        if not part or part in named:
            raise DataError(
                f"{data_root} holds several files of records ({', '.join(p.name for p in matches)}); choose with "
                "--dataset_path and --eval_dataset_path"
            )
        named[part] = path
    return named


def load_records(
    path: Path,
    data_root: Path,
    task_metrics: Path | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> Loaded:
    """All tasks of a file of records, and the faults of unusable records.

    Args:
        task_metrics: the file of metrics; looked for beside the records and in the data root if not given.
        progress: told the name of each task before its tables are read.

    Raises:
        DataError: a file that cannot be read at all.
    """
    entries = _metrics(path, data_root, task_metrics)
    tasks: list[TabularTask] = []
    problems: list[SkippedRecord] = []
    seen: set[str] = set()
    for where, record in records_of(path):
        name = where
        try:
            record = clean_record(where, record)
            metadata = record.get("metadata") if isinstance(record, Mapping) else None
            if not isinstance(metadata, Mapping):
                raise DataError("is no object with a prompt and metadata")
            name = _text(metadata, "task_id")
            progress(name)
            if name in seen:
                raise DataError("occurs a second time; the first record counts")
            task = _task(name, record, entries.get(name, {}), data_root)
            seen.add(name)
            tasks.append(task)
        except DataError as error:
            problems.append(SkippedRecord(name, str(error)))
        except OSError as error:
            problems.append(SkippedRecord(name, f"{shortened(str(error.filename))} cannot be read ({error.strerror})"))
    if not tasks and not problems:
        raise DataError(f"{path} holds no records; expected objects with a prompt and metadata")
    return Loaded(tuple(tasks), tuple(problems))


def _task(name: str, record: Mapping[str, Any], entry: Mapping[str, Any], data_root: Path) -> TabularTask:
    prompt, fields = record.get("prompt"), {**entry, **record["metadata"]}
    if not isinstance(prompt, str) or not prompt.strip():
        raise DataError("the record has no prompt")
    for key in ("metric", "target_column", "id_column"):
        if key not in fields:
            raise DataError(f"no {key} is known; add the task to {METRICS_FILE}, or {key} to its metadata")
    target = fields["target_column"]
    if isinstance(target, list):
        if not target or not all(isinstance(name, str) for name in target):
            raise DataError(f"target_column is {brief(target)}; expected the name of a column, or a list of names")
    elif not isinstance(target, str):
        raise DataError(f"target_column is {brief(target)}; expected the name of a column, or a list of names")
    return load_task(
        name,
        prompt.strip(),
        TaskTables(
            _find(data_root, _text(fields, "train_file")),
            _find(data_root, _text(fields, "test_file")),
            _answers_file(_find(data_root, _text(fields, "answer_dir"))),
        ),
        ScoringRule(
            _text(fields, "metric"),
            target,
            _text(fields, "id_column"),
            _score(fields, "baseline_score"),
            _score(fields, "reference_score"),
        ),
        meta={"data_type": entry.get("task_type", ""), **record["metadata"]},
    )


def _find(data_root: Path, given: str) -> Path:
    """The first of `a/b/c`, `b/c`, `c` that is there under the data root; the whole path if none is."""
    path = Path(given)
    if path.is_absolute():
        return path
    parts = [part for part in PurePosixPath(given.replace("\\", "/")).parts if part != "."]
    for start in range(len(parts)):
        if (found := data_root.joinpath(*parts[start:])).exists():
            return found
    return data_root.joinpath(*parts)


def _answers_file(folder: Path) -> Path:
    """The file of answers in their folder: `test_answer.csv`, or the only CSV file there is."""
    if folder.is_file():
        return folder
    if not folder.is_dir():
        raise DataError(f"the folder of answers {folder} does not exist")
    matches = sorted(folder.glob("*.csv"))
    usual = folder / "test_answer.csv"
    if usual in matches:
        return usual
    if len(matches) != 1:
        named = ", ".join(path.name for path in matches) or "no CSV file"
        raise DataError(f"{folder} holds {named}; expected test_answer.csv, or a single CSV file")
    return matches[0]


def _text(fields: Mapping[str, Any], key: str) -> str:
    value = fields.get(key)
    if not isinstance(value, str) or not value.strip():
        raise DataError(f"{key} is {brief(value)}; expected a text that is not empty")
    return value.strip()


def _score(fields: Mapping[str, Any], key: str) -> float | None:
    value = fields.get(key)
    if value is None:
        return None
    try:
        number = float("nan") if isinstance(value, (bool, str)) else float(value)
    except (TypeError, OverflowError):
        number = float("nan")
    if not math.isfinite(number):
        raise DataError(f"{key} is {brief(value)}; expected a finite number")
    return number


def _metrics(path: Path, data_root: Path, given: Path | None) -> dict[str, Mapping[str, Any]]:
    """Task -> metric, target and id column; empty if there is no such file and none was asked for."""
    if given is None:
        options = [path.parent / METRICS_FILE, *(data_root / place / METRICS_FILE for place in PLACES)]
        given = next((option for option in options if option.is_file()), None)
        if given is None:
            return {}
    metrics = clean_record(str(given), load_json(given, read_text(given)))
    if not isinstance(metrics, dict) or not all(isinstance(entry, dict) for entry in metrics.values()):
        raise DataError(f"{given}: expected an object task -> {{metric, target_column, id_column}}")
    return metrics


def records_of(path: Path) -> Iterator[tuple[str, Any]]:
    """Pairs of where a record stands (`record 3`) and the record: a JSON list, one object, or an object a line."""
    text = read_text(path)
    data = None if path.suffix.lower() == ".jsonl" else load_json(path, text)
    if data is None:
        yield from json_lines(path, text)
    else:
        entries = data if isinstance(data, list) else [data]
        yield from ((f"record {number}", record) for number, record in enumerate(entries, start=1))
