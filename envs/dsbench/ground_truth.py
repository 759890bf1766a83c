"""Ground truth of a task: answers, classes and baseline. Never visible to an agent."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mafrt.core.errors import DataError
from mafrt.envs.dsbench.metrics import Array, Metric, metric_of
from mafrt.envs.dsbench.tables import label, missing, number, ordered, shown

if TYPE_CHECKING:
    import pandas


@dataclass(frozen=True)
class Answers:
    """The truth of one task, ready to be compared with."""

    metric: Metric
    id_column: str
    targets: tuple[str, ...]
    """target columns, in the order of the answers"""
    scored: tuple[int, ...]
    """which of the targets the metric can be computed on: all, but for constant ones where it needs spread"""
    ids: tuple[str, ...]
    classes: tuple[tuple[str, ...], ...]
    """the classes of each target in their order; empty where the metric takes numbers or text"""
    truth: Array = field(repr=False)
    """`[rows, scored targets]`, as `mafrt.envs.dsbench.metrics` has it for the metric's kind"""
    baseline: float
    """score of the best constant submission that the training targets suggest"""
    reference: float | None = None
    """score of a good solution, if one is known"""

    def normalised(self, value: float) -> float:
        """0 at the baseline or worse, 1 at the reference (at perfect answers if none is given) or better."""
        top = self.metric.perfect
        if self.reference is not None and self.metric.better(self.reference, self.baseline):
            top = self.reference
        if top == self.baseline:
            return 1.0 if not self.metric.better(top, value) else 0.0
        return min(1.0, max(0.0, (value - self.baseline) / (top - self.baseline)))

    def to_json(self) -> bytes:
        """As text, for the room in which submissions are scored."""
        fields = {name: getattr(self, name) for name in _FIELDS}
        return json.dumps({**fields, "metric": self.metric.name, "truth": self.truth.tolist()}).encode()

    @classmethod
    def from_json(cls, data: bytes) -> Answers:
        """Inverse of `to_json`."""
        import numpy as np

        fields = json.loads(data)
        metric = metric_of(fields["metric"])
        kinds = {"values": float, "text": object}
        return cls(
            metric=metric,
            id_column=fields["id_column"],
            targets=tuple(fields["targets"]),
            scored=tuple(fields["scored"]),
            ids=tuple(fields["ids"]),
            classes=tuple(map(tuple, fields["classes"])),
            truth=np.array(fields["truth"], dtype=kinds.get(metric.kind, int)),
            baseline=fields["baseline"],
            reference=fields["reference"],
        )


_FIELDS = ("id_column", "targets", "scored", "ids", "classes", "baseline", "reference")


def make_answers(
    metric: Metric,
    id_column: str,
    targets: Sequence[str],
    answers: pandas.DataFrame,
    train: pandas.DataFrame,
    copies: Sequence[tuple[Sequence[str], Sequence[str]]] = (),
    baseline: float | None = None,
    reference: float | None = None,
) -> Answers:
    """Encode the answers and score the baseline.

    Args:
        answers: id and targets of the test rows, all text.
        train: targets of the training rows, all text.
        copies: for a metric on text, columns that a submission could copy, each as (training rows, test rows).
        baseline: measured score of the baseline; None: computed here.
        reference: score of a good solution.

    Raises:
        DataError: a clause about a fault of the answers or the training targets.
    """
    import numpy as np

    targets = tuple(targets)
    truth_text, train_text = answers[list(targets)], train[list(targets)]
    if metric.kind != "text":
        # Where there are classes, one may be called None.
        empty = missing if metric.kind == "values" else (lambda cell: cell.lower() in ("", "nan"))
        for name in targets:
            if count := int(truth_text[name].map(empty).sum()):
                raise DataError(f"the answers lack {count} values of {name!r}")
        # A training row without its target is nothing unusual; there is just nothing to learn from it.
        train_text = train_text[~train_text.map(empty).any(axis=1)]
        if not len(train_text):
            raise DataError(f"no row of the training data has a value of {shown(targets)}")
    classes: tuple[tuple[str, ...], ...] = ()
    if metric.kind == "values":
        truth, known = _numbers(truth_text, metric, "answers"), _numbers(train_text, metric, "training data")
    elif metric.kind == "text":
        truth, known = truth_text.to_numpy(dtype=object), train_text.to_numpy(dtype=object)
    else:
        classes = tuple(ordered({label(cell) for cell in (*truth_text[n], *train_text[n])}) for n in targets)
        truth, known = (_codes(table, classes, metric) for table in (truth_text, train_text))
        _check_classes(metric, targets, classes)
    scored = tuple(range(len(targets)))
    if metric.needs_spread:
        scored = tuple(i for i in scored if len(np.unique(truth[:, i])) > 1)
        if not scored:
            raise DataError(f"the answers have one value only in {shown(targets)}, so {metric.name} is not defined")
        if metric.kind == "values" and metric.name == "normalized_gini" and (truth < 0).any():
            raise DataError("the answers hold negative values, for which normalized_gini is not defined")
    truth, known = truth[:, scored], known[:, scored]
    if baseline is None:
        baseline = _baseline(metric, truth, known, classes, copies)
    return Answers(
        metric, id_column, targets, scored, tuple(answers[id_column]), classes, truth, float(baseline), reference
    )


