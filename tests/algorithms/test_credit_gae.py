"""`gae` against numbers worked by hand, and against an independent implementation in torch."""

from __future__ import annotations

import math

import pytest
import torch
from helpers_credit import assign
from hypothesis import given, settings
from hypothesis import strategies as st

from mafrt.core.errors import ConfigError
from mafrt.core.types import Episode, Scored, Turn, Unscored


def turn(agent: str, index: int, values: list[float] | None, reward: float | None = None, *, tokens=None, **fields):
    tokens = len(values or []) if tokens is None else tokens
    return Turn(
        agent, [7], [3] * tokens, [-1.0] * tokens, "eos", "x", index, index, 0, reward=reward, values=values, **fields
    )


def run(turns: list[Turn], **kwargs) -> list[list[float] | None]:
    assign([Episode("e", "g", turns)], "gae", **kwargs)
    return [t.advantages for t in turns]


def test_observation_between_two_steps_is_stepped_over():
    # r=[0,.,1], V=[.5,.,1.5], gamma=1, lambda=.5.
    # A_2 = 1 - 1.5 = -.5 ; delta_0 = 0 + 1.5 - .5 = 1 ; A_0 = 1 + .5 * -.5 = .75
    turns = [turn("a", 0, [0.5], 0.0), turn("a", 1, [1.5], 1.0)]
    assert run(turns, gamma=1.0, gae_lambda=0.5) == [pytest.approx([0.75]), pytest.approx([-0.5])]
    assert [t.returns for t in turns] == [pytest.approx([1.25]), pytest.approx([1.0])]


@pytest.mark.parametrize(("bootstrap", "want"), [("team", [0.74, 0.6]), ("none", [-0.2, 0.6]), ("agent", [-0.2, 0.6])])
def test_two_agents_one_token_each(bootstrap, want):
    # r=[0,1], V=[.2,.4], gamma=1, lambda=.9. team: A_2 = 1 - .4 = .6 ; A_1 = (0 + .4 - .2) + .9 * .6 = .74
    # none: A_1 = 0 - .2. Each agent speaks once, so "agent" is "none".
    got = run([turn("a", 0, [0.2], 0.0), turn("b", 1, [0.4], 1.0)], gamma=1.0, gae_lambda=0.9, bootstrap=bootstrap)
    assert got == [pytest.approx([w]) for w in want]


@pytest.mark.parametrize(
    ("bootstrap", "want"),
    [
        # gamma=.9, lambda=.5, so gamma*lambda=.45. Last: 1 - .3 = .7
        # agent: b has no other turn: 1 - .4 = .6 ; a: delta = 0 + .9*.3 - .5 = -.23, A = -.23 + .45*.7 = .085
        ("agent", [0.085, 0.6, 0.7]),
        # team: b: 1 + .9*.3 - .4 = .87, A = .87 + .45*.7 = 1.185 ; a: 0 + .9*.4 - .5 = -.14, A = -.14 + .45*1.185
        ("team", [0.39325, 1.185, 0.7]),
        ("none", [-0.5, 0.6, 0.7]),
    ],
)
def test_an_agent_that_speaks_twice(bootstrap, want):
    turns = [turn("a", 0, [0.5], 0.0), turn("b", 1, [0.4], 1.0), turn("a", 2, [0.3], 1.0)]
    assert run(turns, gamma=0.9, gae_lambda=0.5, bootstrap=bootstrap) == [pytest.approx([w]) for w in want]


def test_tokens_of_one_turn():
    # gamma=.5, lambda=1, reward 1 on the last token, V=[.1,.2].
    # A_1 = 1 - .2 = .8 ; delta_0 = 0 + .5*.2 - .1 = 0 ; A_0 = .5*.8 = .4 ; returns = [.5, 1]: the discounted reward.
    one = turn("a", 0, [0.1, 0.2], 1.0)
    assert run([one], gamma=0.5, gae_lambda=1.0) == [pytest.approx([0.4, 0.8])]
    assert one.returns == pytest.approx([0.5, 1.0])


def test_action_level_is_one_step_a_turn():
    # The first example again, with the turns' first values; the others are never read.
    turns = [turn("a", 0, [0.5, 9.0, 9.0], 0.0), turn("b", 1, [1.5, math.nan], 1.0)]
    got = run(turns, gamma=1.0, gae_lambda=0.5, level="action")
    assert got == [pytest.approx([0.75] * 3), pytest.approx([-0.5] * 2)]
    assert [t.returns for t in turns] == [pytest.approx([1.25] * 3), pytest.approx([1.0] * 2)]


def test_action_level_takes_one_value_for_a_long_turn():
    assert run([turn("a", 0, [0.5], 1.0, tokens=3)], level="action") == [pytest.approx([0.5] * 3)]


def test_spans_pay_in_the_middle_of_a_turn():
    # 3 tokens "abc", V=0, gamma=1, lambda=1; 9/10 in all, a third of it at "a" (5 of 15), the rest at "c"
    one = turn("a", 0, [0.0] * 3, coach=Scored(9.0, spans=(("a", 5.0), ("c", 10.0))))
    one.action_ids = [97, 98, 99]
    assert run([one], gae_lambda=1.0, decode=lambda ids: bytes(ids).decode()) == [pytest.approx([0.9, 0.6, 0.6])]


