"""The search with a budget: its optimum is what players get, costs come turn by turn, and a short run is measured."""

from __future__ import annotations

import statistics
from functools import partial

import pytest

from bench import stopping
from bench._parts import WORDS, Search

pytestmark = pytest.mark.usefixtures("same_threads")


def play(world, takes, task):
    """(outcome, pay of the turns) of players who take a find if `takes(find, left)`."""
    env = world
    env.reset(options={"task": task})
    paid = 0.0
    while True:
        word = WORDS[0] if takes(env.find, env.budget - env.turn) else "No"
        result = env.step({env.agents[env.turn % 2]: word})
        paid += sum(result.rewards.values())
        if result.terminated:
            return result.info["outcome"], paid


def mean(takes, **words):
    world = Search(**words)
    world.rng.seed(5)
    return statistics.fmean(sum(play(world, takes, task)) for task in range(8000))


@pytest.mark.slow
def test_the_best_policy_and_the_blind_ones_get_what_is_said():
    """From 5 on another find is worth less than its cost: (1 + 2) / 56 < .08 < (1 + 2 + 3) / 56."""
    world = Search()
    assert mean(lambda find, left: find >= 5) == pytest.approx(world.best(), abs=0.01)
    assert mean(lambda find, left: True) == pytest.approx(world.always(stop=True), abs=0.01)
    assert mean(lambda find, left: False) == pytest.approx(world.always(stop=False), abs=0.01)
    others = [mean(partial(lambda least, find, left: find >= least, least)) for least in (3, 4, 6, 7)]
    assert world.best() > max(others) - 0.01


def test_turns_are_paid_as_they_come_or_all_is_in_the_outcome():
    late, now = Search(in_all=True), Search()
    for task in range(50):
        for world in (late, now):
            world.rng.seed(task)
        outcome, nothing = play(late, lambda find, left: find >= 6, task)
        assert nothing == 0.0
        assert sum(play(now, lambda find, left: find >= 6, task)) == pytest.approx(outcome)


@pytest.mark.nightly
@pytest.mark.ci
@pytest.mark.slow
def test_a_short_run_is_measured_against_the_best(capsys, monkeypatch):
    monkeypatch.setattr(Search, "num_tasks", 128)
    result = stopping.run(["--rules", "rloo", "--seeds", "1", "2", "--iterations", "1"])
    [row] = result["rows"]
    assert len(row["shares"]) == 2 and all(0.4 < share < 1.1 for share in row["shares"])
    assert row["low"] < sum(row["shares"]) / 2 < row["high"]
    assert "The best policy gets 0.717" in capsys.readouterr().out
