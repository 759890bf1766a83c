"""From a submission's bytes to a score: joining, validation, several targets, classes, baselines."""

from __future__ import annotations

import io

import pytest
from helpers_extras import need

pd = pytest.importorskip("pandas")
np = pytest.importorskip("numpy")
need("sklearn")

from mafrt.core.errors import DataError  # noqa: E402
from mafrt.envs.dsbench.ground_truth import make_answers  # noqa: E402
from mafrt.envs.dsbench.metrics import METRICS, metric_of  # noqa: E402
from mafrt.envs.dsbench.scoring import score_submission  # noqa: E402
from mafrt.envs.dsbench.tables import label, ordered  # noqa: E402


def make(metric, truth, train=None, targets=("y",), ids=None, **more):
    """Answers from columns of values, as text."""
    truth = truth if isinstance(truth, dict) else {targets[0]: truth}
    train = truth if train is None else train if isinstance(train, dict) else {targets[0]: train}
    rows = len(next(iter(truth.values())))
    ids = list(range(100, 100 + rows)) if ids is None else ids
    table = pd.DataFrame({"id": ids, **truth}).astype(str)
    return make_answers(metric_of(metric), "id", targets, table, pd.DataFrame(train).astype(str), **more)


def csv(columns, ids=None):
    rows = len(next(iter(columns.values())))
    out = io.StringIO()
    pd.DataFrame({"id": range(100, 100 + rows) if ids is None else ids, **columns}).to_csv(out, index=False)
    return out.getvalue().encode()


def problem(answers, data):
    score = score_submission(answers, data)
    assert not score.valid
    assert score.value is None
    assert score.normalised == 0.0
    return score.problem


def value(answers, data):
    score = score_submission(answers, data)
    assert score.valid, score.problem
    return score.value


def test_rows_in_another_order_give_the_same_score():
    answers = make("rmse", [1.0, 2.0, 3.0, 5.0])
    straight = csv({"y": [1.0, 2.5, 3.0, 4.0]})
    shuffled = csv({"y": [4.0, 3.0, 1.0, 2.5]}, ids=[103, 102, 100, 101])
    # errors 0, .5, 0, 1: sqrt(1.25 / 4)
    assert value(answers, straight) == value(answers, shuffled) == pytest.approx(0.3125**0.5)


def test_a_submission_of_one_row_is_invalid():
    assert "has 1 row; expected 4" in problem(make("rmse", [1, 2, 3, 5]), csv({"y": [1.0]}))


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (None, "is missing"),
        (b"", "is empty"),
        (b"\xff\xfe\x00", "is not UTF-8 text"),
        (b"id,y\n100,1\n101,\x002\n", "NUL"),
        (b"y\n1\n2\n3\n5\n", "has no id column 'id'"),
        (b"id,z\n100,1\n101,2\n102,3\n103,5\n", "lacks the column 'y'"),
        (b"id,y,z\n100,1,0\n101,2,0\n102,3,0\n103,5,0\n", "columns that were not asked for: 'z'"),
        (b"id,y,y\n100,1,0\n101,2,0\n102,3,0\n103,5,0\n", "has the column 'y' twice"),
        (b"id,y\n100,1\n100,2\n102,3\n103,5\n", "more than once"),
        (b"id,y\n100,1\n777,2\n102,3\n103,5\n", "lacks 1 of the ids, such as '101', and has '777' instead"),
        (b"id,y\n100,1\n101,\n102,3\n103,5\n", "has 1 missing values in 'y'"),
        (b"id,y\n100,1\n101,nan\n102,3\n103,5\n", "has 1 missing values in 'y'"),
        (b"id,y\n100,1\n101,inf\n102,3\n103,5\n", "'inf' in 'y'; expected finite numbers"),
        (b"id,y\n100,1\n101,=1+1\n102,3\n103,5\n", "'=1+1' in 'y'; expected finite numbers"),
        (b"id,y\n100,1\n101,1_0\n102,3\n103,5\n", "'1_0' in 'y'"),
        (b'id,y\n100,"1\n101,2', "not a readable CSV"),
    ],
)
def test_what_makes_a_submission_invalid(data, why):
    assert why in problem(make("rmse", [1, 2, 3, 5]), data)


