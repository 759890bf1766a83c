"""What is logged of each agent: that it is there for every agent, and that the numbers are the agent's own."""

from __future__ import annotations

import pytest
from helpers_runs import metrics
from toy import train

from mafrt.algorithms import assign
from mafrt.algorithms.happo import CompoundRatio
from mafrt.core.types import Episode, Turn

ALWAYS = ("reward", "advantage_mean", "advantage_std", "kl", "clip_fraction", "entropy", "grad_norm", "ref_kl")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "besides"),
    [
        ({"algorithm": "ppo"}, ("explained_variance",)),
        ({"algorithm": "mappo"}, ("explained_variance",)),
        ({"algorithm": "happo"}, ("explained_variance", "compound_std")),
        ({"algorithm": "grpo", "n_samples": 4}, ("groups_no_spread",)),
        ({"algorithm": "dr_mas", "n_samples": 4}, ("groups_no_spread",)),
        ({"algorithm": "gigpo", "n_samples": 4}, ("groups_no_spread",)),
        ({"algorithm": "reinforce_pp_baseline", "n_samples": 4}, ("groups_no_spread",)),
        ({"algorithm": "qmix", "n_samples": 4}, ("groups_no_spread",)),
    ],
    ids=lambda value: value.get("algorithm") if isinstance(value, dict) else "",
)
def test_every_agent_has_every_number(settings, besides, tmp_path):
    train(tmp_path / "run", iterations=1, eval_episodes=0, kl_coef=1e-3, **settings)
    [line] = metrics(tmp_path / "run")
    missing = [f"{name}/{agent}" for name in (*ALWAYS, *besides) for agent in ("first", "second")]
    missing = [name for name in missing if not isinstance(line.get(name), float)]
    assert not missing and line["nonfinite_values"] == 0


def test_groups_without_spread_of_each_agent_by_hand():
    """a and b speak in all of p's samples, a alone in q's. p: a earns 1 and 0, b 1 and 1; q: a earns 1 and 1.

    By agent: a's groups are p (spread) and q (none): .5; b's is p (none): 1. By problem, trajectories' means are 1 and
    .5 in p, 1 and 1 in q: a is in both, b in p alone, which has spread.
    """

    def turn(agent: str, index: int, reward: float) -> Turn:
        return Turn(agent, [1], [2], [-1.0], "eos", "x", index, index, 0, reward=reward)

    episodes = [
        Episode("0", "p", [turn("a", 0, 1.0), turn("b", 1, 1.0)]),
        Episode("1", "p", [turn("a", 0, 0.0), turn("b", 1, 1.0)]),
        Episode("2", "q", [turn("a", 0, 1.0)]),
        Episode("3", "q", [turn("a", 0, 1.0)]),
    ]
    found = assign(episodes, "dr_mas")
    assert (found["groups_no_spread/a"], found["groups_no_spread/b"]) == (0.5, 1.0)
    found = assign(episodes, "grpo")
    assert (found["groups_no_spread"], found["groups_no_spread/a"], found["groups_no_spread/b"]) == (0.5, 0.5, 0.0)


def test_spread_of_m_is_what_the_agent_is_weighed_by():
    def turn(agent: str, index: int) -> Turn:
        return Turn(agent, [1], [2], [-1.0], "eos", "x", index, index, 0)

    episodes = [Episode(str(i), "p", [turn("a", 0), turn("b", 1)]) for i in range(2)]
    ratio = CompoundRatio(episodes)
    assert ratio.spread("a") == {"compound_std/a": 0.0}
    # a's turns become 1.5 and .5 times as likely (log-ratios log 1.5, log .5): M is 1.5 and .5 for b, spread .5.
    import math

    ratio.update([(0, [-1 + math.log(1.5)]), (2, [-1 + math.log(0.5)])])
    assert ratio.spread("b") == {"compound_std/b": pytest.approx(0.5)}
    assert ratio.spread("nobody") == {}
