"""MaxRL: the authors' numbers, and the objective that its expected gradient belongs to."""

from __future__ import annotations

import pytest
from helpers_trees import SAMPLES, P, at_the_end, exact, expected

from mafrt.algorithms import assign
from mafrt.core.types import Episode, Turn


def credited(*groups, **settings):
    episodes = [
        Episode(
            f"{number}-{n}", f"p{number}", [Turn("a", [1], [2, 3], [-1.0] * 2, "eos", "x", 0, 0, 0)], outcome=reward
        )
        for number, rewards in enumerate(groups)
        for n, reward in enumerate(rewards)
    ]
    assign(episodes, "maxrl", **settings)
    found = iter([episode.turns[0].advantages for episode in episodes])
    return [[next(found) for _ in rewards] for rewards in groups]


def test_by_hand_a_rare_success_weighs_more():
    # Means .25 and .75: (1 - .25) / .25 = 3, (0 - .25) / .25 = -1; (1 - .75) / .75 = 1/3, (0 - .75) / .75 = -1.
    hard, easy = credited([1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 0.0], eps=0.0)
    assert hard == [[3.0] * 2, [-1.0] * 2, [-1.0] * 2, [-1.0] * 2]
    assert [a for a, _ in easy] == pytest.approx([1 / 3, 1 / 3, 1 / 3, -1.0])


def test_the_authors_numbers():
    """`compute_maxrl_outcome_advantage` of tajwarfahim/maxrl at c0698ebb43, verl/trainer/ppo/core_algos.py:
    (score - mean) / (mean + 1e-6) in each group, e.g. for [.5, 1, 0]: mean .5, 0, .999998, -.999998."""
    [found] = credited([0.5, 1.0, 0.0])
    assert [a for a, _ in found] == pytest.approx([0.0, 0.5 / 0.500001, -0.5 / 0.500001], abs=1e-12)


def test_all_or_none_solved_and_one_alone_teach_nothing():
    assert credited([1.0, 1.0], [0.0, 0.0], [1.0]) == [[[0.0] * 2] * 2, [[0.0] * 2] * 2, [[0.0] * 2]]


def test_a_mean_that_is_not_above_0_does_not_turn_the_sign_around():
    [found] = credited([-1.0, -3.0])
    assert [a for a, _ in found] == [1.0, -1.0]


def one_of_two(play):
    play.outcome = float(play.say("a") == [1])


@pytest.mark.parametrize(("tree", "solved"), [(one_of_two, P), (at_the_end, P * P + (1 - P) ** 2)])
def test_the_expected_gradient_is_that_of_the_first_terms_of_the_log(tree, solved):
    # log p = - sum over k of (1 - p)^k / k. Of its derivative 1 / p, the terms up to N - 1 = 2: 1 + (1 - p).
    weight = sum((1 - solved) ** k for k in range(SAMPLES - 1))
    right = {state: weight * value for state, value in exact(tree, own=False).items()}
    assert expected(tree, "maxrl", eps=0.0) == pytest.approx(right, abs=1e-12)


def penalised(rewards, gaps, **settings):
    """Advantages of one problem's samples whose log-probabilities are `gaps` above the reference's."""
    episodes = [
        Episode(str(n), "p", [Turn("a", [1], [2], [-1.0], "eos", "x", 0, 0, 0, ref_logprobs=[-1.0 - gap])], reward)
        for n, (reward, gap) in enumerate(zip(rewards, gaps, strict=True))
    ]
    assign(episodes, "maxrl", kl_in="reward", eps=0.0, **settings)
    return [episode.turns[0].advantages[0] for episode in episodes]


@pytest.mark.parametrize("reward", [0.0, 1.0, 0.3, 1e-6])
def test_a_penalty_is_never_divided_by_the_share_of_successes(reward):
    # Penalties -.01 * (.1, -.3, -.1): mean .001, so the gaps are -.002, .002 and 0.
    assert penalised([reward] * 3, [0.1, -0.3, -0.1], kl_coef=0.01) == pytest.approx([-0.002, 0.002, 0.0], abs=1e-9)


def test_by_hand_with_a_penalty():
    # Rewards 1, 0, 0, 0: 3, -1, -1, -1. Penalties -.1 * (.4, 0, 0, 0): mean -.01; gaps -.03, .01, .01, .01.
    found = penalised([1.0, 0.0, 0.0, 0.0], [0.4, 0.0, 0.0, 0.0], kl_coef=0.1)
    assert found == pytest.approx([2.97, -0.99, -0.99, -0.99])


def test_a_mean_that_is_0_up_to_a_rounding_divides_nothing():
    [found] = credited([-0.3, 0.1, 0.2])  # their sum is 2.8e-17
    assert [a for a, _ in found] == pytest.approx([-0.3, 0.1, 0.2])