def test_all_targets_count():
    truth = {"a": [1.0, 2.0], "b": [5.0, 7.0]}
    answers = make("mae", truth, targets=("a", "b"))
    assert value(answers, csv(truth)) == 0.0
    assert value(answers, csv({"b": [5.0, 9.0], "a": [1.0, 2.0]})) == pytest.approx(0.5)
    assert "lacks the column 'b'" in problem(answers, csv({"a": [1.0, 2.0]}))


def test_string_classes_work():
    answers = make("accuracy", ["cat", "dog", "dog", "cow"])
    assert value(answers, csv({"y": ["cat", "dog", "cat", "cow"]})) == 0.75
    assert value(answers, csv({"y": ["cat", "dog", "bird", "cow"]})) == 0.75  # no class at all is simply wrong
    assert "the classes are 'cat', 'cow', 'dog'" in problem(answers, csv({"y": [0.2, 0.9, 0.1, 0.3]}))


def test_classes_are_compared_by_what_they_mean():
    assert value(make("accuracy", [0, 1, 1]), csv({"y": [0.0, 1.0, 1.0]})) == 1.0
    truth = make("accuracy", ["True", "False", "True"])
    assert value(truth, csv({"y": ["true", "false", "true"]})) == value(truth, csv({"y": [1, 0, 1]})) == 1.0


def test_a_class_called_none_is_no_missing_value():
    answers = make("accuracy", ["None", "Mild", "None"])
    assert value(answers, csv({"y": ["None", "Mild", "Mild"]})) == pytest.approx(2 / 3)


def test_f1_is_that_of_the_last_class():
    # Positive is yes: 1 hit, 1 missed, 1 too many: 2 / (2 + 1 + 1).
    answers = make("f1", ["yes", "yes", "no", "no"])
    assert value(answers, csv({"y": ["yes", "no", "yes", "no"]})) == 0.5


def test_probabilities_of_one_positive_class():
    answers = make("roc_auc", ["no", "yes", "no", "yes"])
    assert value(answers, csv({"y": [0.1, 0.4, 0.35, 0.8]})) == 1.0
    assert value(answers, csv({"y": ["no", "yes", "yes", "yes"]})) == 0.75  # classes are taken as certain
    assert value(answers, csv({"no": [0.9, 0.6, 0.65, 0.2], "yes": [0.1, 0.4, 0.35, 0.8]})) == 1.0


def test_probabilities_per_class_in_any_order_of_columns():
    answers = make("log_loss", ["a", "b", "c"])
    given = {"c": [0.2, 0.2, 0.6], "a": [0.5, 0.2, 0.2], "b": [0.3, 0.6, 0.2]}
    expected = -np.log([0.5, 0.6, 0.6]).mean()
    assert value(answers, csv(given)) == pytest.approx(expected)
    assert value(answers, csv({f"y_{name}": column for name, column in given.items()})) == pytest.approx(expected)
    assert "takes a column for each: 'a', 'b', 'c'" in problem(answers, csv({"y": [0.1, 0.2, 0.3]}))
    assert "expected probabilities in [0, 1]" in problem(answers, csv({**given, "a": [1.5, 0.2, 0.2]}))


def test_one_hot_targets():
    truth = {"win": [1, 0, 0], "lose": [0, 1, 0], "tie": [0, 0, 1]}
    answers = make("log_loss", truth, targets=("win", "lose", "tie"))
    given = {"win": [0.5, 0.25, 0.25], "lose": [0.25, 0.5, 0.25], "tie": [0.25, 0.25, 0.5]}
    assert value(answers, csv(given)) == pytest.approx(np.log(2))


