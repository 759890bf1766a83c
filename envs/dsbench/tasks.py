"""A modelling task: description, tables, and hidden answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from mafrt.core.errors import DataError
from mafrt.core.reading import read_file
from mafrt.envs.dsbench.ground_truth import Answers, make_answers
from mafrt.envs.dsbench.metrics import metric_of
from mafrt.envs.dsbench.tables import MOST_MIB, TableError, header_of, places, read_columns, shown


@dataclass(frozen=True)
class TabularTask:
    """One task. Made by `load_task`, which has checked that its parts fit each other."""

    id: str
    description: str
    """description of the task in the record's own words"""
    train_path: Path
    test_path: Path
    answers: Answers
    meta: Mapping[str, Any] = field(default_factory=dict, compare=False)
    """the record's metadata, as it is; tasks are stratified by `data_type`"""

    @property
    def files(self) -> dict[str, bytes]:
        """Initial files of the workspace: name -> content. Raises DataError."""
        try:
            return {"train.csv": _content(self.train_path), "test.csv": _content(self.test_path)}
        except OSError as error:
            raise DataError(f"task {self.id}: {error.filename} cannot be read ({error.strerror})") from error

    @property
    def data_type(self) -> str:
        return str(self.meta.get("data_type", ""))

    @property
    def size_mib(self) -> float:
        """of the tables of the workspace"""
        return (self.train_path.stat().st_size + self.test_path.stat().st_size) / 2**20


@lru_cache(maxsize=16)
def _content(path: Path) -> bytes:
    """A table's bytes, shared by all episodes of a task that are under way; those of every task would be too many."""
    return read_file(path, most_mib=MOST_MIB)


@dataclass(frozen=True)
class TaskTables:
    """The CSV files of a task."""

    train: Path
    test: Path
    answers: Path
    """never shown to the agents"""


@dataclass(frozen=True)
class ScoringRule:
    """How a submission is scored."""

    metric: str
    """name in `mafrt.envs.dsbench.metrics`"""
    target: str | Sequence[str]
    """target columns; `N_labels`: the answers have N columns beside the id, and all of them are targets"""
    id_column: str
    baseline: float | None = None
    """score that counts as 0; None: that of a constant prediction"""
    reference: float | None = None
    """score that counts as 1; None: the best possible"""


def load_task(
    id: str, description: str, tables: TaskTables, scoring: ScoringRule, meta: Mapping[str, Any] | None = None
) -> TabularTask:
    """Read the tables as far as scoring needs them, and check them against each other.

    Raises:
        DataError: one sentence about the fault, without the task's name.
    """
    chosen, id_column = metric_of(scoring.metric), scoring.id_column
    train_path, test_path, answers_path = tables.train, tables.test, tables.answers
    for path in (train_path, test_path, answers_path):
        if not path.is_file():
            raise DataError(f"{path} is no file" if path.exists() else f"{path} does not exist")
    names, train_names, test_names = header_of(answers_path), header_of(train_path), header_of(test_path)
    for path, columns in ((test_path, test_names), (answers_path, names)):
        if id_column not in columns:
            raise DataError(f"{path} has no id column {id_column!r}; it has {shown(columns)}")
    targets = target_names(scoring.target, id_column, names)
    for path, columns in ((answers_path, names), (train_path, train_names)):
        if absent := [name for name in targets if name not in columns]:
            raise DataError(f"{path} has no target column {shown(absent)}; it has {shown(columns)}")
    if open_ones := [name for name in targets if name in test_names]:
        raise DataError(f"{test_path} holds the target {shown(open_ones)} itself, which gives the answers away")
    table, test = read_columns(answers_path, [id_column, *targets]), read_columns(test_path, [id_column])
    for path, ids in ((answers_path, table[id_column]), (test_path, test[id_column])):
        if len(ids) > ids.nunique():
            raise DataError(f"{path} has {len(ids) - ids.nunique()} of its ids in {id_column!r} more than once")
    try:
        places(test[id_column].tolist(), table[id_column].tolist())
    except TableError as error:
        raise DataError(f"the answers do not match the rows of test.csv: {answers_path} {error}") from error
    train = read_columns(train_path, targets)
    copies = []
    if chosen.kind == "text":
        shared = [name for name in test_names if name in train_names and name != id_column]
        left, right = read_columns(train_path, shared), _in_order(test_path, [id_column, *shared], table[id_column])
        copies = [(left[name].tolist(), right[name].tolist()) for name in shared]
    answers = make_answers(chosen, id_column, targets, table, train, copies, scoring.baseline, scoring.reference)
    return TabularTask(id, description, train_path, test_path, answers, dict(meta or {}))


def target_names(target: str | Sequence[str], id_column: str, names: Sequence[str]) -> list[str]:
    """The target columns that a task's entry means."""
    if not isinstance(target, str):
        return list(target)
    count, _, word = target.partition("_")
    if target in names or word != "labels" or not count.isdigit():
        return [target]
    rest = [name for name in names if name != id_column]
    if len(rest) != int(count):
        raise DataError(f"the target is {target!r}, but the answers have {len(rest)} columns beside the id")
    return rest


def _in_order(path: Path, columns: list[str], ids: Sequence[str]) -> Any:
    """Rows of a table in the order of these ids."""
    table = read_columns(path, columns)
    return table.iloc[places(list(ids), table[columns[0]].tolist())]
