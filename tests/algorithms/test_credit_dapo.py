"""DAPO's overlong penalty and its search for groups that can teach something, and what sharing does to an outcome."""

from __future__ import annotations

import pytest
from helpers_credit import assign, reward_rows

from mafrt.algorithms import groups_without_spread
from mafrt.core.errors import ConfigError
from mafrt.core.types import Episode, Turn

LIMITS = {"a": 10, "b": 20}


def turn(agent: str = "a", tokens: int = 1, reward: float | None = None, **fields) -> Turn:
    return Turn(agent, [1], [2] * tokens, [-1.0] * tokens, "eos", "x", 0, 0, 0, reward=reward, **fields)


def paid(one: Turn, **settings) -> float:
    [[row]], _ = reward_rows([Episode("0", "p", [one])], overlong_buffer=0.4, **{"token_limits": LIMITS, **settings})
    assert row.token_rewards == {len(one.action_ids) - 1: row.reward}
    return row.reward


@pytest.mark.parametrize(("tokens", "want"), [(1, 0.0), (6, 0.0), (7, -0.25), (8, -0.5), (10, -1.0), (12, -1.0)])
def test_penalty_by_hand(tokens, want):
    # Limit 10, buffer 4: nothing up to 6 tokens, then a quarter per token; nothing more beyond the limit.
    assert paid(turn(tokens=tokens)) == pytest.approx(want)


def test_penalty_follows_the_agents_limit_and_its_weight():
    # b may say 20: buffer 8, 16 tokens are half of it. 3 - 2 * .5 = 2.
    assert paid(turn("b", 16, reward=3.0), overlong_penalty=2.0) == pytest.approx(2.0)


def test_an_agent_without_limit_is_refused():
    with pytest.raises(ConfigError, match="'c' has no token limit"):
        paid(turn("c"))
    with pytest.raises(ConfigError, match="set overlong_buffer to 0"):
        assign([Episode("0", "p", [turn()])], "dapo")


def test_dapo_is_grpo_on_penalised_rewards():
    # Rewards 1 and 1; the second used its limit up: 0. Mean .5, unbiased deviation .7071: +-.7071.
    episodes = [Episode("0", "p", [turn(tokens=2, reward=1.0)]), Episode("1", "p", [turn(tokens=10, reward=1.0)])]
    assign(episodes, "dapo", token_limits=LIMITS)
    assert [e.turns[0].advantages[0] for e in episodes] == pytest.approx([0.7071068, -0.7071068], abs=1e-5)


def test_groups_without_spread():
    def group(name: str, *rewards: float, tokens=(1, 1)) -> list[Episode]:
        said = [turn(tokens=n, reward=r) for r, n in zip(rewards, tokens, strict=True)]
        return [Episode(f"{name}{i}", name, [one]) for i, one in enumerate(said)]

    # p: all 1. q: unlike. r: all wrong, one of them overlong, which is no spread. s: nothing to compare with. t: of two
    # samples one is unknown.
    batch = [*group("r", 0.0, 0.0, tokens=(1, 10)), *group("p", 1.0, 1.0), *group("q", 0.0, 1.0)]
    batch += [*group("s", 5.0, tokens=(1,)), *group("t", 1.0, float("nan"))]
    assert groups_without_spread(batch, "dapo", token_limits=LIMITS) == ["p", "r", "s", "t"]
    assert groups_without_spread(batch[::-1], "dapo", token_limits=LIMITS) == ["p", "r", "s", "t"]


@pytest.mark.parametrize("outcome_to", ["last", "each", "all"])
def test_a_shared_sum_counts_the_outcome_once(outcome_to):
    # r1 + r2 + outcome = .25 + .5 + 2 for each of the four turns, whoever the outcome would go to on his own.
    turns = [turn(name, reward=r) for name, r in zip("abab", (0.25, 0.0, 0.0, 0.5), strict=True)]
    rows, _ = reward_rows([Episode("0", "p", turns, 2.0)], share="sum", outcome_to=outcome_to)
    assert [row.reward for row in rows[0]] == [2.75] * 4


def test_cory_gives_both_the_sum_and_each_turn_is_its_own_episode():
    # V = .5 and 1, one token each, nothing follows a turn: A = 2.75 - V.
    turns = [turn("a", reward=0.25, values=[0.5]), turn("b", reward=0.5, values=[1.0])]
    assign([Episode("0", "p", turns, 2.0)], "cory")
    assert [t.advantages for t in turns] == [[2.25], [1.75]] and [t.returns for t in turns] == [[2.75], [2.75]]


def test_ippo_with_own_and_with_summed_reward():
    # Own: .25 + outcome 2, .5 + outcome 2. Summed: .25 + .5 + 2 for both.
    for share, want in (("own", [2.25, 2.5]), ("sum", [2.75, 2.75])):
        turns = [turn("a", reward=0.25, values=[0.0]), turn("b", reward=0.5, values=[0.0])]
        assign([Episode("0", "p", turns, 2.0)], "ippo", share=share)
        assert [t.advantages[0] for t in turns] == want