def test_unjudged_turn_cuts_the_chain_at_its_value():
    # V=[.1,.2,.3], gamma=lambda=1. Third: 1 - .3 = .7. Second: unknown. First: its 10/10 + .2 - .1 = 1.1
    turns = [
        turn("a", 0, [0.1], coach=Scored(10.0)),
        turn("b", 1, [0.2], 5.0, coach=Unscored("down")),
        turn("a", 2, [0.3], coach=Scored(10.0)),
    ]
    assert run(turns, gae_lambda=1.0) == [pytest.approx([1.1]), None, pytest.approx([0.7])]


def test_value_that_is_not_finite_takes_out_whoever_needs_it():
    # The third value is NaN: the third turn is out, and the second, which bootstraps from it. The first bootstraps
    # from the second's value, which is known: 0 + .2 - .1 = .1
    turns = [turn("a", 0, [0.1]), turn("b", 1, [0.2]), turn("a", 2, [math.nan], 1.0), turn("b", 3, [0.4], 1.0)]
    metrics = assign([Episode("e", "g", turns)], "gae", gae_lambda=1.0)
    assert [t.advantages for t in turns] == [pytest.approx([0.1]), None, None, pytest.approx([0.6])]
    assert metrics["turns_nonfinite"] == 2.0


def test_turn_without_tokens_pays_the_step_before_it():
    turns = [turn("a", 0, [0.25]), turn("b", 1, [], 1.0)]
    assert run(turns) == [pytest.approx([0.75]), []]


def test_its_reward_is_paid_once():
    # The silent b in the middle earned 1, which goes to the a before it and to nobody else: lambda=0, V=0.
    turns = [turn("a", 0, [0.0]), turn("a", 1, [0.0]), turn("b", 2, [], 1.0), turn("a", 3, [0.0], 2.0)]
    assert run(turns, gae_lambda=0.0) == [[0.0], [1.0], [], [2.0]]


def test_advantages_of_an_earlier_call_do_not_survive():
    one = turn("a", 0, [0.0], 1.0)
    run([one])
    one.reward = math.nan
    assert run([one]) == [None]


def test_missing_critic_and_wrong_lengths_are_said():
    with pytest.raises(ConfigError, match="needs a critic"):
        run([turn("a", 0, None, 1.0, tokens=2)])
    with pytest.raises(ConfigError, match="2 values for 3 action tokens"):
        run([turn("a", 0, [0.1, 0.2], 1.0, tokens=3)])


@pytest.mark.parametrize("bad", [{"gamma": 1.5}, {"gae_lambda": -0.1}, {"level": "turn"}, {"bootstrap": "teem"}])
def test_settings_are_checked(bad):
    with pytest.raises(ConfigError):
        run([turn("a", 0, [0.0])], **bad)


@pytest.mark.slow
@given(
    data=st.lists(st.tuples(st.floats(-3, 3), st.floats(-3, 3)), min_size=1, max_size=12),
    cut=st.integers(1, 5),
    gamma=st.floats(0, 1),
    lam=st.floats(0, 1),
)
@settings(max_examples=60, deadline=None)
def test_equals_the_sum_over_residuals(data, cut, gamma, lam):
    """A_t = sum_l (gamma lambda)^l delta_{t+l}, written out with a matrix, whatever the cut into turns."""
    rewards = [0.0] * len(data)
    values = [v for _, v in data]
    turns = []
    for start in range(0, len(data), cut):
        end = min(start + cut, len(data))
        rewards[end - 1] = data[end - 1][0]
        turns.append(turn("ab"[len(turns) % 2], len(turns), values[start:end], rewards[end - 1]))
    r, v = torch.tensor(rewards, dtype=torch.float64), torch.tensor(values, dtype=torch.float64)
    delta = r + gamma * torch.cat([v[1:], v.new_zeros(1)]) - v
    power = torch.arange(len(data))[None] - torch.arange(len(data))[:, None]
    weights = torch.where(power >= 0, torch.tensor(gamma * lam, dtype=torch.float64) ** power.clamp(min=0), 0.0)
    want = weights @ delta
    got = [a for one in run(turns, gamma=gamma, gae_lambda=lam) for a in one or ()]
    assert got == pytest.approx(want.tolist(), abs=1e-9)
    assert [x for t in turns for x in t.returns or ()] == pytest.approx((want + v).tolist(), abs=1e-9)


def test_explained_variance_per_agent():
    # a: returns 1, 3 (lambda=1, bootstrap none), values 1, 3: perfect. b: returns 0, 2, values .5, .5: residuals
    # -.5, 1.5 have variance 1, returns too: 0. c: one turn: undefined.
    turns = [turn("a", 0, [1.0], 1.0), turn("a", 1, [3.0], 3.0), turn("b", 2, [0.5], 0.0), turn("b", 3, [0.5], 2.0)]
    turns.append(turn("c", 4, [0.5], 1.0))
    metrics = assign([Episode("e", "g", turns)], "gae", gae_lambda=1.0, bootstrap="none")
    assert metrics["explained_variance/a"] == pytest.approx(1.0)
    assert metrics["explained_variance/b"] == pytest.approx(0.0)
    assert "explained_variance/c" not in metrics
