"""A recipe over seeds and rates: what counts as broken down, and that a run that is there is not made again."""

from __future__ import annotations

import argparse
import json

import pytest

from bench.reproduce import dsbench_stability, mathchat_stability
from bench.reproduce.dsbench_process_rewards import SuccessCurve
from bench.reproduce.mathchat_process_rewards import AccuracyCurve


def accuracies(*values):
    return AccuracyCurve(episodes=[80 * n for n in range(len(values))], accuracy=list(values))


@pytest.mark.parametrize(
    ("values", "broken"),
    [((0.5, 0.9, 0.85), False), ((0.5, 0.9, 0.79), True), ((0.5, 0.52, 0.49), True), ((0.5, 0.5, 0.5), False)],
)
def test_a_fall_from_the_best_or_below_the_start_is_a_breakdown(values, broken):
    assert mathchat_stability.RECIPE.broken(accuracies(*values)) is broken


def test_a_team_no_better_than_the_best_fixed_programs_has_broken_down():
    for score, broken in ((0.142, True), (0.15, False)):
        assert dsbench_stability.RECIPE.broken(SuccessCurve(score=[0.3, score])) is broken


@pytest.mark.slow
def test_runs_are_kept_counted_and_not_made_again(tmp_path):
    made = []

    def train(seed, factor):
        made.append((seed, factor))
        return accuracies(0.5, 0.9, 0.6 if (seed, factor) == (2, 4) else 0.9)

    for seeds in ([1], [1, 2]):
        args = argparse.Namespace(seeds=seeds, output=tmp_path / "out")
        mathchat_stability.RECIPE.measure(args, train)
    assert made == [(1, 4), (1, 1), (2, 4), (2, 1)]
    rows = (tmp_path / "out/mathchat_stability.md").read_text().splitlines()
    [four] = [row for row in rows if row.startswith("| four times")]
    assert four == (
        "| four times the rate | 2 | 0.900 (0.900 to 0.900) | 0.500 (0.500 to 0.500) | 0.750 (0.600 to 0.900) | 1 |"
    )
    assert any("Does not hold: of 2 seeds each, 1 broke down at four times the rate and 0 at" in row for row in rows)
    numbers = json.loads((tmp_path / "out/mathchat_stability.json").read_text())
    assert numbers["four times the rate"]["2"]["accuracy"] == [0.5, 0.9, 0.6]
    assert "<svg" in (tmp_path / "out/mathchat_stability.svg").read_text()
