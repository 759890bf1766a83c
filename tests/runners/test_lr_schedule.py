"""Learning rates over a run, and whose settings count when a run goes on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from helpers_runs import hashes
from toy import make, train

from mafrt.config.train_config import LearnConfig
from mafrt.core.errors import ConfigError
from mafrt.training import policy_objective
from mafrt.training.lr_schedule import make_entropy_schedule, make_lr_schedule


def rates(run: Path) -> list[float]:
    return [json.loads(line)["lr/first"] for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    ("schedule", "warmup", "expected"),
    [
        ("constant", 0, [1, 1, 1, 1]),
        ("constant", 3, [0.25, 0.5, 0.75, 1]),
        ("linear", 0, [1, 0.75, 0.5, 0.25]),
        ("linear", 2, [1 / 3, 2 / 3, 1, 0.5]),
        ("cosine", 0, [1, 0.5 + 2**0.5 / 4, 0.5, 0.5 - 2**0.5 / 4]),
    ],
)
def test_the_pace_of_each_iteration(schedule, warmup, expected):
    lr_schedule = make_lr_schedule(LearnConfig(lr_schedule=schedule, lr_warmup=warmup), 4)
    assert [lr_schedule(n) for n in range(4)] == pytest.approx(expected)
    assert lr_schedule(9) == (1 if schedule == "constant" else 0)  # a run that goes on beyond its end


@pytest.mark.slow
def test_the_entropy_bonus_falls_to_nothing(monkeypatch, tmp_path):
    falling = make_entropy_schedule(LearnConfig(entropy_schedule="linear"), 4)
    assert [falling(n) for n in (0, 1, 3, 4, 9)] == [1, 0.75, 0.25, 0, 0]
    assert make_entropy_schedule(LearnConfig(), 4)(3) == 1
    seen = []

    def entropy_loss(entropy, *, coef, denominator):
        seen.append(coef)
        return policy_objective_entropy(entropy, coef=coef, denominator=denominator)

    policy_objective_entropy = policy_objective.entropy_loss
    monkeypatch.setattr(policy_objective, "entropy_loss", entropy_loss)
    train(tmp_path / "run", iterations=2, entropy_coef=0.5, entropy_schedule="linear")
    assert set(seen) == {0.5, 0.25}


@pytest.mark.slow
@pytest.mark.ci
def test_a_scheduled_run_is_logged_and_resumes_exactly(tmp_path):
    changes = {"iterations": 4, "lr": 1e-2, "lr_schedule": "linear", "lr_warmup": 1, "save_interval": 2}
    train(tmp_path / "whole", **changes, keep_last=9)
    assert rates(tmp_path / "whole") == pytest.approx([0.5e-2, 1e-2, 1e-2 * 2 / 3, 1e-2 / 3])
    train(tmp_path / "cut", tmp_path / "whole" / "checkpoints" / "step_000002", **changes, keep_last=9)
    newest = {name: value for name, value in hashes(tmp_path / "cut").items() if not name.endswith(".jsonl")}
    whole = hashes(tmp_path / "whole")
    assert all(value == whole[name] for name, value in newest.items())


@pytest.mark.slow
def test_a_run_goes_on_with_the_settings_that_it_is_given_now(tmp_path):
    run = tmp_path / "run"
    train(run, iterations=2, lr=1e-2, critic_lr=1e-2, opti_eps=1e-6, weight_decay=0.1)
    runner = make(run, run, iterations=3, lr=1e-4, critic_lr=1e-3, opti_eps=1e-8, weight_decay=0.0)
    learner, critic = runner.updater.learner, runner.updater.critic.optimizer
    for optimizer in learner.optimizers.values():
        assert len(optimizer.state) > 0  # the moments came along
        (group,) = optimizer.param_groups
        assert (group["lr"], group["eps"], group["weight_decay"]) == (1e-4, 1e-8, 0.0)
    assert critic.state and critic.param_groups[0]["lr"] == 1e-3
    runner.run()
    assert rates(run) == [1e-2, 1e-2, 1e-4]


def test_a_pace_that_cannot_be_is_refused():
    with pytest.raises(ConfigError, match="lr_warmup is -1"):
        LearnConfig(lr_warmup=-1)
    with pytest.raises(ConfigError, match="choose one of"):
        LearnConfig(lr_schedule="step")
