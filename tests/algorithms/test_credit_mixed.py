"""Credit of `vdn` and `qmix` by hand: who is compared with whom, and with what in its place."""

from __future__ import annotations

import math
import random

import pytest
from helpers_credit import assign

from mafrt.core.errors import ConfigError
from mafrt.core.types import Episode, Turn


def said(agent: str, q: float | None, index: int = 0, reward: float | None = None, tokens: int = 1) -> Turn:
    values = None if q is None else [q] * tokens
    return Turn(agent, [1], [2] * tokens, [-1.0] * tokens, "eos", "x", index, index, 0, reward=reward, values=values)


def duo(id: str, a: float, b: float, group: str = "p", outcome: float | None = None) -> Episode:
    return Episode(id, group, [said("a", a), said("b", b, 1, tokens=2)], outcome)


def three() -> list[Episode]:
    """Q of a: 1, 2, 6; of b: 2, 1, 1."""
    return [duo("0", 1.0, 2.0), duo("1", 2.0, 1.0), duo("2", 6.0, 1.0)]


def together(episodes: list[Episode]) -> list[Episode]:
    """Everybody speaks at the same time."""
    for turn in (turn for episode in episodes for turn in episode.turns):
        turn.env_step = 0
    return episodes


def advantages(episodes: list[Episode]) -> list[list[float]]:
    return [[turn.advantages[0] for turn in episode.turns] for episode in episodes]


def product(episodes: list[Episode]):
    """Q_tot = q_a q_b."""
    other = {id(t): next(o for o in e.turns if o is not t) for e in episodes for t in e.turns}
    return lambda row, values: [value * other[id(row.turn)].values[0] for value in values]


def test_vdn_by_hand():
    # a: mean 3: -2, -1, 3. b: mean 4/3: 2/3, -1/3, -1/3, on both of its tokens.
    episodes = three()
    metrics = assign(episodes, "vdn", residual_weight=0.0)
    got = [x for pair in advantages(episodes) for x in pair]
    assert got == pytest.approx([-2, 2 / 3, -1, -1 / 3, 3, -1 / 3])
    assert len(episodes[0].turns[1].advantages) == 2
    assert (metrics["groups"], metrics["groups_of_one"], metrics["groups_no_spread"]) == (2.0, 0.0, 0.0)


def test_qmix_by_hand():
    # a in sample 0, b at 2: 1*2 - mean(1, 2, 6)*2 = 2 - 6 = -4; sample 1: 2 - 3 = -1; sample 2: 6 - 3 = 3.
    # b in sample 0, a at 1: 2 - 4/3 = 2/3; sample 1, a at 2: 2 - 8/3 = -2/3; sample 2, a at 6: 6 - 8 = -2.
    episodes = three()
    assign(episodes, "qmix", joint=product(episodes), residual_weight=0.0)
    got = [x for pair in advantages(episodes) for x in pair]
    assert got == pytest.approx([-4, 2 / 3, -1, -2 / 3, 3, -2])


def test_qmix_with_a_sum_for_a_mixer_is_vdn():
    one, other = together(three()), together(three())
    rest = {id(t): next(o.values[0] for o in e.turns if o is not t) for e in one for t in e.turns}
    assign(one, "qmix", joint=lambda row, values: [value + rest[id(row.turn)] for value in values])
    assign(other, "vdn")
    for a, b in zip(advantages(one), advantages(other), strict=True):
        assert a == pytest.approx(b)


def test_problems_agents_and_times_are_compared_apart():
    # p: a speaks twice, whoever begins; its first turns are compared, and its second ones. q is alone everywhere.
    episodes = [
        Episode("0", "p", [said("a", 1.0), said("b", 5.0, 1), said("a", 10.0, 2)]),
        Episode("1", "p", [said("b", 7.0), said("a", 3.0, 1), said("a", 20.0, 2)]),
        duo("2", 100.0, 100.0, "q"),
    ]
    metrics = assign(episodes, "vdn", residual_weight=0.0)
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
    metrics = assign(episodes, "vdn", residual_weight=0.0)
    assert [e.turns[0].advantages for e in episodes] == [[-2.0], [-1.0], [3.0], None, None]
    assert metrics["turns_nonfinite"] == 2.0


