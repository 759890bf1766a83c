"""Every metric of DSBench against a computation of its own on random data, and the pitfalls of each."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from helpers_extras import need

np = pytest.importorskip("numpy")
need("pandas", "sklearn")

from mafrt.core.errors import DataError  # noqa: E402
from mafrt.envs.dsbench.metrics import METRICS, metric_of  # noqa: E402

SHARED = Path(__file__).parents[3] / "shared" / "data"
ALL_19 = [
    "accuracy",
    "f1",
    "f1_micro",
    "jaccard",
    "log_loss",
    "mae",
    "map_at_3",
    "mcrmse",
    "medae",
    "normalized_gini",
    "pearson",
    "quadratic_weighted_kappa",
    "qwk",
    "r2",
    "rmse",
    "rmsle",
    "roc_auc",
    "smape",
    "spearman",
]
SEEDS = range(5)


def test_all_nineteen_names_have_a_metric():
    assert len(ALL_19) == 19
    assert {metric_of(name).name for name in ALL_19} == set(METRICS)


def test_the_names_are_those_of_the_real_file():
    path = SHARED / "dsbench_task_metrics.json"
    if not path.exists():
        pytest.skip(f"{path} is not here")
    assert sorted({entry["metric"] for entry in json.loads(path.read_text()).values()}) == sorted(ALL_19)


def test_an_unknown_metric_names_the_nearest():
    with pytest.raises(DataError, match="did you mean 'roc_auc'"):
        metric_of("roc_acu")


# Independent computations: plain Python, straight from the definitions. Columns are lists.


def mean(values):
    values = list(values)
    return sum(values) / len(values)


def by_column(function):
    return lambda t, g: mean(function(a, b) for a, b in zip(zip(*t, strict=True), zip(*g, strict=True), strict=True))


def rmse(t, g):
    return math.sqrt(mean((a - b) ** 2 for a, b in zip(t, g, strict=True)))


def rmsle(t, g):
    return rmse([math.log(a + 1) for a in t], [math.log(b + 1) for b in g])


def mae(t, g):
    return mean(abs(a - b) for a, b in zip(t, g, strict=True))


def medae(t, g):
    errors = sorted(abs(a - b) for a, b in zip(t, g, strict=True))
    half = len(errors) // 2
    return errors[half] if len(errors) % 2 else (errors[half - 1] + errors[half]) / 2


def smape(t, g):
    return 100 * mean(0 if a == b == 0 else abs(a - b) / ((abs(a) + abs(b)) / 2) for a, b in zip(t, g, strict=True))


def r2(t, g):
    return 1 - sum((a - b) ** 2 for a, b in zip(t, g, strict=True)) / sum((a - mean(t)) ** 2 for a in t)


def pearson(t, g):
    mt, mg = mean(t), mean(g)
    top = sum((a - mt) * (b - mg) for a, b in zip(t, g, strict=True))
    return top / math.sqrt(sum((a - mt) ** 2 for a in t) * sum((b - mg) ** 2 for b in g))


def ranks(values):
    return [mean(i + 1 for i, w in enumerate(sorted(values)) if w == v) for v in values]


def spearman(t, g):
    return pearson(ranks(t), ranks(g))


def gini(t, g):
    def area(order):
        share, total = 0.0, 0.0
        for value in order:
            share += value / sum(t)
            total += share
        return total - (len(t) + 1) / 2

    by_given = [a for _, a in sorted(zip(g, t, strict=True), key=lambda pair: -pair[0])]
    return area(by_given) / area(sorted(t, reverse=True))


def accuracy(t, g):
    return mean(float(a == b) for a, b in zip(t, g, strict=True))


def f1_of(t, g, label):
    hits = sum(a == b == label for a, b in zip(t, g, strict=True))
    both = sum(a == label for a in t) + sum(b == label for b in g)
    return 2 * hits / both if both else 0.0


def f1(t, g):
    if max(t) <= 1:
        return f1_of(t, g, 1)
    return mean(f1_of(t, g, label) for label in sorted({*t, *g} - {-1}))


def kappa(t, g):
    seen = sum((a - b) ** 2 for a, b in zip(t, g, strict=True)) / len(t)
    chance = mean((a - b) ** 2 for a in t for b in g)
    return 1 - seen / chance


def pairs_auc(t, g):
    """Share of (positive, negative) pairs in the right order, ties half."""
    up, down = [b for a, b in zip(t, g, strict=True) if a], [b for a, b in zip(t, g, strict=True) if not a]
    return mean(1.0 if p > n else 0.5 if p == n else 0.0 for p in up for n in down)


def binary_log_loss(t, g):
    return -mean(math.log(b if a else 1 - b) for a, b in zip(t, g, strict=True))


def map_at_3(t, g):
    return mean(1 / (list(b).index(a[0]) + 1) if a[0] in b else 0.0 for a, b in zip(t, g, strict=True))


def jaccard(t, g):
    def one(a, b):
        a, b = set(a.lower().split()), set(b.lower().split())
        return len(a & b) / len(a | b)

    return mean(one(a, b) for a, b in zip(t, g, strict=True))


def compare(name, truth, given, expected):
    found = METRICS[name].compute(truth, given)
    assert isinstance(found, float)
    assert found == pytest.approx(expected(truth.tolist(), given.tolist()), abs=1e-9)


VALUES = {"rmse": rmse, "mcrmse": rmse, "mae": mae, "medae": medae, "smape": smape, "r2": r2, "pearson": pearson}
VALUES |= {"spearman": spearman}


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("targets", [1, 3])
@pytest.mark.parametrize("name", VALUES)
def test_metrics_on_numbers(name, targets, seed):
    rng = np.random.default_rng(seed)
    truth = rng.normal(size=(41 + seed, targets)).round(1)  # rounded: ties and zeros occur
    given = (truth + rng.normal(size=truth.shape)).round(1)
    compare(name, truth, given, by_column(VALUES[name]))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("targets", [1, 2])
def test_rmsle(targets, seed):
    rng = np.random.default_rng(seed)
    compare("rmsle", rng.exponential(9, (30, targets)), rng.exponential(9, (30, targets)), by_column(rmsle))


@pytest.mark.parametrize("seed", SEEDS)
def test_normalized_gini_without_ties(seed):
    rng = np.random.default_rng(seed)
    compare("normalized_gini", rng.exponential(2, (30, 1)), rng.normal(size=(30, 1)), by_column(gini))


@pytest.mark.parametrize("seed", SEEDS)
def test_normalized_gini_of_a_binary_target_is_two_auc_minus_one_with_ties_too(seed):
    rng = np.random.default_rng(seed)
    truth, given = rng.integers(0, 2, (50, 1)).astype(float), rng.integers(0, 4, (50, 1)).astype(float)
    compare("normalized_gini", truth, given, by_column(lambda t, g: 2 * pairs_auc(t, g) - 1))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("classes", [2, 5])
@pytest.mark.parametrize("name", ["accuracy", "f1", "f1_micro"])
def test_metrics_on_labels(name, classes, seed):
    rng = np.random.default_rng(seed)
    truth, given = rng.integers(0, classes, (60, 2)), rng.integers(-1, classes, (60, 2))  # -1: a label that is no class
    expected = {"accuracy": accuracy, "f1": f1, "f1_micro": accuracy}[name]
    compare(name, truth, given, by_column(expected))


@pytest.mark.parametrize("seed", SEEDS)
def test_quadratic_weighted_kappa(seed):
    rng = np.random.default_rng(seed)
    truth = rng.choice([3, 4, 8], (50, 1))  # 5 to 7 occur nowhere, and the gap counts all the same
    given = rng.choice([3, 4, 8, 7], (50, 1))
    compare("quadratic_weighted_kappa", truth, given, by_column(kappa))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("targets", [1, 3])
def test_roc_auc(targets, seed):
    rng = np.random.default_rng(seed)
    truth, given = rng.integers(0, 2, (40, targets)), rng.integers(0, 9, (40, targets)).astype(float)
    compare("roc_auc", truth, given, by_column(pairs_auc))


@pytest.mark.parametrize("seed", SEEDS)
def test_roc_auc_of_several_classes(seed):
    rng = np.random.default_rng(seed)
    truth, given = rng.integers(0, 4, (60, 1)), rng.normal(size=(60, 4))

    def expected(t, g):
        return mean(pairs_auc([row[0] == c for row in t], [row[c] for row in g]) for c in range(4))

    compare("roc_auc", truth, given, expected)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("targets", [1, 3])
def test_log_loss_of_binary_targets(targets, seed):
    rng = np.random.default_rng(seed)
    truth = rng.integers(0, 2, (40, targets))
    truth[0] = 1  # with several targets: not one-hot
    compare("log_loss", truth, rng.uniform(0.01, 0.99, truth.shape), by_column(binary_log_loss))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("one_hot", [True, False])
def test_log_loss_of_several_classes_scales_its_rows(one_hot, seed):
    rng = np.random.default_rng(seed)
    codes, given = rng.integers(0, 3, 40), rng.uniform(0.05, 1, (40, 3))
    truth = np.eye(3, dtype=int)[codes] if one_hot else codes[:, None]
    expected = -mean(math.log(row[c] / sum(row)) for row, c in zip(given.tolist(), codes.tolist(), strict=True))
    assert METRICS["log_loss"].compute(truth, given) == pytest.approx(expected, abs=1e-9)


def test_log_loss_of_a_sure_mistake_is_finite():
    # One of two rows is wrong with probability 0, kept at 1e-15: -ln(1e-15) / 2 = 17.27.
    found = METRICS["log_loss"].compute(np.array([[1], [0]]), np.array([[0.0], [0.0]]))
    assert found == pytest.approx(17.2694, abs=1e-3)


@pytest.mark.parametrize("seed", SEEDS)
def test_map_at_3(seed):
    rng = np.random.default_rng(seed)
    truth = rng.integers(0, 5, (30, 1))
    given = np.array([rng.permutation(5)[:3] for _ in range(30)])
    given[0, 1:] = -1
    compare("map_at_3", truth, given, map_at_3)


@pytest.mark.parametrize("seed", SEEDS)
def test_jaccard(seed):
    rng = np.random.default_rng(seed)

    def texts():
        return np.array([" ".join(rng.choice(list("abcDd"), rng.integers(1, 5))) for _ in range(30)], dtype=object)

    truth, given = texts()[:, None], texts()[:, None]
    compare("jaccard", truth, given, lambda t, g: jaccard([r[0] for r in t], [r[0] for r in g]))


def test_jaccard_of_two_empty_texts_is_one():
    empty = np.array([["", "a b"], ["", ""]], dtype=object).T  # rows: ("", ""), ("a b", "")
    assert METRICS["jaccard"].compute(empty[:, :1], empty[:, 1:]) == pytest.approx(0.5)


@pytest.mark.parametrize("name", ["pearson", "spearman"])
def test_a_constant_guess_has_no_correlation(name):
    truth = np.arange(5.0)[:, None]
    assert METRICS[name].compute(truth, np.full((5, 1), 0.1 + 0.2)) == 0.0


@pytest.mark.parametrize("name", METRICS)
def test_equal_answers_are_perfect_and_order_of_rows_does_not_count(name):
    rng = np.random.default_rng(3)
    metric = METRICS[name]
    codes = rng.integers(0, 2, (40, 1))
    if metric.kind == "text":
        truth = given = np.array([f"word{i} a" for i in range(40)], dtype=object)[:, None]
    elif metric.kind == "ranking":
        truth, given = codes, np.concatenate([codes, 1 - codes, np.full_like(codes, -1)], axis=1)
    elif metric.kind == "values":
        truth = given = rng.exponential(1, (40, 2))
    else:
        truth, given = codes, codes.astype(float) if metric.kind != "labels" else codes
    assert metric.compute(truth, given) == pytest.approx(metric.perfect, abs=1e-9)
    wrong = given[::-1]
    order = rng.permutation(40)
    assert metric.compute(truth[order], wrong[order]) == pytest.approx(metric.compute(truth, wrong), abs=1e-12)
    assert metric.better(metric.perfect, metric.compute(truth, wrong))


def test_all_targets_count():
    truth = np.array([[1.0, 1.0], [2.0, 5.0], [3.0, 2.0]])
    half = truth.copy()
    half[:, 1] += 3
    # The first column is right, the second is off by 3 everywhere: (0 + 3) / 2.
    for name in ("rmse", "mcrmse", "mae", "medae"):
        assert METRICS[name].compute(truth, half) == pytest.approx(1.5)