def test_map_at_3_reads_three_guesses_or_a_column_per_class():
    answers = make("map_at_3", ["flu", "cold", "gout", "flu"])
    # right at once, second, third, not at all: (1 + 1/2 + 1/3 + 0) / 4
    given = csv({"y": ["flu cold gout", "flu cold", "flu cold gout", "cold"]})
    assert value(answers, given) == pytest.approx((1 + 1 / 2 + 1 / 3) / 4)
    assert value(answers, csv({"y": ["flu flu cold", "flu flu cold", "gout", "flu"]})) == pytest.approx(3.5 / 4)
    columns = {"cold": [0.2, 0.5, 0.1, 0.1], "flu": [0.7, 0.3, 0.2, 0.8], "gout": [0.1, 0.2, 0.7, 0.1]}
    assert value(answers, csv(columns)) == 1.0
    assert "no class of 'y'" in problem(answers, csv({"y": ["a b", "c", "d", "e"]}))


def test_ordinal_classes():
    answers = make("qwk", [3, 4, 8, 4], train=[3, 4, 8, 6])
    assert value(answers, csv({"y": [3, 4, 8, 4]})) == 1.0
    assert value(answers, csv({"y": [3.0, 4.0, 7.0, 4.0]})) < 1.0  # 7 is no class here, and between two all the same
    assert "whole numbers from 3 to 8" in problem(answers, csv({"y": [3, 4, 1e9, 4]}))
    assert "whole numbers from 3 to 8" in problem(answers, csv({"y": [3, 4, 7.5, 4]}))


def test_what_is_too_large_to_be_read_or_to_be_scored():
    answers = make("rmse", [1.0, 2.0])
    assert "lines; expected 2 rows" in problem(answers, b"id,y\n" + b"100,1\n" * 400)
    assert "MiB; expected at most 128" in problem(answers, b"x" * (129 * 2**20))
    assert "rmse is not finite" in problem(answers, csv({"y": [1e308, -1e308]}))


def test_rmsle_takes_nothing_below_zero():
    answers = make("rmsle", [1.0, 2.0])
    assert "expected numbers from 0 on" in problem(answers, csv({"y": [1.0, -0.5]}))


def test_ids_are_compared_as_numbers_and_times_where_text_fails():
    numbers = make("mae", [1, 2], ids=["007", "010"])
    assert value(numbers, b"id,y\n10,2\n7,1\n") == 0.0
    times = make("mae", [1, 2], ids=["2020-01-01 00:00:00", "2020-01-02 00:00:00"])
    assert value(times, b"id,y\n2020-01-02,2\n2020-01-01,1\n") == 0.0
    apart = make("mae", [1, 2], ids=["7", "007"])  # as numbers they would be one
    assert "lacks 1 of the ids" in problem(apart, b"id,y\n7,1\n7.0,2\n")


def test_text_is_scored_with_empty_cells():
    answers = make("jaccard", ["so good", "bad day"])
    assert value(answers, b"id,y\n100,so good\n101,\n") == 0.5


# Baselines and the normalised score.


def test_normalised_score_by_hand():
    # Baseline of rmse is the training mean, 2: errors 1, 1 -> 1. Perfect is 0, so rmse .25 is worth .75.
    answers = make("rmse", [1.0, 3.0], train=[1.0, 3.0])
    assert answers.baseline == pytest.approx(1.0)
    found = score_submission(answers, csv({"y": [1.25, 3.25]}))
    assert (found.value, found.normalised, found.above_baseline) == (pytest.approx(0.25), pytest.approx(0.75), True)
    worse = score_submission(answers, csv({"y": [9.0, 9.0]}))
    assert (worse.normalised, worse.above_baseline, worse.valid) == (0.0, False, True)
    # With .5 as what a good solution gets, halfway there is .75.
    known = make("rmse", [1.0, 3.0], reference=0.5)
    assert score_submission(known, csv({"y": [1.75, 3.75]})).normalised == pytest.approx(0.5)
    assert score_submission(known, csv({"y": [1.25, 3.25]})).normalised == 1.0


def test_a_reference_below_the_baseline_is_not_used():
    answers = make("rmse", [1.0, 3.0], reference=2.0)
    assert score_submission(answers, csv({"y": [1.25, 3.25]})).normalised == pytest.approx(0.75)


