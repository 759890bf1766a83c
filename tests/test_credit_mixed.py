"""Credit of `vdn` and `qmix` by hand: who is compared with whom, and with what in its place."""

from __future__ import annotations

import math
import random

import pytest

from mafrt.credit import assign
from mafrt.errors import ConfigError
from mafrt.types import Episode, Turn


def said(agent: str, q: float | None, index: int = 0, reward: float | None = None, tokens: int = 1) -> Turn:
    values = None if q is None else [q] * tokens
    return Turn(agent, [1], [2] * tokens, [-1.0] * tokens, "eos", "x", index, index, 0, reward=reward, values=values)


def duo(id: str, a: float, b: float, group: str = "p", outcome: float | None = None) -> Episode:
    return Episode(id, group, [said("a", a), said("b", b, 1, tokens=2)], outcome)


def three() -> list[Episode]:
    """Q of a: 1, 2, 6; of b: 2, 1, 1."""
    return [duo("0", 1.0, 2.0), duo("1", 2.0, 1.0), duo("2", 6.0, 1.0)]


def advantages(episodes: list[Episode]) -> list[list[float]]:
    return [[turn.advantages[0] for turn in episode.turns] for episode in episodes]


def product(episodes: list[Episode]):
    """Q_tot = q_a q_b."""
    other = {id(t): next(o for o in e.turns if o is not t) for e in episodes for t in e.turns}
    return lambda turn, values: [value * other[id(turn)].values[0] for value in values]


def test_vdn_by_hand():
    # a: mean 3: -2, -1, 3. b: mean 4/3: 2/3, -1/3, -1/3, on both of its tokens.
    episodes = three()
    metrics = assign(episodes, "vdn")
    got = [x for pair in advantages(episodes) for x in pair]
    assert got == pytest.approx([-2, 2 / 3, -1, -1 / 3, 3, -1 / 3])
    assert len(episodes[0].turns[1].advantages) == 2
    assert (metrics["groups"], metrics["groups_of_one"], metrics["groups_no_spread"]) == (2.0, 0.0, 0.0)


def test_qmix_by_hand():
    # a in sample 0, b at 2: 1*2 - mean(1, 2, 6)*2 = 2 - 6 = -4; sample 1: 2 - 3 = -1; sample 2: 6 - 3 = 3.
    # b in sample 0, a at 1: 2 - 4/3 = 2/3; sample 1, a at 2: 2 - 8/3 = -2/3; sample 2, a at 6: 6 - 8 = -2.
    episodes = three()
    assign(episodes, "qmix", joint=product(episodes))
    got = [x for pair in advantages(episodes) for x in pair]
    assert got == pytest.approx([-4, 2 / 3, -1, -2 / 3, 3, -2])


def test_qmix_with_a_sum_for_a_mixer_is_vdn():
    one, other = three(), three()
    rest = {id(t): next(o.values[0] for o in e.turns if o is not t) for e in one for t in e.turns}
    assign(one, "qmix", joint=lambda turn, values: [value + rest[id(turn)] for value in values])
    assign(other, "vdn")
    for a, b in zip(advantages(one), advantages(other), strict=True):
        assert a == pytest.approx(b)


def test_problems_agents_and_joint_steps_are_compared_apart():
    # p: a speaks twice, so its second turn is another joint step. q is alone everywhere.
    episodes = [
        Episode("0", "p", [said("a", 1.0), said("b", 5.0, 1), said("a", 10.0, 2)]),
        Episode("1", "p", [said("b", 7.0), said("a", 3.0, 1), said("a", 20.0, 2)]),
        duo("2", 100.0, 100.0, "q"),
    ]
    metrics = assign(episodes, "vdn")
    assert advantages(episodes) == [[-1.0, -1.0, -5.0], [1.0, 1.0, 5.0], [0.0, 0.0]]
    assert (metrics["groups"], metrics["groups_of_one"]) == (5.0, 2.0)


def test_returns_are_the_turns_own_reward():
    episode = duo("0", 1.0, 2.0, outcome=3.0)
    episode.turns[0].reward = 0.5
    assign([episode], "vdn")
    assert [turn.returns for turn in episode.turns] == [[0.5], [3.0, 3.0]]


def test_what_is_not_finite_leaves_and_is_nobodys_alternative():
    episodes = [*three(), duo("3", math.nan, 1.0), duo("4", 50.0, 1.0)]
    episodes[4].turns[0].reward = math.inf
    metrics = assign(episodes, "vdn")
    assert [e.turns[0].advantages for e in episodes] == [[-2.0], [-1.0], [3.0], None, None]
    assert metrics["turns_nonfinite"] == 2.0


def test_what_is_missing_is_said():
    with pytest.raises(ConfigError, match="need a mixer"):
        assign([Episode("0", "p", [said("a", None)])], "vdn")
    with pytest.raises(ConfigError, match="needs `joint`"):
        assign(three(), "qmix")


def test_order_of_the_episodes_changes_not_one_bit():
    rng = random.Random(3)
    episodes = [duo(str(i), rng.gauss(0, 1), rng.gauss(0, 1), rng.choice("pq")) for i in range(9)]
    assign(episodes, "qmix", joint=product(episodes))
    before = advantages(episodes)
    shuffled = rng.sample(episodes, 9)
    assign(shuffled, "qmix", joint=product(episodes))
    assert advantages(episodes) == before
