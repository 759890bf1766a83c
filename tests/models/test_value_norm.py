"""The critic learns returns of any size: they are normalised by a running mean and deviation."""

from __future__ import annotations

import pytest
import torch
from helpers_learner import AGENTS, make_base, make_turns

from mafrt.config.algorithm_groups import ValueHeadSettings
from mafrt.config.train_config import LearnConfig
from mafrt.core.types import Episode
from mafrt.models.value_head import ValueHead, load_critic, save_critic
from mafrt.training.critic import Critic


def values_after(iterations: int, returns: float, **settings) -> list[float]:
    base, turns = make_base(), make_turns(12)
    stage = Critic(base, LearnConfig(), ValueHeadSettings(**settings), "token", seed=0)
    episodes = [Episode(str(i), "g", [turn]) for i, turn in enumerate(turns)]
    for iteration in range(iterations):
        features = stage.annotate(episodes, dict.fromkeys(AGENTS, 1.0), values=True, reference=False)
        for number, turn in enumerate(turns):
            turn.returns = [returns + number % 3 - 1] * len(turn.action_ids)
        stage.update(features, iteration)
    stage.annotate(episodes, dict.fromkeys(AGENTS, 1.0), values=True, reference=False)
    return [value for turn in turns for value in turn.values]


@pytest.mark.parametrize("returns", [10.0, -300.0])
def test_returns_of_any_size_are_reached_within_a_few_iterations(returns):
    values = values_after(3, returns)
    assert abs(sum(values) / len(values) - returns) < 0.5 and max(abs(v - returns) for v in values) < 5.0
    plain = values_after(3, 10.0, value_norm=False)
    assert max(plain) < 3.0  # without it, and with all else equal


def test_mean_and_deviation_follow_by_hand():
    # First batch 4, 6 counts in full: mean 5, deviation 1. Then 7, 7 with weight (1 - .9)/(1 - .81) = .5263: mean
    # 5 + .5263 * 2 = 6.0526, square .4737 * 26 + .5263 * 49 = 38.105, deviation sqrt(38.105 - 36.634) = 1.2130
    head = ValueHead(8, 4)
    head.follow(torch.tensor([4.0, 6.0]))
    assert (float(head.centre), float(head.scale)) == pytest.approx((5.0, 1.0))
    head.follow(torch.tensor([7.0, 7.0]))
    assert (float(head.centre), float(head.scale)) == pytest.approx((6.0526, 1.2130), abs=1e-3)


def test_equal_returns_do_not_divide_by_0():
    head = ValueHead(8, 4)
    head.follow(torch.zeros(9))
    head.follow(torch.full((9,), 5.0))
    assert torch.isfinite(head(torch.randn(3, 8))).all()


def test_a_file_keeps_the_statistics_and_older_ones_load(tmp_path):
    head, features = ValueHead(8, 4), torch.randn(5, 8)
    head.follow(torch.full((9,), 5.0) + torch.randn(9))
    save_critic(head, tmp_path / "critic.pth")
    assert torch.equal(load_critic(tmp_path / "critic.pth")(features), head(features))
    content = torch.load(tmp_path / "critic.pth", weights_only=True)
    content["state"] = {name: value for name, value in content["state"].items() if name.startswith(("inner", "out"))}
    torch.save(content, tmp_path / "old.pth")
    assert load_critic(tmp_path / "old.pth").scale == 1.0
