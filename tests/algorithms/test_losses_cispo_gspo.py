"""CISPO and GSPO: losses and gradients by hand, what their clips do, and that they learn with the right adapter."""

from __future__ import annotations

import math

import pytest
import torch
from toy import make

from mafrt.algorithms import algorithm, assign
from mafrt.algorithms.losses import PolicyTerms
from mafrt.core.errors import ConfigError
from mafrt.core.types import Episode, Turn


def terms(new, old, advantages, *, turn=None, denominator=1.0, weights=None):
    new = torch.tensor(new, dtype=torch.float64, requires_grad=True)
    old, advantages = (torch.tensor(values, dtype=torch.float64) for values in (old, advantages))
    turn = torch.zeros(len(new), dtype=torch.long) if turn is None else torch.tensor(turn)
    weights = None if weights is None else torch.tensor(weights, dtype=torch.float64)
    return new, PolicyTerms(new, old, advantages, denominator, turn=turn, words=turn, weights=weights)


def loss_and_gradient(rule, *given, **more):
    new, parts = terms(*given, **more)
    loss, stats = rule.policy_loss(parts)
    [gradient] = torch.autograd.grad(loss, new)
    return float(loss.detach()), gradient.tolist(), {name: float(value) for name, value in stats.items()}


def test_cispo_by_hand():
    rule = algorithm("cispo", clip_high=0.5)
    # Ratios 2, 1/2 and 1 are weights 1.5, .5 and 1. Loss: -(1.5 * 2 * -1 + .5 * -1 * -3 + 1 * 1 * -2) / 4 = .875.
    # Gradient: minus weight times A over 4, at the clipped token too: -1.5 * 2 / 4, .5 / 4, -1 / 4.
    old = [-1 - math.log(2), -3 + math.log(2), -2.0]
    loss, gradient, stats = loss_and_gradient(rule, [-1.0, -3.0, -2.0], old, [2.0, -1.0, 1.0], denominator=4.0)
    assert loss == pytest.approx(0.875)
    assert gradient == pytest.approx([-0.75, 0.125, -0.25])
    assert stats["clipped"] == 1 and stats["count"] == 3 and stats["ratio_max"] == pytest.approx(2.0)
    # PPO's clip leaves nothing of the first two.
    _, ppo, _ = loss_and_gradient(
        algorithm("grpo", clip_high=0.5), [-1.0, -3.0, -2.0], old, [2.0, -1.0, 1.0], denominator=4.0
    )
    assert ppo == pytest.approx([0.0, 0.0, -0.25])


def test_cispo_has_no_lower_bound_by_default_and_5_above():
    rule, old = algorithm("cispo"), [-1.0, -1.0]
    new = [-1.0 - math.log(100), -1.0 + math.log(100)]
    _, gradient, stats = loss_and_gradient(rule, new, old, [1.0, 1.0])
    assert gradient == pytest.approx([-0.01, -5.0]) and stats["clipped"] == 1


def test_cispo_takes_weights_without_gradient_and_masks_what_is_not_finite():
    nan = float("nan")
    loss, gradient, stats = loss_and_gradient(
        algorithm("cispo"),
        [-1.0, -2.0, nan, -1.0],
        [-1.0, -2.0, -1.0, float("inf")],
        [1.0] * 4,
        weights=[0.5, 2.0, 1.0, 1.0],
    )
    # .5 * 1 + 2 * 2
    assert loss == pytest.approx(4.5) and gradient == [-0.5, -2.0, 0.0, 0.0] and stats["nonfinite"] == 2
    with pytest.raises(ValueError, match="denominator"):
        loss_and_gradient(algorithm("cispo"), [-1.0], [-1.0], [1.0], denominator=0.0)


def test_gspo_by_hand():
    # Turn 0: log-ratios .0002 and .0004, mean .0003, s = exp(.0003), within [1 - .0003, 1 + .0004]: its gradient is
    # -s A / 2 tokens / 2 turns each. Turn 1: log-ratios .01, -.002, .001, mean .003, beyond the clip with A > 0: none.
    new = [-1.0, -2.0, -1.0, -1.0, -1.0]
    old = [-1.0002, -2.0004, -1.01, -0.998, -1.001]
    loss, gradient, stats = loss_and_gradient(
        algorithm("gspo"), new, old, [2.0, 2.0, 1.0, 1.0, 1.0], turn=[0, 0, 1, 1, 1], denominator=2.0
    )
    s = math.exp(0.0003)
    assert loss == pytest.approx(-(2 * s + 1.0004) / 2)
    assert gradient == pytest.approx([-2 * s / 4, -2 * s / 4, 0.0, 0.0, 0.0])
    assert stats["count"] == 2 and stats["clipped"] == 1


@pytest.mark.parametrize(
    ("name", "setting"),
    [
        ("gspo", {"level": "token"}),
        ("cispo", {"level": "action"}),
        ("cispo", {"dual_clip": 3.0}),
        ("cispo", {"clip_param": 0.1}),
    ],
)
def test_settings_that_would_make_another_rule_are_refused(name, setting):
    with pytest.raises(ConfigError, match=f"'{name}' has no {next(iter(setting))}"):
        algorithm(name, **setting)


@pytest.mark.parametrize("name", ["gspo", "cispo"])
def test_the_advantage_is_that_of_grpo(name):
    def batch():
        turns = [Turn("a", [1], [2], [-1.0], "eos", "x", 0, 0, 0) for _ in range(3)]
        return [
            Episode(str(n), "p", [turn], outcome=r) for n, (turn, r) in enumerate(zip(turns, (0, 1, 3), strict=True))
        ]

    one, other = batch(), batch()
    assign(one, name)
    assign(other, "grpo")
    assert [e.turns[0].advantages for e in one] == [e.turns[0].advantages for e in other]


@pytest.mark.parametrize("name", ["gspo", "cispo", "rae"])
def test_a_whole_update_moves_the_agent_that_learns_and_no_other(name):
    groups = {} if name == "rae" else {"n_samples": 4}
    runner = make(algorithm=name, eval_episodes=0, freeze=("second",), **groups)
    before = {agent: runner.base.adapter_state(agent) for agent in ("first", "second")}
    for _ in range(2):
        metrics = runner.learn(runner.collect()).metrics
    after = {agent: runner.base.adapter_state(agent) for agent in ("first", "second")}
    moved = {agent: any((before[agent][k] != after[agent][k]).any() for k in before[agent]) for agent in before}
    assert moved == {"first": True, "second": False}
    assert metrics["grad_norm/first"] > 0 and "grad_norm/second" not in metrics


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gspo", "cispo", "rae"])
def test_the_toy_task_is_learnt(name):
    groups = {} if name == "rae" else {"n_samples": 4}
    wide = {"clip_param": 0.2, "clip_high": 0.2} if name == "gspo" else {}  # 56 steps are few for a clip of .0003
    summary = make(algorithm=name, iterations=14, n_rollout_threads=32, lr=5e-2, **groups, **wide).run()
    assert summary.after["eval/avg@2"] > summary.before["eval/avg@2"] + 0.08
