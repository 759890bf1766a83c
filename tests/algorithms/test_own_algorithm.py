"""An algorithm of one's own: one file with its own loss and its own flag, and no edit of the library."""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path

import pytest
import yaml

from mafrt.algorithms import algorithm, assign, register_algorithm
from mafrt.config.algorithm import REGISTRY, AlgorithmSettings
from mafrt.config.train_config import TrainConfig
from mafrt.core.errors import ConfigError
from mafrt.core.types import Episode, Turn
from mafrt.scripts.cli.settings import train_config
from mafrt.scripts.train_math import COMMAND, main

FLAT = """
from dataclasses import dataclass
from mafrt.algorithms import Algorithm

@dataclass(frozen=True)
class Flat(Algorithm):
    \"\"\"Every token of a turn gets the turn's reward.\"\"\"

    boost: float = 1.0
    \"\"\"advantage per unit of reward\"\"\"

    def credit(self, trajectories, context):
        for row in (row for rows in trajectories for row in rows if row.dropped is None):
            values = [self.boost * row.reward] * len(row.turn.action_ids)
            row.fill(advantages=values, returns=values)
        return {"flat_boost": self.boost}

    def policy_loss(self, terms):
        return -(terms.advantages * terms.logprobs).sum() / terms.denominator, {}
"""
NUMBER = itertools.count()


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Writes a module into an empty working directory; its name is new every time, as it would be to a user."""
    monkeypatch.chdir(tmp_path)
    before = list(sys.path)

    def write(text: str) -> str:
        name = f"my_rule_{next(NUMBER)}"
        Path(f"{name}.py").write_text(text)
        return name

    yield write
    sys.path[:] = before


@pytest.mark.slow
def test_one_file_gives_a_rule_with_its_own_loss_and_flag(module, capsys):
    rule = f"{module(FLAT)}:Flat"
    few = ["--iterations", "1", "--n_rollout_threads", "4", "--eval_episodes", "0", "--max_new_tokens", "8"]
    assert main(["--algorithm", rule, "--boost", "2.5", "--coach", "rules", "--run_dir", "run", *few]) == 0
    line = json.loads(Path("run/metrics.jsonl").read_text().splitlines()[-1])
    assert line["flat_boost"] == 2.5 and "policy_loss/reasoner" in line
    stored = yaml.safe_load(Path("run/args.yaml").read_text())
    assert stored["algorithm"] == rule and stored["boost"] == 2.5 and "gae_lambda" not in stored
    assert not list(Path("run/checkpoints").rglob("critic.pth"))
    settings = COMMAND.read(["--config", "run/args.yaml"])
    assert train_config(settings).algorithm.boost == 2.5


def test_its_flag_exists_with_it_only(module):
    rule = f"{module(FLAT)}:Flat"
    assert COMMAND.settings(rule)["boost"].help.endswith("advantage per unit of reward; default: 1.0")
    with pytest.raises(ConfigError, match="--boost"):
        COMMAND.read(["--boost", "2"])


def test_a_name_may_be_registered(module, monkeypatch):
    monkeypatch.setattr(REGISTRY, "_known", dict(REGISTRY._known))
    name = module(FLAT)
    kind = type(algorithm(f"{name}:Flat"))
    register_algorithm("flat", kind)
    assert TrainConfig.of(algorithm="flat", boost=2).algorithm == kind(boost=2.0)
    assert "boost" in AlgorithmSettings.flags()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("class Flat(Algorithm)", "class Flat"), "is not an algorithm"),
        (("@dataclass(frozen=True)\nclass Flat(Algorithm):", "def Flat():"), "is not an algorithm"),
        (("Flat(Algorithm)", "Flat(Algorythm)"), "Algorythm.*my_rule_.*line 6"),
        (("boost: float = 1.0", "gamma: str = 'x'"), "declares gamma as str"),
        (("self.boost * row.reward", "self.bost * row.reward"), "credit.. raised AttributeError.*line 14"),
    ],
)
def test_errors_name_the_users_file_and_line(module, change, words):
    name = module(FLAT.replace(*change))
    episode = Episode("e", "g", [Turn("a", [1], [2], [-1.0], "eos", "x", 0, 0, 0)], outcome=1.0)
    with pytest.raises(ConfigError, match=words) as caught:
        COMMAND.read(["--algorithm", f"{name}:Flat"])
        assign([episode], f"{name}:Flat")
    assert name in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--algorithm", "grpo", "--critic_epoch", "3"], "has no critic_epoch; it belongs to cory, gae, happo"),
        (["--algorithm", "reinforce_pp", "--critic_epoch", "3"], "critic_epoch is a setting of the critic, .*--critic"),
        (["--algorithm", "reinforce_pp", "--gae_lambda", ".9"], "gae_lambda is a setting of the critic"),
        (["--algorithm", "reinforce_pp_baseline", "--critic"], "has no critic; it belongs to reinforce_pp"),
        (["--algorithm", "ppo", "--critic"], "has no critic; it belongs to reinforce_pp"),
        (["--algorithm", "reinforce_pp", "--critic", "--truncation", "bootstrap"], "ends its own return"),
        (["--algorithm", "dapo", "--warmup_steps", "3"], "has no warmup_steps; it belongs to"),
        (["--algorithm", "happo", "--agent_iteration_interval", "3"], "'happo' has no agent_iteration_interval"),
        (["--algorithm", "ppo", "--replay_steps", "9"], "has no replay_steps; it belongs to qmix, vdn"),
        (["--normalization_mode", "sum"], "level is token"),
        (["--clip_low", ".1"], "--clip_low"),
    ],
)
def test_a_setting_that_is_not_used_is_refused(flags, words):
    with pytest.raises(ConfigError, match=words) as caught:
        train_config(COMMAND.read(flags))
    assert "\n" not in str(caught.value)


def test_a_wrong_key_cannot_be_written():
    with pytest.raises(ConfigError, match="did you mean 'clip_high'"):
        TrainConfig.of(algorithm="ppo", clp_high=0.9)
    with pytest.raises(ConfigError, match="level is 'trun'"):
        TrainConfig.of(algorithm="marft", level="trun")
    with pytest.raises(ConfigError, match="critic_epoch is '8'"):
        TrainConfig.of(critic_epoch="8")


def test_another_algorithm_takes_a_recorded_run_over(tmp_path):
    """A run records all settings of its algorithm; only those that were chosen stand in another one's way."""
    stored = TrainConfig.of(algorithm="ppo").flat()
    assert train_config(COMMAND.read(["--algorithm", "reinforce_pp"], below=stored)).algorithm.name == "reinforce_pp"
    with pytest.raises(ConfigError, match="gae_lambda is a setting of the critic"):
        below = TrainConfig.of(algorithm="ppo", gae_lambda=0.5).flat()
        train_config(COMMAND.read(["--algorithm", "reinforce_pp"], below=below))


def test_flat_is_the_inverse_of_of():
    for name in REGISTRY.names():
        config = TrainConfig.of(algorithm=name)
        assert TrainConfig.of(**config.flat()) == config
