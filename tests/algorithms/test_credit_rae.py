"""RAE: numbers by hand, the authors' update, unbiased against the exact gradient, and exact over a resume."""

from __future__ import annotations

import json

import pytest
from helpers_trees import AGAINST, TEAM, exact, expected
from toy import make

from mafrt.algorithms import assign
from mafrt.core.errors import ConfigError
from mafrt.core.types import Episode, Turn
from mafrt.storage.load_path import resolve


def turn(agent, number, reward=None, late=(), tokens=2):
    ids = [3] * tokens
    return Turn(agent, [7], ids, [-1.0] * tokens, "eos", "x", number, number, 0, reward=reward, late=list(late))


def game(name, won, *, set_name=None):
    """x, o, x speak; x is paid `won` and o the opposite at the end, o by late pay."""
    turns = [turn("x", 0), turn("o", 1, -won, [(2, -won)]), turn("x", 2, won)]
    return Episode(name, "p", turns, info={} if set_name is None else {"set": set_name})


def test_each_role_is_compared_with_its_own_running_mean():
    memory = {}
    first = [game("0", 1.0), game("1", 1.0), game("2", -1.0), game("3", 1.0)]
    metrics = assign(first, "rae", memory=memory, opponents=True, baseline_decay=0.5)
    # Before the first batch b = 0, so A is the return; both turns of x share it.
    assert [[t.advantages for t in e.turns] for e in first[1:3]] == [
        [[1.0] * 2, [-1.0] * 2, [1.0] * 2],
        [[-1.0] * 2, [1.0] * 2, [-1.0] * 2],
    ]
    # The mean of x is (1 + 1 - 1 + 1) / 4 = .5; of 4 episodes .5^4 = .0625 of the old one stays: .9375 * .5.
    assert memory == {"rae//x": 0.46875, "rae//o": -0.46875}
    assert metrics["role_baseline/x"] == metrics["role_baseline/o"] == 0.0
    second = [game("4", -1.0)]
    metrics = assign(second, "rae", memory=memory, opponents=True, baseline_decay=0.5)
    # x: -1 - .46875; o: 1 + .46875
    assert [t.advantages[0] for t in second[0].turns] == [-1.46875, 1.46875, -1.46875]
    assert [t.baseline for t in second[0].turns] == [0.46875, -0.46875, 0.46875]
    assert memory == {"rae//x": 0.5 * 0.46875 - 0.5, "rae//o": -0.5 * 0.46875 + 0.5}
    assert metrics["role_baseline/x"] == 0.46875


def test_with_one_episode_a_batch_it_is_the_authors_ema():
    """`EMA.update` of spiral-rl/spiral, spiral/utils.py: value = decay value + (1 - decay) x, from 0; train_spiral.py
    subtracts the value of before the update."""
    memory, value = {}, 0.0
    for number, won in enumerate((1.0, -1.0, 1.0, 1.0, 0.0, -1.0)):
        episode = game(str(number), won)
        assign([episode], "rae", memory=memory, opponents=True)
        assert episode.turns[0].advantages == pytest.approx([won - value] * 2, abs=1e-15)
        value = 0.95 * value + 0.05 * won
    assert memory["rae//x"] == pytest.approx(value, abs=1e-15)


def test_a_batch_of_equal_returns_moves_the_mean_as_the_authors_do():
    memory, value = {}, 0.0
    assign([game(str(n), 1.0) for n in range(7)], "rae", memory=memory, opponents=True)
    for _ in range(7):
        value = 0.95 * value + 0.05
    assert memory["rae//x"] == pytest.approx(value, abs=1e-15)


def test_games_of_a_mixture_have_baselines_of_their_own():
    memory = {}
    assign([game("0", 1.0, set_name="chess"), game("1", -1.0, set_name="go")], "rae", memory=memory, opponents=True)
    assert {name: round(value, 9) for name, value in memory.items()} == {
        "rae/chess/x": 0.05, "rae/chess/o": -0.05, "rae/go/x": -0.05, "rae/go/o": 0.05,
    }  # fmt: skip


def test_pay_by_turn_is_added_up_from_the_turn_on_and_the_mean_is_of_the_first_turn():
    memory = {}
    episode = Episode("0", "p", [turn("a", 0, 1.0), turn("a", 1, 3.0)])
    assign([episode], "rae", memory=memory, baseline_decay=0.0)
    assert [t.advantages[0] for t in episode.turns] == [4.0, 3.0] and memory == {"rae//a": 4.0}


@pytest.mark.slow
@pytest.mark.parametrize("start", [0.0, 0.7])
def test_whatever_the_running_means_are_the_gradient_is_the_exact_one(start):
    roles = {f"rae//{agent}": start for agent in "ab"}
    for name, tree in {**TEAM, **AGAINST}.items():
        found = expected(tree, "rae", memory=_Frozen(roles))
        assert found == pytest.approx(exact(tree, own=name in AGAINST), abs=1e-9), name


class _Frozen(dict):
    def __setitem__(self, name, value):
        pass


def test_what_is_not_finite_does_not_enter_a_running_mean():
    memory = {}
    huge = [Episode(str(n), "p", [turn("a", 0, 1.7e308)]) for n in range(3)]
    assign([*huge, Episode("3", "p", [turn("a", 0, float("nan"))])], "rae", memory=memory)
    assert memory == {}
    with pytest.raises(ConfigError, match="baseline_decay"):
        assign([], "rae", baseline_decay=1.5)


@pytest.mark.slow
def test_a_resumed_run_goes_on_from_the_running_means_bit_for_bit(tmp_path):
    def run(folder, iterations, resume=None):
        runner = make(tmp_path / folder, resume, algorithm="rae", iterations=iterations, save_interval=1)
        runner.run()
        return runner

    whole = run("whole", 4)
    run("half", 2)
    again = run("half", 4, tmp_path / "half")
    assert whole.state.memory and whole.state.memory == again.state.memory
    stored = json.loads((resolve(tmp_path / "half").state("run.json")).read_text())
    assert stored["memory"] == whole.state.memory
    for name in ("first", "second"):
        one, other = whole.base.adapter_state(name), again.base.adapter_state(name)
        assert all((one[key] == other[key]).all() for key in one)
    lines = [(tmp_path / folder / "metrics.jsonl").read_bytes() for folder in ("whole", "half")]
    assert lines[0] == lines[1]
