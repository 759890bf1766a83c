"""MAPoRL's rewards over rounds, by hand, and the sign of each bonus."""

from __future__ import annotations

import math

import pytest
from helpers_credit import assign

from mafrt.core.types import Episode, Turn

KEYS = ("alpha0", "alpha1", "alpha2", "alpha3")


def debate(*rounds: tuple[float, ...], group: str = "p", id: str = "0") -> Episode:
    """Agents a, b, c... each speak once per round and score what is given; the critic expects nothing of anybody."""
    turns = [
        Turn("abc"[i], [1], [2], [-1.0], "eos", "x", t * len(scores) + i, t, 0, reward=score, values=[0.0])
        for t, scores in enumerate(rounds)
        for i, score in enumerate(scores)
    ]
    return Episode(id, group, turns)


def worth(*rounds: tuple[float, ...], **settings) -> list[float]:
    """R of every turn: with V = 0 and one token a turn, A = R."""
    episode = debate(*rounds)
    assign([episode], "maporl", **settings)
    return [turn.advantages[0] for turn in episode.turns]


def test_this_and_later_rounds_by_hand():
    # g = .5. Round 0: mean of round 1 is .75; (0 + .5*.75)/1.5 = .25 and (1 + .375)/1.5 = .916667. Round 1: 1, .5.
    assert worth((0.0, 1.0), (1.0, 0.5), round_gamma=0.5) == pytest.approx([0.25, 0.9166667, 1.0, 0.5])
    # g = 1, three rounds: means .5, 0, 1. a: (1 + 0 + 1)/3, (0 + 1)/2, 1; b: (0 + 0 + 1)/3, (0 + 1)/2, 1.
    got = worth((1.0, 0.0), (0.0, 0.0), (1.0, 1.0))
    assert got == pytest.approx([2 / 3, 1 / 3, 0.5, 0.5, 1.0, 1.0])
    # g = 0: only oneself, now.
    assert worth((1.0, 0.0), (0.0, 1.0), round_gamma=0.0) == [1.0, 0.0, 0.0, 1.0]


def test_one_round_is_ppo():
    episode, other = debate((0.25, 0.75)), debate((0.25, 0.75))
    assign([episode], "maporl", alpha0=9.0, alpha3=9.0)
    assign([other], "gae", bootstrap="none")
    assert [t.advantages for t in episode.turns] == [t.advantages for t in other.turns]


def bonuses(*rounds: tuple[float, ...], alpha: str) -> list[float]:
    """What a weight of 1 for one alpha adds to each turn."""
    with_it, without = worth(*rounds, bonus_rule="proportional", **{alpha: 1.0}), worth(*rounds)
    return [a - b for a, b in zip(with_it, without, strict=True)]


def test_alpha0_pays_for_taking_over_what_right_peers_said():
    # a was wrong, b and c right: a's correction earns 1, its second turn is turn 3. b and c do not change.
    assert bonuses((0.0, 1.0, 1.0), (1.0, 1.0, 1.0), alpha="alpha0") == pytest.approx([0, 0, 0, 1, 0, 0])
    assert bonuses((0.0, 1.0, 1.0), (1.0, 1.0, 1.0), alpha="alpha1") == [0.0] * 6
    # Spoiling a right answer among right peers costs.
    assert bonuses((1.0, 1.0, 1.0), (0.0, 1.0, 1.0), alpha="alpha0") == pytest.approx([0, 0, 0, -1, 0, 0])


def test_alpha1_pays_for_standing_against_wrong_peers():
    assert bonuses((0.0, 0.0, 0.0), (1.0, 0.0, 0.0), alpha="alpha1") == pytest.approx([0, 0, 0, 1, 0, 0])
    # a was right among wrong peers and gave in: -1. (b's and c's peers are a and the other: mean .5, not right.)
    assert bonuses((1.0, 0.0, 0.0), (0.0, 0.0, 0.0), alpha="alpha1") == pytest.approx([0, 0, 0, -1, 0, 0])
    assert bonuses((1.0, 0.0, 0.0), (0.0, 0.0, 0.0), alpha="alpha0") == [0.0] * 6


