"""Online DPO from own play: pairs, the moving reference, exact resume."""

from __future__ import annotations

import math

import pytest
import toy

from mafrt.core.errors import ConfigError
from mafrt.runners.offline.dpo import pairs_of

SPIN = {"algorithm": "spin", "n_samples": 8, "ppo_epoch": 1, "num_mini_batch": 1, "eval_episodes": 0}


def weights(runner):
    return {n: [p.clone() for p in runner.base.adapter_parameters(n)] for n in runner.base.adapters}


def same(a, b):
    return all((x == y).all() for x, y in zip(a, b, strict=True))


def test_a_pair_is_a_better_and_a_worse_answer_to_one_prompt_and_starts_at_ln_2():
    runner = toy.make(**SPIN)
    runner.assign_adapters()
    batch = runner.collect()
    pairs = runner.updater._pairs(batch.episodes, ("first", "second"))
    reward = {(t.agent, tuple(t.prompt_ids), tuple(t.action_ids)): [] for e in batch.episodes for t in e.turns}
    for episode in batch.episodes:
        for turn in episode.turns:  # the outcome goes to every turn
            reward[turn.agent, tuple(turn.prompt_ids), tuple(turn.action_ids)].append(episode.outcome)
    assert pairs and any(pair.agent == "first" for pair in pairs)
    for pair in pairs:
        good, bad = ((t.agent, tuple(t.prompt_ids), tuple(t.action_ids)) for t in pair.turns)
        assert good[:2] == bad[:2] and sum(reward[good]) / len(reward[good]) > sum(reward[bad]) / len(reward[bad])
    # The reference was renewed before the step, so every log-ratio is 0.
    metrics = runner.learn(batch).metrics
    assert metrics["loss/first"] == pytest.approx(math.log(2), abs=1e-5)
    assert metrics["pairs/first"] == sum(pair.agent == "first" for pair in pairs)
    assert pairs_of([]) == []


@pytest.mark.slow
def test_the_reference_moves_every_so_many_iterations_only():
    runner = toy.make(**SPIN, ref_update_freq=2, iterations=4)
    seen = []
    for _ in range(3):
        runner.assign_adapters()
        before = weights(runner)
        runner.learn(runner.collect())
        seen.append((before, weights(runner)))
    for number, (before, after) in enumerate(seen):
        assert not same(before["first"], after["first"])
        expected = before["first"] if number % 2 == 0 else before["first@reference"]
        assert same(after["first@reference"], expected)


@pytest.mark.slow
def test_resume_is_exact(tmp_path):
    settings = {**SPIN, "ref_update_freq": 3, "save_interval": 1}
    toy.train(tmp_path / "whole", iterations=3, **settings)
    toy.train(tmp_path / "part", iterations=2, **settings)
    toy.train(tmp_path / "part", tmp_path / "part", iterations=3, **settings)
    read = [(tmp_path / name / "metrics.jsonl").read_bytes() for name in ("whole", "part")]
    assert read[0] == read[1]


def test_settings_without_effect_are_refused():
    for name, value in (("clip_param", 0.1), ("kl_coef", 0.1), ("entropy_coef", 0.1)):
        with pytest.raises(ConfigError, match=f"'spin' has no {name}"):
            toy.settings(**SPIN, **{name: value})
    with pytest.raises(ConfigError, match="without async_steps"):
        toy.make(**SPIN, async_steps=1)
