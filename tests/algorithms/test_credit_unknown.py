"""Rewards that are not known, or not yet: no verdict, a truncated episode, a turn cut by length, a silent turn."""

from __future__ import annotations

import math

import pytest
from helpers_credit import assign

from mafrt.algorithms import ALGORITHMS, algorithm
from mafrt.core.errors import ConfigError
from mafrt.core.types import Episode, Scored, Turn


def turn(agent="a", index=0, reward=None, values=(0.0,), stop="eos") -> Turn:
    n = len(values)
    return Turn(agent, [1], [2] * n, [-1.0] * n, stop, "x", index, index, 0, reward=reward, values=list(values))


def test_no_verdict_is_unknown_and_not_0():
    # GRPO over outcomes 1, 0, None: the third sample is in no mean. Mean .5, deviation .7071.
    episodes = [Episode(str(i), "p", [turn()], outcome) for i, outcome in enumerate((1.0, 0.0, None))]
    metrics = assign(episodes, "grpo")
    got = [e.turns[0].advantages[0] for e in episodes[:2]]
    assert got == pytest.approx([0.7071, -0.7071], abs=1e-4)
    assert episodes[2].turns[0].advantages is None and metrics["turns_no_outcome"] == 1.0
    # In an environment that gives no outcomes at all, nothing is missing.
    paid = [Episode(str(i), "p", [turn(reward=reward)]) for i, reward in enumerate((1.0, 0.0))]
    assert assign(paid, "grpo")["turns_no_outcome"] == 0.0


def test_alternatives_whose_episode_goes_on_are_paid_their_own_rewards():
    # Turn 0: rewards 1 and 0, no verdict yet: +-.7071. Turn 1 ends the episode: outcomes 0 and 1.
    tree = {"alternative": 0}
    episodes = [Episode(f"a{i}", "p", [turn(reward=reward)], None, tree) for i, reward in enumerate((1.0, 0.0))]
    ended = {**tree, "ended": "terminated"}
    episodes += [Episode(f"b{i}", "p", [turn("b", 1)], outcome, ended) for i, outcome in enumerate((0.0, 1.0))]
    metrics = assign(episodes, "at_grpo")
    assert metrics["turns_no_outcome"] == 0.0
    got = [e.turns[0].advantages[0] for e in episodes]
    assert got == pytest.approx([0.7071, -0.7071, -0.7071, 0.7071], abs=1e-4)


def test_alternatives_are_compared_with_those_of_the_same_turn_of_the_tree():
    # The same agent at turns 0 and 2 of one tree: two groups of two, not one of four.
    rewards = {0: (1.0, 0.0), 2: (9.0, 5.0)}
    tree = {"alternative": 0}
    episodes = [
        Episode(f"{at}-{i}", "p", [turn("a", at, reward)], None, tree)
        for at, pair in rewards.items()
        for i, reward in enumerate(pair)
    ]
    assert assign(episodes, "at_grpo")["groups"] == 2.0
    assert [e.turns[0].advantages[0] for e in episodes] == pytest.approx([0.7071, -0.7071] * 2, abs=1e-4)


def test_truncation_by_hand():
    def after(mode: str) -> list[list[float] | None]:
        turns = [turn("a", 0, 0.0, (0.5,)), turn("b", 1, 1.0, (0.25,))]
        episode = Episode("0", "p", turns, None, {"ended": "truncated"})
        assign([episode, Episode("1", "q", [turn()], 1.0)], "gae", gae_lambda=1.0, truncation=mode)
        return [one.advantages for one in turns]

    # bootstrap: b: 1 + V(.25) - .25 = 1; a: 0 + .25 - .5 + 1 = .75. terminate: b's outcome is unknown, so a's future is
    # b's value: .25 - .5. mask: none of it is learnt from.
    assert after("bootstrap") == [[0.75], [1.0]]
    assert after("terminate") == [[-0.25], None]
    assert after("mask") == [None, None]


