"""Rewards without spread teach nothing: critic noise is never scaled up, and the metrics say so."""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch
from helpers_credit import assign as plain
from helpers_runs import adapters, same
from toy import make

from mafrt.algorithms import assign
from mafrt.algorithms.stats import correlation
from mafrt.core.types import Episode, Turn


def batch(rewards, noise=0.02, tokens=4) -> list[Episode]:
    """Episodes of one turn with values that are noise around 0."""
    rng = random.Random(3)
    return [
        Episode(
            str(i), "p", [Turn("a", [1], [2] * tokens, [-1.0] * tokens, "eos", "x", 0, 0, 0, reward=reward,
                               values=[rng.gauss(0, noise) for _ in range(tokens)])],
        )
        for i, reward in enumerate(rewards)
    ]  # fmt: skip


@pytest.mark.parametrize("rule", ["ppo", "ippo", "maporl", "happo", "mappo"])
@pytest.mark.parametrize("reward", [0.0, 1.0])
def test_equal_rewards_give_advantages_of_0(rule, reward):
    episodes = batch([reward] * 16)
    metrics = assign(episodes, rule)
    assert metrics["flat_returns/a"] == 1.0
    assert all(advantage == 0.0 for e in episodes for advantage in e.turns[0].advantages)


def test_one_right_answer_among_many_is_learnt_from():
    episodes = batch([1.0] + [0.0] * 15)
    assert assign(episodes, "ppo")["flat_returns/a"] == 0.0
    assert min(episodes[0].turns[0].advantages) > 2.0


def test_a_spread_below_the_floor_is_not_scaled_to_1():
    # Returns 0 and 1 that the critic knows up to .001: the divisor is a tenth of their deviation, .05, and not .001.
    episodes = batch([0.0, 1.0] * 8, tokens=1)
    for episode in episodes:
        episode.turns[0].values = [episode.turns[0].reward + 0.001 * (-1) ** int(episode.id[-1] in "0347")]
    assign(episodes, "ppo")
    assert max(abs(e.turns[0].advantages[0]) for e in episodes) == pytest.approx(0.02, rel=0.3)


@pytest.mark.parametrize("rule", ["reinforce_pp", "grpo"])
def test_divergence_alone_is_not_scaled_to_1(rule):
    episodes = batch([0.0] * 4, tokens=1)
    for i, episode in enumerate(episodes):
        episode.turns[0].ref_logprobs = [-1.0 - 0.01 * i]
    plain(episodes, rule, kl_coef=0.1, kl_in="reward")
    assert 0.0 < max(abs(e.turns[0].advantages[0]) for e in episodes) < 0.01


@pytest.mark.parametrize("rule", ["ppo", "ippo", "mappo", "maporl", "happo", "marft", "gae", "cory"])
@pytest.mark.parametrize("noise", [0.0, 0.3])
def test_where_rewards_are_equal_a_critic_adds_nothing_to_the_divergence(rule, noise):
    rng = random.Random(0)
    episodes = batch([0.7] * 8, noise)
    for episode in episodes:
        # Two turns, each paid the same, so that the returns to go differ by position and by nothing else.
        (turn,) = episode.turns
        second = dataclasses.replace(turn, turn=1, env_step=1, values=[rng.gauss(0, noise) for _ in turn.values])
        episode.turns.append(second)
        for spoken in episode.turns:
            spoken.ref_logprobs = [-1.0 + 0.1 * rng.gauss(0, 1) for _ in spoken.logprobs]
    assign(episodes, rule, kl_coef=0.01, kl_in="reward")
    advantages = [advantage for e in episodes for turn in e.turns for advantage in turn.advantages]
    assert 0.0 < max(map(abs, advantages)) < 0.01 and abs(sum(advantages)) < 1e-9
    # More divergence from here to the turn's end is worth less.
    penalties = [
        sum(p - r for p, r in zip(turn.logprobs, turn.ref_logprobs, strict=True)) for e in episodes for turn in e.turns
    ]
    firsts = [turn.advantages[0] for e in episodes for turn in e.turns]
    assert correlation(list(zip(penalties, firsts, strict=True))) < -0.9


@pytest.mark.slow
def test_an_iteration_of_zero_rewards_leaves_every_weight_as_it_is():
    torch.manual_seed(0)
    runner = make(None, iterations=3, eval_episodes=0, ppo_epoch=2, weight_decay=0.1)
    runner.learn(runner.collect())  # real rewards, so that the optimizers hold moments
    before = {name: [p.clone() for p in weights] for name, weights in adapters(runner).items()}
    batch = runner.collect()
    for episode in batch.episodes:
        episode.outcome = 0.0
        for turn in episode.turns:
            turn.reward = 0.0
    metrics = runner.learn(batch).metrics
    assert metrics["flat_returns/first"] == metrics["flat_returns/second"] == 1.0
    assert all(same(before[name], weights) for name, weights in adapters(runner).items())
