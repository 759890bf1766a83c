"""Flags that do nothing with the other values are refused; those that do something are taken."""

import pytest

from mafrt.config.team import AgentSpec, Team
from mafrt.config.train_config import TrainConfig
from mafrt.core.errors import ConfigError
from mafrt.runners.algorithm import resolve_rule
from mafrt.scripts.cli.dependent_flags import of_rule, of_team, refuse_ineffective


def refuse_clip(algorithm="ppo", team=None, **given):
    team = team or Team.of(["a", "b"])
    rule = resolve_rule(TrainConfig.of(algorithm=algorithm, n_samples=4, n_rollout_threads=4), team)
    values = {"clip_param": 0.1, "ppo_epoch": 1, "num_mini_batch": 1, "algorithm": algorithm, **given}
    refuse_ineffective({"clip_param"}, values | of_team(team, (), 1e-4) | of_rule(rule))


def test_a_clip_of_one_step_for_each_batch_is_refused():
    with pytest.raises(ConfigError, match="--ppo_epoch"):
        refuse_clip()
    with pytest.raises(ConfigError, match="--ppo_epoch"):
        refuse_clip("happo")


@pytest.mark.parametrize("given", [{"ppo_epoch": 2}, {"num_mini_batch": 2}, {"algorithm": "gspo"}])
def test_a_clip_that_may_act_is_taken(given):
    refuse_clip(**given)


def test_agents_that_move_one_adapter_in_turn_may_clip():
    refuse_clip("happo", Team((AgentSpec("a", adapter="one"), AgentSpec("b", adapter="one"))))