def test_alpha2_costs_whoever_leads_right_peers_astray():
    # b and c are right, then both wrong: a's first turn loses 1. b's peers are a (0) and c (1): mean .5, not right.
    assert bonuses((0.0, 1.0, 1.0), (0.0, 0.0, 0.0), alpha="alpha2") == pytest.approx([-1, 0, 0, 0, 0, 0])
    # All right, and c alone falls: half of a's peers, and half of b's; c's own peers stay right.
    got = bonuses((1.0, 1.0, 1.0), (1.0, 1.0, 0.0), alpha="alpha2")
    assert got == pytest.approx([-0.5, -0.5, 0, 0, 0, 0])


def test_alpha3_pays_for_setting_wrong_peers_right():
    # b and c are wrong, then right: a's first turn earns 1; b's peers (a right, c wrong: .5) change by (0 + 1)/2.
    got = bonuses((1.0, 0.0, 0.0), (1.0, 1.0, 1.0), alpha="alpha3")
    assert got == pytest.approx([1.0, 0.5, 0.5, 0, 0, 0])
    assert bonuses((1.0, 0.0, 0.0), (1.0, 1.0, 1.0), alpha="alpha2") == [0.0] * 6


@pytest.mark.parametrize("alpha", KEYS)
def test_nobody_changes_nobody_earns_and_nobody_pays(alpha):
    assert bonuses((1.0, 0.0, 1.0), (1.0, 0.0, 1.0), alpha=alpha) == [0.0] * 6


def test_an_episode_with_an_unknown_score_leaves_and_the_others_do_not_change():
    good, bad = debate((0.0, 1.0), (1.0, 0.5)), debate((0.0, 1.0), (math.nan, 0.5), id="1")
    metrics = assign([good, bad], "maporl", round_gamma=0.5, alpha1=1.0, bonus_rule="proportional")
    assert [t.advantages for t in bad.turns] == [None] * 4 and metrics["turns_nonfinite"] == 4.0
    # a: .25; 1 + 0 (its peer was right, alpha0 is 0). b: .9167; .5 + (.5 - 1) = 0 (its peer a was wrong).
    assert [t.advantages[0] for t in good.turns] == pytest.approx([0.25, 0.9166667, 1.0, 0.0])
    assert metrics["round_bonus"] == pytest.approx(-0.5 / 4)


ALPHAS = {"alpha0": 1.0, "alpha1": 10.0, "alpha2": 100.0, "alpha3": 1000.0}


@pytest.mark.parametrize(
    ("before", "now", "a", "b"),
    [
        # Two agents a and b over two rounds (1 right, 0 wrong); the bonus of a's second turn, its own change, and of
        # a's first turn, its influence on b.
        ((1, 1), (0, 1), -10, 0),  # a spoils, b was right
        ((1, 0), (0, 0), -1, 0),  # a spoils, b was wrong
        ((0, 0), (1, 0), 10, 0),  # a corrects itself, b was wrong
        ((0, 1), (1, 1), 1, 0),  # a corrects itself, b was right
        ((1, 0), (1, 1), 0, 1000),  # b becomes right, a was right
        ((0, 0), (0, 1), 0, 100),  # b becomes right, a was wrong but useful
        ((0, 1), (0, 0), 0, -1000),  # b becomes wrong, a was wrong
        ((1, 1), (1, 0), 0, -100),  # b becomes wrong, a was right
        ((1, 0), (1, 0), 0, 0),  # nothing changes
    ],
)
@pytest.mark.parametrize("outcome", [None, 1.0])
def test_every_case_of_the_authors_table(before, now, a, b, outcome):
    def returns(**alphas):
        episode = debate(before, now)
        episode.outcome = outcome
        assign([episode], "maporl", gae_lambda=1.0, **alphas)
        return [t.returns[0] for t in episode.turns]

    got = [with_it - without for with_it, without in zip(returns(**ALPHAS), returns(), strict=True)]
    assert got[2] == pytest.approx(a) and got[0] == pytest.approx(b)


def test_an_outcome_is_added_to_every_reward():
    # A weighted mean of V + 2 is that of V, plus 2: see the first test.
    episode = debate((0.0, 1.0), (1.0, 0.5))
    episode.outcome = 2.0
    assign([episode], "maporl", round_gamma=0.5)
    assert [t.advantages[0] for t in episode.turns] == pytest.approx([2.25, 2.9166667, 3.0, 2.5])
