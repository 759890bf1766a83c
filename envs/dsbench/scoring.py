"""From the bytes of a submission to its score: parse, join to the answers by id, validate, compute the task's metric.

A submission has the id column and, in any order of rows and columns,
- a column for each target, or
- where the metric takes likelihoods or a ranking and there is one target: a column for each of its classes, named as
  the class or as `TARGET_CLASS`.
For map_at_3, the target's column holds up to three classes, best first, with spaces between them (commas where a class
has a space in it).

Any fault makes a submission invalid, and the reason is given in words: a part of the rows earns no score.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mafrt.core.text import counted
from mafrt.envs.dsbench.ground_truth import Answers
from mafrt.envs.dsbench.metrics import Array
from mafrt.envs.dsbench.tables import TableError, label, missing, number, parse_table, places, shown

if TYPE_CHECKING:
    import pandas


MOST_MIB = 128
MOST_COLUMNS = 10
"""columns for each that could be expected"""
MOST_PROBLEM = 400
"""max characters of an error sentence"""
MOST_LINES = 100
"""lines for each row that is expected; texts may hold line breaks"""


@dataclass(frozen=True)
class SubmissionScore:
    """Score of a submission."""

    valid: bool
    problem: str | None = None
    """why it is not valid: a clause that follows `submission.csv`"""
    value: float | None = None
    """the task's own metric; None if it is not valid"""
    normalised: float = 0.0
    """0 at the baseline or below or if it is not valid, 1 at the reference or above"""
    above_baseline: bool = False


def score_submission(answers: Answers, data: bytes | None) -> SubmissionScore:
    """The score of a submission; `None` means that there is none."""
    import numpy as np

    if data is None:
        return SubmissionScore(False, "is missing")
    # Before it is parsed: what a program wrote may be as large as its workspace.
    if len(data) > MOST_MIB * 2**20:
        return SubmissionScore(False, f"has {len(data) / 2**20:.0f} MiB; expected at most {MOST_MIB}")
    # Counted in the raw bytes: a parser given a million columns takes minutes.
    columns = data[: data.find(b"\n") if b"\n" in data else len(data)].count(b",") + 1
    most = MOST_COLUMNS * (2 + len(answers.targets) + sum(map(len, answers.classes)))
    if columns > most:
        return SubmissionScore(False, f"has {columns} columns; expected at most {most}")
    lines = data.count(b"\n")
    if lines > MOST_LINES * (len(answers.ids) + 1):
        return SubmissionScore(
            False, f"has {counted(lines, 'lines')}; expected {len(answers.ids)} rows, one for each row of test.csv"
        )
    try:
        given = encode(answers, parse_table(data))
    except TableError as error:
        return SubmissionScore(False, str(error))
    # Absurd numbers overflow; the result is checked for that right below.
    with np.errstate(all="ignore"):
        value = answers.metric.compute(answers.truth, given)
    if not np.isfinite(value):
        return SubmissionScore(False, f"holds numbers so large that {answers.metric.name} is not finite")
    return SubmissionScore(True, None, value, answers.normalised(value), answers.metric.better(value, answers.baseline))


def score_files() -> dict[str, Any]:
    """In the judging room: the score of submission.csv against answers.json, as JSON."""
    answers = Answers.from_json(Path("answers.json").read_bytes())
    score = score_submission(answers, Path("submission.csv").read_bytes())
    return {**asdict(score), "problem": score.problem and score.problem[:MOST_PROBLEM]}


def read_score(answer: Mapping[str, Any]) -> SubmissionScore:
    """A score from the judging room's answer, every part of it checked."""
    valid, problem, value = answer.get("valid"), answer.get("problem"), answer.get("value")
    # Read as strictly as a stranger's answer, since it comes out of a process that parsed a model's file.
    if valid is not True or not isinstance(value, float) or not math.isfinite(value):
        return SubmissionScore(False, str(problem)[:MOST_PROBLEM] if problem else "could not be scored")
    normalised = answer.get("normalised")
    if not isinstance(normalised, (int, float)) or not 0 <= normalised <= 1:
        return SubmissionScore(False, "could not be scored")
    return SubmissionScore(True, None, value, float(normalised), answer.get("above_baseline") is True)


def encode(answers: Answers, table: pandas.DataFrame) -> Array:
    """The submission as the metric takes it, rows in the order of the answers. Raises TableError."""
    columns = _columns(answers, list(table.columns))
    # Joined by id and not by position, since a submission may be sorted in any way.
    rows = places(answers.ids, [str(cell) for cell in table[answers.id_column]])
    table = table.iloc[rows]
    if answers.metric.kind != "text":
        for name in columns:
            known = {one for classes in answers.classes for one in classes}
            if empty := sum(missing(cell) and cell not in known for cell in table[name]):
                raise TableError(f"has {empty} missing values in {name!r}")
    per_class = columns != list(answers.targets)
    kind = answers.metric.kind
    if kind == "text":
        return table[columns].to_numpy(dtype=object)[:, answers.scored]
    if kind == "values":
        return _numbers(table, columns, answers.metric.least)[:, answers.scored]
    if kind == "labels":
        return _labels(answers, table, columns)[:, answers.scored]
    if kind == "ranking":
        return _top_three(_numbers(table, columns)) if per_class else _ranking(answers, table[columns[0]])
    given = _numbers(table, columns) if per_class else _likelihoods(answers, table, columns)
    if kind == "probabilities" and ((given < 0).any() or (given > 1).any()):
        worst = given.min() if (given < 0).any() else given.max()
        raise TableError(f"has {worst:g} in {shown(columns)}; expected probabilities in [0, 1]")
    return given if per_class else given[:, answers.scored]


