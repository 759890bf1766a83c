"""The metrics of DSBench's modelling tasks: 18 of them under 19 names (`qwk` is `quadratic_weighted_kappa`).

A metric takes two arrays whose rows stand for the same ids, `[rows, targets]`, and gives one number. The content
of the arrays depends on the metric's `kind`:

    values         numbers, as they are in the file
    labels         classes as whole numbers: their codes, or for `ordinal` metrics their own values; given: -1 is a
                   label that is no class
    scores         truth: codes of classes; given: any finite numbers, larger means more likely, either
                   `[rows, targets]` (likelihood of the last class of each binary target) or `[rows, classes]` for a
                   single target
    probabilities  as scores, but in [0, 1]
    ranking        truth: codes `[rows, 1]`; given: codes `[rows, 3]`, best guess first, -1 where there is none
    text           words

From scikit-learn and scipy where they have it. Where a correlation is not defined because the given column is
constant, it is 0: such a column says nothing about the order.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from mafrt.config.schema import unknown
from mafrt.core.errors import DataError

Array = Any
"""A numpy array; numpy is imported when a metric is computed."""

Kind = Literal["values", "labels", "scores", "probabilities", "ranking", "text"]

CLIP = 1e-15
"""Probabilities are kept this far from 0 and 1 in log_loss, as Kaggle does."""


@dataclass(frozen=True)
class Metric:
    """One metric: how it is computed and which way is up."""

    name: str
    kind: Kind
    higher: bool
    """whether more is better"""
    perfect: float
    """score of a submission that equals the answers"""
    compute: Callable[[Array, Array], float]
    least: float | None = None
    """smallest number that may be given; None: no limit"""
    ordinal: bool = False
    """whether the classes are whole numbers whose distance counts"""
    needs_spread: bool = False
    """whether a target that is constant in the answers has no score"""

    def better(self, one: float, other: float) -> bool:
        """Whether `one` is strictly better than `other`."""
        return one > other if self.higher else one < other


def metric_of(name: str) -> Metric:
    """The metric called `name`, in any spelling that DSBench uses. Raises DataError that names the nearest."""
    key = str(name).strip().lower().replace("-", "_").replace(" ", "_")
    key = SYNONYMS.get(key, key)
    if key not in METRICS:
        raise DataError(unknown("metric", str(name), [*METRICS, *SYNONYMS]))
    return METRICS[key]


def _columns(function: Callable[[Array, Array], float]) -> Callable[[Array, Array], float]:
    """The mean of a metric over the targets."""

    def mean(truth: Array, given: Array) -> float:
        return float(sum(function(truth[:, i], given[:, i]) for i in range(truth.shape[1])) / truth.shape[1])

    return mean


def _rmse(truth: Array, given: Array) -> float:
    from sklearn.metrics import root_mean_squared_error

    return float(root_mean_squared_error(truth, given))


def _mae(truth: Array, given: Array) -> float:
    from sklearn.metrics import mean_absolute_error

    return float(mean_absolute_error(truth, given))


def _medae(truth: Array, given: Array) -> float:
    from sklearn.metrics import median_absolute_error

    return float(median_absolute_error(truth, given))


def _rmsle(truth: Array, given: Array) -> float:
    from sklearn.metrics import root_mean_squared_log_error

    return float(root_mean_squared_log_error(truth, given))


def _r2(truth: Array, given: Array) -> float:
    from sklearn.metrics import r2_score

    return float(r2_score(truth, given))


def _smape(truth: Array, given: Array) -> float:
    """Percent, 0 to 200; a row where both are 0 counts 0."""
    import numpy as np

    size = np.abs(truth) + np.abs(given)
    # Where both are 0 the error is 0, and not 0 by 0.
    return float(200 * np.mean(np.abs(given - truth) / np.where(size == 0, 1, size)))


def _pearson(truth: Array, given: Array) -> float:
    from scipy.stats import pearsonr

    # A correlation with a constant is undefined; as a prediction it is worth nothing.
    if _constant(given):
        return 0.0
    with warnings.catch_warnings():
        # Nearly constant columns are computed all the same; the user could do nothing about a warning.
        warnings.simplefilter("ignore")
        return float(pearsonr(truth, given).statistic)


def _spearman(truth: Array, given: Array) -> float:
    from scipy.stats import spearmanr

    return 0.0 if _constant(given) else float(spearmanr(truth, given).statistic)


def _gini(truth: Array, given: Array) -> float:
    """Gini coefficient of the truth sorted by the predictions, over that sorted by itself.

    Rows that are given the same number share their truth equally, so that their order does not matter (Kaggle's
    script leaves them in the order of the file). For a binary target this is 2 AUC - 1.
    """
    return _area(truth, given) / _area(truth, truth)


def _area(truth: Array, given: Array) -> float:
    import numpy as np

    # Ties share their gain, or the order of rows in the file would decide about the score.
    _, group = np.unique(-given, return_inverse=True)
    shared = np.bincount(group, weights=truth) / np.bincount(group)
    gained = np.cumsum(shared[np.sort(group)]) / truth.sum()
    return float(gained.sum() - (len(truth) + 1) / 2)


def _accuracy(truth: Array, given: Array) -> float:
    from sklearn.metrics import accuracy_score

    return float(accuracy_score(truth, given))


def _f1(truth: Array, given: Array) -> float:
    """F1 of the last class of a binary target, the mean over all classes of another."""
    from sklearn.metrics import f1_score

    if truth.max() <= 1:
        # A label that is no class is simply not the positive one.
        return float(f1_score(truth == 1, given == 1, zero_division=0.0))
    # As scikit-learn does by default, but without the code of unknown labels, which is no class.
    met = sorted({*truth.tolist(), *given.tolist()} - {-1})
    return float(f1_score(truth, given, labels=met, average="macro", zero_division=0.0))


def _f1_micro(truth: Array, given: Array) -> float:
    """Each row has one label on either side, so this is the share of right rows."""
    from sklearn.metrics import f1_score

    return float(f1_score(truth, given, average="micro"))


def _kappa(truth: Array, given: Array) -> float:
    """Cohen's kappa with quadratic weights over the whole range; values without rows keep their gap."""
    import numpy as np
    from sklearn.metrics import cohen_kappa_score

    both = np.concatenate([truth, given])
    span = np.arange(int(both.min()), int(both.max()) + 1)
    # All agree on one class; the formula would divide by zero.
    if len(span) == 1:
        return 1.0
    return float(cohen_kappa_score(truth, given, labels=span, weights="quadratic"))