@pytest.mark.parametrize(
    ("metric", "truth", "train", "expected"),
    [
        ("mae", [0.0, 4.0], [0.0, 0.0, 9.0], 2.0),  # the median, 0
        ("rmsle", [0.0, 0.0], [np.e - 1, np.e - 1], 1.0),  # the mean of the logarithms, 1
        ("r2", [1.0, 3.0], [2.0, 2.0], 0.0),
        ("accuracy", ["a", "b", "b"], ["a", "a", "b"], 1 / 3),
        ("f1", [0, 1, 0, 0], [0, 0, 0, 1], 0.4),  # all positive: precision 1/4, recall 1
        ("qwk", [1, 2, 3], [1, 2, 2], 0.0),
        ("roc_auc", [0, 1, 1], [0, 1, 1], 0.5),
        ("log_loss", [0, 1], [0, 1, 1, 1], -(np.log(0.25) + np.log(0.75)) / 2),
        ("map_at_3", list("abcd"), list("aabbcd"), (1 + 1 / 2 + 1 / 3) / 4),
        ("normalized_gini", [0, 1], [0, 1], 0.0),
        ("pearson", [0.1, 0.5], [0.1, 0.5], 0.0),
    ],
)
def test_baselines_by_hand(metric, truth, train, expected):
    assert make(metric, truth, train).baseline == pytest.approx(expected, abs=1e-9)


def test_the_baseline_of_text_hands_a_column_back():
    answers = make("jaccard", ["b c", "d"], copies=[(["x", "y"], ["x", "y"]), (["b c", "d"], ["b c q", "d"])])
    assert answers.baseline == pytest.approx((2 / 3 + 1) / 2)


def test_no_constant_beats_the_baseline_by_much():
    """The baseline is what a constant suggested by the training rows gets: above it, something was learnt."""
    rng = np.random.default_rng(0)
    train, truth = rng.exponential(3, 300), rng.exponential(3, 200)
    for name in ("rmse", "mae", "rmsle"):
        answers = make(name, truth, train)
        best = min(METRICS[name].compute(answers.truth, np.full((200, 1), c)) for c in np.linspace(0, 9, 100))
        assert best <= answers.baseline < best * 1.02


# Answers that cannot be scored against.


@pytest.mark.parametrize(
    ("metric", "truth", "train", "why"),
    [
        ("rmse", [1.0, "x"], [1.0, 2.0], "the answers hold 'x' in 'y', where rmse takes numbers"),
        ("rmse", [1.0, ""], [1.0, 2.0], "the answers lack 1 values of 'y'"),
        ("rmse", [1.0, 2.0], ["", "nan"], "no row of the training data has a value"),
        ("roc_auc", [1, 1], [0, 1], "the answers have one value only in 'y', so roc_auc is not defined"),
        ("accuracy", ["a", "a"], ["a", "a"], "the class 'a' only"),
        ("qwk", ["a", "b"], ["a", "b"], "takes small whole numbers"),
        ("rmsle", [-1.0, 2.0], [1.0, 2.0], "rmsle takes numbers from 0 on"),
    ],
)
def test_answers_that_no_submission_can_meet(metric, truth, train, why):
    with pytest.raises(DataError, match=why):
        make(metric, truth, train)


def test_targets_that_are_constant_in_the_answers_are_left_out_where_they_have_no_score():
    answers = make("roc_auc", {"a": [0, 1, 1], "b": [0, 0, 0]}, {"a": [0, 1], "b": [0, 1]}, targets=("a", "b"))
    assert answers.scored == (0,)
    assert value(answers, csv({"a": [0.1, 0.5, 0.7], "b": [0.3, 0.1, 0.2]})) == 1.0


def test_labels_and_their_order():
    assert [label(cell) for cell in ("1.0", " 2 ", "TRUE", "a", "1.50")] == ["1", "2", "True", "a", "1.50"]
    assert ordered(["10", "9", "1"]) == ("1", "9", "10")
    assert ordered(["True", "False"]) == ("False", "True")
