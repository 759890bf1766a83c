"""Dr. MAMR: recomputed with numpy; the influence of a turn; no division by the number of turns."""

from __future__ import annotations

import random
from collections import defaultdict

import numpy as np
import pytest
from helpers_models import tiny_tokenizer

from mafrt.algorithms import assign
from mafrt.config.team import Team
from mafrt.core.types import Episode, Turn
from mafrt.rollout.influence import fill_influence
from mafrt.rollout.prompts import encode_prompt


def turn(agent, number, text, reward=None, influence=None, seen=None):
    made = Turn(agent, [1], [2, 3], [-0.1, -0.2], "eos", text, number, number, 0, reward, observation=seen)
    made.influence = influence
    return made


def batch(seed=0):
    chance = random.Random(seed)
    episodes = []
    for problem in range(3):
        for sample in range(4):
            turns = []
            for number in range(chance.randint(1, 4)):
                text = chance.choice(["so it is seven", "blank", "first add the two"])
                seen = None if chance.random() < 0.2 else chance.uniform(-0.1, 0.9)
                turns.append(turn("ab"[number % 2], number, text, chance.choice([None, 0.5]), seen))
            outcome = float(chance.random() < 0.5)
            episodes.append(Episode(f"{problem}-{sample}", f"p{problem}", turns, outcome=outcome))
    return episodes


@pytest.mark.parametrize("weight", [0.0, 0.1, 2.0])
def test_the_formula(weight):
    episodes = batch()
    metrics = assign(episodes, "dr_mamr", influence_weight=weight)
    expected, measured = {}, defaultdict(list)
    for problem in range(3):
        group = [episode for episode in episodes if episode.group == f"p{problem}"]
        totals = np.array([e.outcome + sum(t.reward or 0.0 for t in e.turns) for e in group])
        scaled = (totals - totals.mean()) / (totals.std(ddof=1) + 1e-6) if np.ptp(totals) else 0 * totals
        for agent in "ab":
            own = [(e, t) for e in group for t in e.turns if t.agent == agent and t.influence is not None]
            means = [np.mean([u.influence for _, u in own if u.text == t.text]) for _, t in own]
            spread = max(np.std(means, ddof=1), 0.01) + 1e-6 if len(own) > 1 and np.ptp(means) else np.inf
            for (e, t), number in zip(own, means, strict=True):
                expected[e.id, t.turn] = weight * (number - np.mean(means)) / spread
                measured[agent].append(t.influence)
        for e, part in zip(group, scaled, strict=True):
            for t in e.turns:
                whole = part + expected.get((e.id, t.turn), 0.0)
                assert t.advantages == pytest.approx([whole] * 2, abs=1e-9)
    for agent, numbers in measured.items():
        assert not weight or metrics[f"influence_nats/{agent}"] == pytest.approx(np.mean(numbers))


def test_similar_words_share_their_influence():
    def pair(words):
        first = [turn("a", 0, words, influence=0.0), turn("b", 1, "x")]
        second = [turn("a", 0, "one two three four five six seven eight nine ten", influence=1.0), turn("b", 1, "x")]
        episodes = [Episode("0", "p", first, outcome=1.0), Episode("1", "p", second, outcome=1.0)]
        assign(episodes, "dr_mamr", influence_weight=1.0)
        return first[0].advantages[0]

    # Nine of ten words agree: both have .5. Two of ten agree: 0 and 1, deviation .7071.
    assert pair("one two three four five six seven eight nine TEN") == 0.0
    assert pair("one two") == pytest.approx(-0.7071, abs=1e-4)


def test_the_mean_over_turns_has_the_bias_and_this_rule_does_not():
    """Two right answers, one after two turns and one after four; a wrong one. Right is right."""

    def episodes():
        return [
            Episode("short", "p", [turn("ab"[n % 2], n, "x") for n in range(2)], outcome=1.0),
            Episode("long", "p", [turn("ab"[n % 2], n, "x") for n in range(4)], outcome=1.0),
            Episode("wrong", "p", [turn("ab"[n % 2], n, "x") for n in range(2)], outcome=0.0),
        ]

    def first(rule, **settings):
        played = episodes()
        assign(played, rule, **settings)
        return [episode.turns[0].advantages[0] for episode in played]

    short, long, wrong = first("dr_mamr")
    assert short == long > 0 > wrong
    # grpo with the outcome on the last turn takes the mean over turns, 1/2 and 1/4: the longer one is "worse".
    # Deviations of .5, .25, 0 from .25: .25, 0, -.25, and their standard deviation is .25.
    assert first("grpo", outcome_to="last") == pytest.approx([1.0, 0.0, -1.0], abs=1e-4)
    short, long, wrong = first("grpo")  # the outcome on every turn: the mean is the outcome
    assert short == long > 0 > wrong


TEAM = Team.of(["a", "b"])


def test_influence_is_the_drop_of_the_next_turns_log_probability():
    tokenizer = tiny_tokenizer()
    said = [
        turn("a", 0, "plan 12", seen="task"),
        turn("b", 1, "out", seen=[{"role": "user", "content": "task\nplan 12\nplan 12!"}]),
        turn("a", 2, "end", seen="nothing of it"),
    ]
    asked = []

    def logprobs(turns):
        asked.extend(turns)
        return [[-0.01 * len(t.prompt_ids)] * len(t.action_ids) for t in turns]

    fill_influence([Episode("e", "p", said)], TEAM, dict.fromkeys("ab", tokenizer), logprobs)
    assert [t.turn for t in asked] == [1, 1] and said[1].influence is said[2].influence is None
    # The last occurrence goes; the rest of the prompt is as the player made it.
    less = encode_prompt(tokenizer, TEAM.agent("b").prompt, [{"role": "user", "content": "task\nplan 12\n!"}])
    assert asked[1].prompt_ids == less and asked[0].prompt_ids == said[1].prompt_ids
    assert said[0].influence == pytest.approx(-0.01 * 1 + 0.01 * len(less))


@pytest.mark.slow
def test_it_trains_and_measures_influence_on_the_model():
    import toy

    runner = toy.make(algorithm="dr_mamr", n_samples=4, n_rollout_threads=8, iterations=1, eval_episodes=0, ppo_epoch=1)
    before = [p.clone() for p in runner.base.adapter_parameters("first")]
    rows = []
    runner.updater.learner.update, update = (
        lambda turns, *a, **k: (rows.extend(turns), update(turns, *a, **k))[1],
        runner.updater.learner.update,
    )
    runner.run()
    after = runner.base.adapter_parameters("first")
    assert any((old != new).any() for old, new in zip(before, after, strict=True))
    spoken = [t for t in rows if t.agent == "first" and t.text.strip()]
    assert spoken and all(t.influence is not None for t in spoken)
    assert all(t.influence is None for t in rows if t.agent == "second")
    assert len({t.influence for t in spoken}) > 1