def test_what_the_team_earned_beyond_q_by_hand():
    """lambda .5. Sample 0: b's residual 3 - 2 = 1, a's 2 - 1 = 1, D of a 1 + .5 * 1. Sample 1: -1, -1, -1.5.

    First halves: a's Q are 1, 2: -.5, .5; b's 2, 1: .5, -.5.
    """
    episodes = [duo("0", 1.0, 2.0, outcome=3.0), duo("1", 2.0, 1.0, outcome=0.0)]
    assign(episodes, "vdn", gae_lambda=0.5)
    assert advantages(episodes) == [[-0.5 + 1.5, 0.5 + 1.0], [0.5 - 1.5, -0.5 - 1.0]]
    assign(episodes, "vdn", gae_lambda=0.5, residual_weight=0.5)
    assert advantages(episodes) == [[-0.5 + 0.75, 0.5 + 0.5], [0.5 - 0.75, -0.5 - 0.5]]
    # gamma .5: b's as before; a's 0 + .5 * 2 - 1 = 0 and .5 * 1 - 2 = -1.5, then .25 * b's.
    assign(episodes, "vdn", gae_lambda=0.5, gamma=0.5)
    assert advantages(episodes) == [[-0.5 + 0.25, 0.5 + 1.0], [0.5 - 1.5 - 0.25, -0.5 - 1.0]]


def test_those_who_speak_together_share_one_residual_and_each_has_its_own_baseline():
    # One joint step: D = 3 - (1 + 2) = 0 and 0 - (2 + 1) = -3.
    episodes = together([duo("0", 1.0, 2.0, outcome=3.0), duo("1", 2.0, 1.0, outcome=0.0)])
    assign(episodes, "vdn")
    assert advantages(episodes) == [[-0.5, 0.5], [0.5 - 3.0, -0.5 - 3.0]]
    # qmix, Q_tot = q_a q_b = 2 in both: D = 1 and -2. a beside b's 2: 2 (1 - 1.5) = -1; beside 1: .5. b: .5, -1.
    assign(episodes, "qmix", joint=product(episodes))
    assert advantages(episodes) == [[-1.0 + 1.0, 0.5 + 1.0], [0.5 - 2.0, -1.0 - 2.0]]


@pytest.mark.parametrize("mixer", ["vdn", "qmix"])
def test_with_lambda_1_an_advantage_is_the_return_less_the_counterfactual_baseline(mixer):
    rng = random.Random(5)
    episodes = [duo(str(i), rng.gauss(0, 1), rng.gauss(0, 1), outcome=rng.gauss(0, 1)) for i in range(6)]
    together(episodes)
    joint = product(episodes) if mixer == "qmix" else None
    assign(episodes, mixer, gae_lambda=1.0, **({"joint": joint} if joint else {}))
    for agent in (0, 1):
        qs = [e.turns[agent].values[0] for e in episodes]
        for e in episodes:
            other = e.turns[1 - agent].values[0]
            worth = [q * other if mixer == "qmix" else q + other for q in qs]
            assert e.turns[agent].advantages[0] == pytest.approx(e.outcome - sum(worth) / 6)


def test_a_step_of_unknown_reward_leaves_and_the_one_before_bootstraps_from_its_q():
    def episode(id: str, reward: float) -> Episode:
        last = [said("a", 5.0, 1), said("b", 7.0, 1)]
        last[1].reward = reward
        return Episode(id, "p", [said("a", 1.0), *last])

    episodes = [episode("0", math.nan), episode("1", 20.0)]
    metrics = assign(episodes, "vdn", gae_lambda=1.0)
    # 0: its first step earned 0 and goes on with 12, not with what follows: 12 - 1. 1: 12 - 1 + (20 - 12).
    assert [[t.advantages for t in e.turns] for e in episodes] == [[[11.0], None, None], [[19.0], [8.0], [8.0]]]
    assert metrics["turns_nonfinite"] == 2.0
    assign(episodes, "vdn", residual_weight=0.0)  # then only the turn itself has nothing to go by
    assert [t.advantages for t in episodes[0].turns] == [[0.0], [0.0], None]


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
