"""Reads problems and their answers from the files in which people have them.

JSON (a list, or an object that holds one), JSON lines, Parquet, a folder of such files, or the id of a Hugging Face
data set (`openai/gsm8k`, `openai/gsm8k:main:test`). The fields are found by their usual names unless they are given.

    MATH   {"problem", "final_answer"} or {"problem", "solution"} with the answer in \\boxed{}
    GSM8K  {"question", "answer"}, the answer's last line is `#### N`
    AIME, AMC  {"prompt", "answer"}; AMC's answers are floats: 142.0 is read as 142
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mafrt.core.errors import DataError
from mafrt.core.extras import package
from mafrt.core.hf_datasets import dataset_rows, is_dataset
from mafrt.core.hub import reachable, stay_offline
from mafrt.core.text import brief, keys_of
from mafrt.envs.data_files import SUFFIXES, Records, clean_record, file_records, kind_of
from mafrt.envs.math import arithmetic, stories
from mafrt.envs.math.answers import boxed, hash_answer, reference_fault

PROBLEM_FIELDS = ("problem", "question", "prompt", "input", "query", "instruction")
"""Looked for in this order, without regard to case."""
ANSWER_FIELDS = ("final_answer", "answer", "expected_answer", "gold", "target", "label", "solution", "output")
NESTED_ANSWERS = ("reward_model.ground_truth.target", "reward_model.ground_truth")
"""Looked for after those, as in verl's files."""
SHIPPED = Path(__file__).parent / "data"


@dataclass(frozen=True)
class Task:
    """One problem. `id` is unique within its source: the name of the file and the number of the record."""

    id: str
    problem: str
    answer: str
    meta: Mapping[str, Any] = field(default_factory=dict, compare=False)
    """The record's other fields, as they are."""


def load_tasks(
    source: Any = None,
    *,
    problem_field: str | None = None,
    answer_field: str | None = None,
    split: str = "train",
    needs_answer: bool = True,
) -> tuple[Task, ...]:
    """All tasks of `source`: a file, a folder, a Hugging Face data set id, a `Dataset` or `DatasetDict` (also a folder
    of `save_to_disk`), `stories:SPLIT` (`stories.py`), or `arithmetic:SPLIT` (`arithmetic.py`).

    None: the shipped word problems.

    Names of nested fields have dots, as in `reward_model.ground_truth`. Without `needs_answer` a record may lack one,
    and keeps all its fields in `meta`.

    `split` picks the part of the shipped problems and of a data set whose id names none. Raises DataError that names
    the file, the record and its fault; MissingExtraError if a data set id needs a package.
    """
    if source is None:
        path = SHIPPED / f"word_problems_{split}.jsonl"
        if not path.is_file():
            parts = sorted(p.stem.removeprefix("word_problems_") for p in SHIPPED.glob("word_problems_*.jsonl"))
            raise DataError(f"there is no split {split!r} of the shipped word problems; there are {', '.join(parts)}")
        source = path
    if str(source).startswith(arithmetic.PREFIX):
        pairs = arithmetic.problems(arithmetic.parse(str(source)))
        return tuple(Task(f"{source}:{n}", problem, answer) for n, (problem, answer) in enumerate(pairs))
    if str(source).startswith(stories.PREFIX):
        return _story_tasks(str(source))
    fields = _Fields(problem_field, answer_field, needs_answer)
    if is_dataset(source):
        name = Path(source).name if isinstance(source, (str, os.PathLike)) else "dataset"
        return tuple(_make_tasks(name, "", dataset_rows(source, split), fields))
    path = Path(source)
    if os.path.isdir(path):
        files = sorted(p for p in path.iterdir() if kind_of(p) in SUFFIXES)
        if not files:
            raise DataError(f"{path}: the folder holds none of {', '.join('*' + s for s in SUFFIXES)}")
        # The suffix stays in the ids here: a.json and a.parquet may lie side by side.
        return tuple(task for file in files for task in _make_tasks(file.name, str(file), file_records(file), fields))
    if os.path.exists(path):  # unlike `Path.exists`, False for a name that is too long
        return tuple(_make_tasks(path.stem, str(path), file_records(path), fields))
    if _looks_like_id(str(source)):
        name = str(source)
        return tuple(_make_tasks(name, f"data set {name}", _hub_records(name, split), fields))
    raise DataError(
        f"data file {path} does not exist; give a JSON, JSONL or Parquet file, or a Hugging Face data set id such as "
        "openai/gsm8k"
    )


def _story_tasks(source: str) -> tuple[Task, ...]:
    problems = stories.distinct(source.removeprefix(stories.PREFIX))
    return tuple(Task(f"{source}:{n}", story.problem, str(story.answer)) for n, story in enumerate(problems))


@dataclass(frozen=True)
class _Fields:
    """Names of the fields to read; None: the usual ones."""

    problem: str | None
    answer: str | None
    needs_answer: bool