def test_truncation_bootstraps_by_default_with_a_critic_and_cannot_without():
    assert algorithm("ppo").truncation == "bootstrap" and algorithm("grpo").truncation == "terminate"
    with pytest.raises(ConfigError, match="needs a critic"):
        algorithm("grpo", truncation="bootstrap")


def test_turns_cut_by_length_can_be_masked():
    stops = ("eos", "length", "eos")
    episodes = [Episode(str(i), "p", [turn(reward=float(i), stop=stop)]) for i, stop in enumerate(stops)]
    metrics = assign(episodes, "grpo", mask_cut_turns=True)
    assert episodes[1].turns[0].advantages is None and metrics["turns_cut_by_length"] == 1.0
    assign(episodes, "grpo")
    assert episodes[1].turns[0].advantages == [0.0]


def test_an_empty_turn_without_judgement_cuts_the_chain():
    # c's reward is unknown and c said nothing: b's step would be paid it, so b leaves the loss; d: 1 - .5.
    turns = [turn("b", 0, 0.0, (0.25,)), turn("c", 1, 9.0, ()), turn("d", 2, 1.0, (0.5,))]
    turns[0].coach, turns[2].coach = Scored(0.0), Scored(0.0)
    assign([Episode("0", "p", turns)], "gae", gae_lambda=1.0)
    assert turns[0].advantages is None and turns[2].advantages == [0.5]


def test_the_reward_of_an_empty_turn_is_not_lost_where_each_turn_stands_alone():
    # Of its own agent: the turn before is paid it. Another agent is not.
    turns = [turn("b", 0, 0.0, (0.25,)), turn("b", 1, 3.0, ())]
    assign([Episode("0", "p", turns)], "ippo")
    assert turns[0].returns == [3.0]
    for rule in ("ippo", "cory", "maporl"):
        paid = [turn("b", 0, 1.0, (0.25,)), turn("c", 1, 3.0, ())]
        silent = [turn("b", 0, 1.0, (0.25,)), turn("c", 1, 3.0, (0.0,))]
        assign([Episode("0", "p", paid)], rule)
        assign([Episode("0", "p", silent)], rule)
        assert paid[0].returns == silent[0].returns, rule  # what c says or not, b is paid alike


def test_at_grpo_compares_an_agents_own_nth_turns():
    # b speaks second in one sample and first in the other, where a is silent: still b's first turn in both.
    first = Episode("0", "p", [turn("a", 0, 0.0), turn("b", 1, 1.0)])
    second = Episode("1", "p", [turn("b", 0, 0.0)])
    metrics = assign([first, second], "at_grpo")
    assert first.turns[1].advantages == pytest.approx([0.7071], abs=1e-4) and metrics["groups_of_one"] == 1.0


SUMS_WITH_KL = ("ccpo", "dr_mamr", "gigpo")
"""Rules whose number for an episode is a sum with the KL penalties of all its turns."""
NO_KL_IN_REWARD = ("dapo", "qmix", "spin", "opd", "self_distill")
"""Needs more than these turns have, or has no penalty in the reward."""


@pytest.mark.parametrize("by_turn", [True, False], ids=["pay by turn", "pay at the end"])
@pytest.mark.parametrize("rule", sorted(set(ALGORITHMS) - set(NO_KL_IN_REWARD)))
def test_of_a_turn_with_an_unknown_kl_only_what_holds_it_is_unknown(rule, by_turn):
    def episode(number: int, last: float) -> Episode:
        turns = [turn("ab"[at % 2], at, (0.5 * number, 1.0, 0.3)[at] if by_turn else None, (0.1,)) for at in range(3)]
        for one, reference in zip(turns, (-1.1, -1.2, last), strict=True):
            one.ref_logprobs = [reference]
        return Episode(str(number), "p", turns, None if by_turn else float(number == 2))

    episodes = [episode(number, math.nan if number == 1 else -1.3) for number in range(3)]
    assign(episodes, rule, kl_coef=0.1, kl_in="reward")
    learnt = [[one.advantages is not None for one in each.turns] for each in episodes]
    assert learnt == [[True] * 3, [False] * 3 if rule in SUMS_WITH_KL else [True, True, False], [True] * 3]