def _columns(answers: Answers, names: Sequence[str]) -> list[str]:
    """Columns of the predictions: the targets, or one per class in the order of the classes."""
    if answers.id_column not in names:
        raise TableError(f"has no id column {answers.id_column!r}; it has {shown(names)}")
    rest = [name for name in names if name != answers.id_column]
    # The order of columns is left to the submission; the names decide.
    if set(rest) == set(answers.targets):
        ranks = answers.metric.kind in ("scores", "probabilities") and len(answers.targets) == 1
        # One number cannot rank several classes; scored as it is, it would be a lucky guess.
        if ranks and len(answers.classes[0]) > 2:
            raise TableError(
                f"has one column {answers.targets[0]!r}, but {answers.metric.name} over {len(answers.classes[0])} "
                f"classes takes a column for each: {shown(answers.classes[0])}"
            )
        return list(answers.targets)
    if answers.metric.kind in ("scores", "probabilities", "ranking") and len(answers.targets) == 1:
        prefix = f"{answers.targets[0]}_"
        for start in ("", prefix):
            # With and without the target's name in front, since libraries write both.
            by_class = {label(name.removeprefix(start)): name for name in rest if name.startswith(start)}
            if set(by_class) == set(answers.classes[0]) and len(rest) == len(by_class):
                return [by_class[name] for name in answers.classes[0]]
    absent = [name for name in answers.targets if name not in rest]
    if absent:
        raise TableError(f"lacks the column {shown(absent)}; it has {shown(names)}")
    extra = [name for name in rest if name not in answers.targets]
    raise TableError(f"has columns that were not asked for: {shown(extra)}")


def _numbers(table: pandas.DataFrame, columns: Sequence[str], least: float | None = None) -> Array:
    import numpy as np

    numbers = []
    for name in columns:
        values = [number(cell) for cell in table[name]]
        bad = next((i for i, value in enumerate(values) if value is None or not np.isfinite(value)), None)
        if bad is not None:
            raise TableError(f"has {_brief(table[name].iloc[bad])} in {name!r}; expected finite numbers")
        low = min(value for value in values if value is not None)
        if least is not None and low < least:
            raise TableError(f"has {low:g} in {name!r}; expected numbers from {least:g} on")
        numbers.append(values)
    return np.array(numbers, dtype=float).T


def _likelihoods(answers: Answers, table: pandas.DataFrame, columns: Sequence[str]) -> Array:
    """Numbers; or the classes themselves where they are words: certain, then."""
    import numpy as np

    numbers = []
    for name, classes in zip(columns, answers.classes, strict=True):
        labels = [label(cell) for cell in table[name]]
        # Labels are taken as certain predictions; numbers that are classes too stay likelihoods.
        if set(labels) <= set(classes) and any(number(one) is None for one in classes):
            numbers.append(np.array([classes.index(one) for one in labels], dtype=float))
        else:
            numbers.append(_numbers(table, [name])[:, 0])
    return np.stack(numbers, axis=1)


def _labels(answers: Answers, table: pandas.DataFrame, columns: Sequence[str]) -> Array:
    """Codes of the classes, -1 for a label that is none; the values themselves for an ordinal metric."""
    import numpy as np

    labelled = []
    for name, classes in zip(columns, answers.classes, strict=True):
        labels = [label(cell) for cell in table[name]]
        # pandas writes booleans as 0 and 1 in many places.
        if set(classes) == {"False", "True"}:
            labels = [{"0": "False", "1": "True"}.get(one, one) for one in labels]
        known = {one: index for index, one in enumerate(classes)}
        strange = next((cell for cell in labels if cell not in known), None)
        if answers.metric.ordinal:
            low, high = int(float(classes[0])), int(float(classes[-1]))
            values = [number(cell) for cell in labels]
            bad = next((c for c, v in zip(labels, values, strict=True) if v is None or not _within(v, low, high)), None)
            if bad is not None:
                raise TableError(f"has {_brief(bad)} in {name!r}; expected whole numbers from {low} to {high}")
            labelled.append([int(value) for value in values if value is not None])
            continue
        if strange is not None and not any(cell in known for cell in labels):
            raise TableError(f"has no class of {name!r} but {_brief(strange)}; the classes are {shown(classes)}")
        labelled.append([known.get(cell, -1) for cell in labels])
    return np.array(labelled, dtype=int).T


def _within(value: float, low: int, high: int) -> bool:
    return low <= value <= high and value == int(value)


def _ranking(answers: Answers, column: pandas.Series) -> Array:
    import numpy as np

    known = {one: index for index, one in enumerate(answers.classes[0])}
    comma = any(" " in one for one in known)
    rows = []
    for cell in column:
        parts = [label(part) for part in (cell.split(",") if comma else cell.replace(",", " ").split())]
        # Repeated guesses count once, or one class given three times would fill all places.
        codes = [known.get(part, -1) for part in dict.fromkeys(parts)][:3]
        rows.append(codes + [-1] * (3 - len(codes)))
    ranks = np.array(rows, dtype=int)
    if (ranks == -1).all():
        raise TableError(
            f"has no class of {answers.targets[0]!r}, found {_brief(column.iloc[0])}; the classes are "
            f"{shown(answers.classes[0])}"
        )
    return ranks


def _top_three(given: Array) -> Array:
    import numpy as np

    # Stable, so that ties go to the first class on every machine.
    best = np.argsort(-given, axis=1, kind="stable")[:, :3]
    short = 3 - best.shape[1]
    return np.pad(best, ((0, 0), (0, short)), constant_values=-1) if short > 0 else best


def _brief(cell: str) -> str:
    return repr(cell if len(cell) <= 30 else cell[:27] + "...")
