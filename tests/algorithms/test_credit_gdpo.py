"""GDPO: recomputed with numpy from the formula; kinds with a small spread are not drowned."""

from __future__ import annotations

import random

import numpy as np
import pytest

from mafrt.algorithms import assign
from mafrt.core.types import Episode, Scored, Turn


def batch(seed=0, problems=3, samples=4):
    chance = random.Random(seed)
    episodes = []
    for problem in range(problems):
        for sample in range(samples):
            turns = []
            for number, agent in enumerate(("a", "b")):
                turn = Turn(agent, [1], [2, 3], [-0.1, -0.2], "eos", "x", number, number, 0)
                turn.reward = chance.choice([0.0, 0.1, 0.3])
                turn.coach = Scored(chance.uniform(0, 10))
                turns.append(turn)
            episodes.append(Episode(f"{problem}-{sample}", f"p{problem}", turns, outcome=float(chance.random() < 0.5)))
    return episodes


@pytest.mark.parametrize("weights", [(1.0, 1.0, 1.0), (2.0, 0.5, 1.0), (1.0, -1.0, 0.25)])
def test_every_kind_is_normalised_by_itself_and_the_sum_over_the_batch(weights):
    outcome, process, own = weights
    episodes = batch()
    assign(episodes, "gdpo", outcome_weight=outcome, process_weight=process, reward_weight=own, turn_credit="own")
    sums = {}
    for problem in range(3):
        for place, agent in enumerate(("a", "b")):
            group = [episode for episode in episodes if episode.group == f"p{problem}"]
            kinds = [
                np.array([outcome * e.outcome for e in group]),
                np.array([process * e.turns[place].coach.score / 10 for e in group]),
                np.array([own * e.turns[place].reward for e in group]),
            ]
            whole = np.zeros(len(group))
            for weight, kind in zip(weights, kinds, strict=True):
                if np.ptp(kind) > 0:
                    whole += abs(weight) * (kind - kind.mean()) / (kind.std(ddof=1) + 1e-6)
            sums |= {(episode.id, agent): value for episode, value in zip(group, whole, strict=True)}
    every = np.array(list(sums.values()))
    for episode in episodes:
        for turn in episode.turns:
            expected = (sums[episode.id, turn.agent] - every.mean()) / (every.std(ddof=1) + 1e-6)
            assert turn.advantages == pytest.approx([expected] * 2, abs=1e-9)


def test_the_example_of_the_page():
    def pair():
        made = []
        for name, outcome, form in (("x", 1.0, 0.1), ("y", 0.0, 0.2)):
            turn = Turn("a", [1], [2], [-0.1], "eos", "x", 0, 0, 0)
            turn.reward = form
            made.append(Episode(name, "p", [turn], outcome=outcome))
        return made

    drowned, balanced = pair(), pair()
    assign(drowned, "dr_mas", outcome_to="all")
    assign(balanced, "gdpo")
    assert drowned[0].turns[0].advantages == pytest.approx([0.7071], abs=1e-4)
    assert balanced[0].turns[0].advantages == pytest.approx([0.0], abs=1e-4)