def _check_classes(metric: Metric, targets: Sequence[str], classes: Sequence[Sequence[str]]) -> None:
    for name, labels in zip(targets, classes, strict=True):
        if len(labels) < 2:
            raise DataError(f"the target {name!r} has the class {labels[0]!r} only; there is nothing to predict")
        if len(targets) > 1 and len(labels) > 2 and metric.kind in ("scores", "probabilities"):
            raise DataError(
                f"{metric.name} takes several targets with two classes each, but {name!r} has {len(labels)}"
            )
    if metric.kind == "ranking" and len(targets) > 1:
        raise DataError(f"{metric.name} takes one target, found {shown(targets)}")


def _numbers(table: pandas.DataFrame, metric: Metric, where: str) -> Array:
    import numpy as np

    columns = []
    for name in table:
        values = [number(cell) for cell in table[name]]
        bad = next((table[name].iloc[i] for i, v in enumerate(values) if v is None or not np.isfinite(v)), None)
        if bad is not None:
            raise DataError(f"the {where} hold {bad!r} in {name!r}, where {metric.name} takes numbers")
        columns.append(values)
    numbers = np.array(columns, dtype=float).T
    if metric.least is not None and (numbers < metric.least).any():
        raise DataError(f"the {where} hold {numbers.min():g}, but {metric.name} takes numbers from {metric.least:g} on")
    return numbers


def _codes(table: pandas.DataFrame, classes: Sequence[Sequence[str]], metric: Metric) -> Array:
    """Codes of the classes, `[rows, targets]`; the values themselves for an ordinal metric."""
    import numpy as np

    columns = []
    for name, labels in zip(table, classes, strict=True):
        if metric.ordinal:
            for cell in labels:
                value = number(cell)
                if value is None or not np.isfinite(value) or value != int(value) or abs(value) > 10_000:
                    raise DataError(f"the target {name!r} holds {cell!r}, but {metric.name} takes small whole numbers")
            code = {cell: int(float(cell)) for cell in labels}
        else:
            code = {cell: index for index, cell in enumerate(labels)}
        columns.append([code[label(cell)] for cell in table[name]])
    return np.array(columns, dtype=int).T


def _baseline(metric: Metric, truth: Array, known: Array, classes: Any, copies: Any) -> float:
    """Score of the best constant that the training targets `known` suggest."""
    import numpy as np

    rows = len(truth)

    def filled(row: Any) -> float:
        return metric.compute(truth, np.tile(np.asarray(row), (rows, 1)))

    if metric.kind == "text":
        # A constant text matches nothing; the equally cheap answer is a copy of a column of the test set.
        best = max(copies, key=lambda pair: metric.compute(known, _column(pair[0])), default=None)
        return metric.compute(truth, _column([""] * rows if best is None else best[1]))
    if metric.kind == "values":
        if metric.name in ("mae", "medae", "smape"):
            return filled(np.median(known, axis=0))
        return filled(np.expm1(np.log1p(known).mean(axis=0)) if metric.name == "rmsle" else known.mean(axis=0))
    if metric.kind == "labels":
        common = [np.unique(column, return_counts=True) for column in known.T]
        row = [values[counts.argmax()] for values, counts in common]
        if metric.name == "f1":
            # The positive class everywhere beats the majority, which may have no F1 at all.
            return max(filled(row), filled([1 for _ in row]))
        return filled(row)
    if metric.kind == "ranking":
        counts = np.bincount(known[:, 0], minlength=len(classes[0]))
        return filled((*np.argsort(-counts, kind="stable")[:3], -1, -1)[:3])
    if known.shape[1] == 1 and len(classes[0]) > 2:
        return filled(np.bincount(known[:, 0], minlength=len(classes[0])) / len(known))
    return filled(known.mean(axis=0))


def _column(texts: Sequence[str]) -> Array:
    import numpy as np

    return np.array(list(texts), dtype=object)[:, None]