def _make_tasks(name: str, shown: str, records: Records, fields: _Fields) -> list[Task]:
    tasks = []
    for number, (where, record) in enumerate(records):
        here = f"{shown}, {where}" if shown else where
        record = clean_record(here, record)
        if not isinstance(record, Mapping):
            raise DataError(f"{here}: expected an object with a problem and an answer, found {brief(record)}")
        problem_key = _field(here, record, "problem", fields.problem, PROBLEM_FIELDS)
        problem = _problem_text(here, problem_key, value_at(record, problem_key))
        answer_key = _answer_field(here, record, fields)
        answer = "" if answer_key is None else answer_text(value_at(record, answer_key))
        if fields.needs_answer:
            value = value_at(record, answer_key or "")
            marked = isinstance(value, str) and value.strip() != answer
            if fault := reference_fault(answer, marked=marked):
                if not answer and isinstance(value, (Mapping, list)) and value:
                    fault = "it is neither one text nor one number"
                raise DataError(
                    f"{here}: no answer can be read from {answer_key!r}: {brief(value)}; {fault} (expected a number, a "
                    "short answer, a text with \\boxed{...}, or one that ends in '#### N'; name another field with "
                    "answer_field, or take the record out)"
                )
        left_out = (problem_key, answer_key) if fields.needs_answer else ()
        tasks.append(Task(f"{name}:{number}", problem, answer, {k: v for k, v in record.items() if k not in left_out}))
    if not tasks:
        raise DataError(
            f"{shown or 'the data set'}: holds no records; expected at least one with a problem and an answer"
        )
    return tasks


def _answer_field(here: str, record: Mapping[str, Any], fields: _Fields) -> str | None:
    """The field of the answer; None where there is none and none is needed."""
    if fields.answer is None:
        nested = next((name for name in NESTED_ANSWERS if value_at(record, name) is not None), None)
        usual = {str(key).lower() for key, value in record.items() if value is not None} & set(ANSWER_FIELDS)
        if not usual and (nested is not None or not fields.needs_answer):
            return nested
    return _field(here, record, "answer", fields.answer, ANSWER_FIELDS)


def value_at(record: Mapping[str, Any], name: str) -> Any:
    """The value of a field, or of a nested one (`a.b`); None where there is none."""
    if name in record:
        return record[name]
    value: Any = record
    for part in name.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def answer_text(value: Any) -> str:
    """The reference answer as text: `#### 72` -> `72`, a solution's last \\boxed{}, 142.0 -> `142`."""
    if isinstance(value, bool) or value is None:
        return ""
    if isinstance(value, float):
        if not math.isfinite(value):
            return ""
        return str(int(value)) if value.is_integer() else repr(value)
    if isinstance(value, int):
        return str(value)
    if isinstance(value, (list, tuple)) and len(value) == 1:
        return answer_text(value[0])
    if not isinstance(value, str):
        return ""
    answer = boxed(value)
    if answer is None:
        answer = hash_answer(value)
    return (value if answer is None else answer).strip()


def _field(here: str, record: Mapping[str, Any], what: str, wanted: str | None, usual: tuple[str, ...]) -> str:
    has = f"it has {keys_of(record)}"
    if wanted is not None:
        if wanted not in record and value_at(record, wanted) is None:
            raise DataError(f"{here}: has no field {wanted!r} (asked for with {what}_field); {has}")
        return wanted
    by_name = {str(key).lower(): key for key in record}
    for name in usual:
        # A null answer beside a solution that has one: the solution counts.
        if name in by_name and record[by_name[name]] is not None:
            return by_name[name]
    raise DataError(
        f"{here}: no {what} found; {has}, expected one of {', '.join(usual)} with a value, or name it with {what}_field"
    )


def _problem_text(here: str, key: str, value: Any) -> str:
    # Chat-style records: the problem is the last message of the user.
    if isinstance(value, (list, tuple)) and value and all(isinstance(m, Mapping) and "content" in m for m in value):
        value = next((m["content"] for m in reversed(value) if m.get("role") == "user"), value[-1]["content"])
    if not isinstance(value, str) or not value.strip():
        raise DataError(f"{here}: the problem {key!r} must be a text that is not empty, found {brief(value)}")
    return value.strip()


def _looks_like_id(source: str) -> bool:
    """`owner/name` with optional `:config:split`, and not a path to a file."""
    name = source.split(":")[0]
    return (
        name.count("/") == 1
        and not name.startswith((".", "/", "~"))
        and not name.endswith((*SUFFIXES, ".gz", "/"))
        and source.count(":") <= 2
    )


def _hub_records(source: str, split: str) -> Records:
    if not os.environ.get("HF_HUB_OFFLINE") and not reachable():
        stay_offline()
    what = f"there is no file {source}, and reading it as a Hugging Face data set"
    load_dataset = package(what, "datasets", "datasets").load_dataset
    name, config, part = (*source.split(":"), "", "")[:3]
    # GSM8K has two configurations and no default one; papers use `main`.
    config = config or ("main" if name == "openai/gsm8k" else "")
    try:
        rows = load_dataset(name, config or None, split=part or split)
    except Exception as error:
        if isinstance(error, ConnectionError) and os.environ.get("HF_HUB_OFFLINE"):
            why = "the hub cannot be reached, and the local cache does not hold it; give a file"
            raise DataError(f"data set {source} cannot be loaded: {why}") from error
        first = (str(error).splitlines() or [""])[0]
        named = "" if part else f"; to name one of its splits, give {name}:{config or 'default'}:SPLIT"
        raise DataError(f"data set {source} cannot be loaded: {type(error).__name__}: {first}{named}") from error
    return ((f"record {number}", dict(row)) for number, row in enumerate(rows, start=1))