def _roc_auc(truth: Array, given: Array) -> float:
    """Area under the ROC curve; of several targets their mean, of several classes the mean of one against the rest."""
    from sklearn.metrics import roc_auc_score

    if truth.shape[1] == 1 and given.shape[1] > 1:
        codes, classes = truth[:, 0], given.shape[1]
        # Classes that are missing from the answers, or are all of them, have no curve.
        each = [float(roc_auc_score(codes == c, given[:, c])) for c in range(classes) if 0 < (codes == c).mean() < 1]
        return sum(each) / len(each)
    return float(sum(float(roc_auc_score(truth[:, i], given[:, i])) for i in range(truth.shape[1])) / truth.shape[1])


def _log_loss(truth: Array, given: Array) -> float:
    """Mean negative log-likelihood in nats.

    One target with a column per class, or several targets of which each row has exactly one (one-hot): the rows of
    the given probabilities are scaled to sum to 1, as Kaggle does. Otherwise the mean over binary targets.
    """
    import numpy as np
    from sklearn.metrics import log_loss

    if truth.shape[1] > 1 and (truth.sum(axis=1) == 1).all():
        truth = truth.argmax(axis=1)[:, None]
    if truth.shape[1] == 1 and given.shape[1] > 1:
        # Clipped, since one certain and wrong guess would otherwise make the mean infinite.
        share = np.clip(given, CLIP, 1 - CLIP)
        share = share / share.sum(axis=1, keepdims=True)
        return float(log_loss(truth[:, 0], share, labels=range(given.shape[1])))
    sure = np.clip(given, CLIP, 1 - CLIP)
    each = [
        float(log_loss(truth[:, i], np.stack([1 - sure[:, i], sure[:, i]], 1), labels=[0, 1]))
        for i in range(truth.shape[1])
    ]
    return sum(each) / len(each)


def _map_at_3(truth: Array, given: Array) -> float:
    """1, 1/2 or 1/3 for the place of the right label among three guesses, else 0; its mean over the rows."""
    import numpy as np

    hits = given[:, :3] == truth[:, :1]
    place = hits.argmax(axis=1) + 1
    return float(np.mean(np.where(hits.any(axis=1), 1 / place, 0.0)))


def _jaccard(truth: Array, given: Array) -> float:
    """Words in common over words in either, in lower case; two empty texts are equal."""

    def one(a: str, b: str) -> float:
        left, right = set(a.lower().split()), set(b.lower().split())
        return len(left & right) / len(left | right) if left | right else 1.0

    return sum(one(str(a), str(b)) for a, b in zip(truth, given, strict=True)) / len(truth)


def _constant(column: Array) -> bool:
    return bool((column == column[0]).all())


def _values(
    name: str,
    one: Callable[[Array, Array], float],
    *,
    higher: bool = False,
    perfect: float = 0.0,
    least: float | None = None,
    needs_spread: bool = False,
) -> Metric:
    return Metric(name, "values", higher, perfect, _columns(one), least, needs_spread=needs_spread)


METRICS: dict[str, Metric] = {
    metric.name: metric
    for metric in (
        _values("rmse", _rmse),
        _values("mcrmse", _rmse),
        _values("mae", _mae),
        _values("medae", _medae),
        _values("rmsle", _rmsle, least=0.0),
        _values("smape", _smape),
        _values("r2", _r2, higher=True, perfect=1.0, needs_spread=True),
        _values("pearson", _pearson, higher=True, perfect=1.0, needs_spread=True),
        _values("spearman", _spearman, higher=True, perfect=1.0, needs_spread=True),
        _values("normalized_gini", _gini, higher=True, perfect=1.0, needs_spread=True),
        Metric("accuracy", "labels", True, 1.0, _columns(_accuracy)),
        Metric("f1", "labels", True, 1.0, _columns(_f1)),
        Metric("f1_micro", "labels", True, 1.0, _columns(_f1_micro)),
        Metric("quadratic_weighted_kappa", "labels", True, 1.0, _columns(_kappa), ordinal=True, needs_spread=True),
        Metric("roc_auc", "scores", True, 1.0, _roc_auc, needs_spread=True),
        Metric("log_loss", "probabilities", False, 0.0, _log_loss),
        Metric("map_at_3", "ranking", True, 1.0, _map_at_3),
        Metric("jaccard", "text", True, 1.0, _columns(_jaccard)),
    )
}
"""By name."""

SYNONYMS = {
    "qwk": "quadratic_weighted_kappa",
    "auc": "roc_auc",
    "map@3": "map_at_3",
    "gini": "normalized_gini",
    "logloss": "log_loss",
}
"""Other names of the same metrics."""
