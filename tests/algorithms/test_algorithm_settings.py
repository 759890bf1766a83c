"""From settings to a learning rule: presets, what users say instead, and what is refused before a model is loaded."""

from __future__ import annotations

import math

import pytest

from mafrt import algorithms
from mafrt.config.agent import AgentSpec
from mafrt.config.schema import UNBOUNDED, describe
from mafrt.config.team import Team
from mafrt.config.train_config import TrainConfig
from mafrt.core.errors import ConfigError
from mafrt.runners.algorithm import resolve_rule

DUO = Team.of(["a", "b"])


def resolve(team=DUO, **settings):
    return resolve_rule(TrainConfig.of(n_rollout_threads=8, **settings), team)


def test_every_algorithm_resolves_with_what_it_needs():
    for name in algorithms.ALGORITHMS:
        rule = resolve(algorithm=name, n_samples=4)
        assert rule.name == name.replace("gae", "ppo") and rule.schedule.plan(0).agents


def test_a_name_that_was_resolved_before_needs_no_look_through_the_folders_of_modules(monkeypatch):
    resolve(algorithm="grpo", n_samples=4)

    def looked():
        raise AssertionError("the folders of sys.path were looked through again")

    monkeypatch.setattr("importlib.invalidate_caches", looked)
    assert resolve(algorithm="grpo", n_samples=4).name == "grpo"


def test_presets_hold_until_the_user_says_otherwise():
    assert resolve(algorithm="marft").settings.level == "action"
    assert resolve(algorithm="marft", level="token").settings.level == "token"
    assert resolve(algorithm="ippo").settings.bootstrap == "none"
    assert resolve(algorithm="ippo", bootstrap="agent").settings.bootstrap == "agent"
    assert resolve().settings.normalize_advantages == "agent"
    assert resolve(normalize_advantages="none").settings.normalize_advantages == "none"
    assert resolve(algorithm="grpo", n_samples=4).settings.normalize_advantages == "none"
    assert resolve(algorithm="dr_grpo", n_samples=4).settings.constant_length


def test_clip_ranges():
    assert (resolve(clip_param=0.1).settings.clip_param, resolve(clip_param=0.1).settings.clip_high) == (0.1, None)
    assert resolve(clip_param=0.2, clip_high=0.28).settings.clip_high == 0.28
    assert resolve(algorithm="dapo", n_samples=4).settings.clip_high == 0.28


def test_an_interval_makes_it_agent_by_agent():
    plan = resolve(agent_iteration_interval=3).schedule.plan
    assert [plan(i).agents for i in (0, 2, 3, 5, 6)] == [("a",), ("a",), ("b",), ("b",), ("a",)]


def test_warm_up_trains_nobody_and_takes_nobodys_turn():
    plan = resolve(agent_iteration_interval=1, warmup_steps=3).schedule.plan
    assert [plan(i).agents for i in range(6)] == [(), (), (), ("a",), ("b",), ("a",)]
    assert plan(0).adapters == {"a": "a", "b": "b"}


def test_greedy_samples_are_not_learnt_from():
    team = Team((AgentSpec(name="a", temperature=0.0), AgentSpec(name="b")))
    with pytest.raises(ConfigError, match="'a' has temperature 0 and is to learn"):
        resolve(team)
    assert resolve(team, freeze=("a",)).schedule.plan(0).agents == ("b",)


def test_freezing():
    assert resolve(freeze=("a",)).schedule.plan(0).agents == ("b",)
    assert resolve(freeze=("all",)).schedule.plan(0).agents == ()


@pytest.mark.parametrize(
    ("settings", "team", "words"),
    [
        ({"algorithm": "gpro"}, DUO, "grpo"),
        ({"algorithm": "grpo"}, DUO, "at least 2 per problem"),
        ({"algorithm": "grpo", "n_samples": 4, "gae_lambda": 0.9}, DUO, "has no gae_lambda"),
        ({"algorithm": "mappo"}, Team.of(["solo"]), "several agents"),
        ({"freeze": ("c",)}, DUO, "'c'"),
    ],
)
def test_what_cannot_work_is_refused_in_one_sentence(settings, team, words):
    with pytest.raises(ConfigError, match=words) as caught:
        resolve(team, **settings)
    assert "\n" not in str(caught.value)


# ---------------------------------------------------------------------------------- settings of single agents


def test_a_team_files_own_settings_change_the_rule_for_that_agent():
    team = Team((AgentSpec("a", clip_param=0.1, kl_coef=0.5, process_weight=3.0), AgentSpec("b", freeze=True)))
    rule = resolve(team, algorithm="reinforce_pp", kl_in="loss", kl_target=0.1, kl_coef=0.2)
    assert list(rule.own) == ["a"]
    own = rule.own["a"]
    assert (own.clip_param, own.kl_coef, own.kl_target, own.process_weight) == (0.1, 0.5, None, 3.0)
    assert rule.settings.clip_param == 0.2 and rule.schedule.plan(0).agents == ("a",)
    assert rule.context().agent_kl == {} and rule.context().agent_rewards == rule.own
    assert resolve(team, algorithm="reinforce_pp", kl_in="reward").context().agent_kl == {"a": 0.5}


def test_one_agents_penalty_alone_needs_the_reference():
    assert not resolve().reference
    assert resolve(Team((AgentSpec("a", kl_coef=0.1), AgentSpec("b")))).reference


@pytest.mark.parametrize(
    ("own", "words"),
    [({"clip_param": 1.0}, r"agent 'a': clip_param is 1"), ({"dual_clip": 0.5}, r"agent 'a': dual_clip is 0\.5")],
)
def test_own_settings_that_do_not_fit_the_algorithm_name_the_agent(own, words):
    with pytest.raises(ConfigError, match=words):
        resolve(Team((AgentSpec("a", **own),)))


def test_agents_on_one_adapter_share_its_loss_settings_and_not_their_reward_weights():
    team = Team((AgentSpec("a", adapter="x", clip_param=0.1), AgentSpec("b", adapter="x", process_weight=3.0)))
    own = resolve(team).own
    assert own["a"].clip_param == own["b"].clip_param == 0.1
    assert (own["a"].process_weight, own["b"].process_weight) == (1.0, 3.0)


@pytest.mark.parametrize(
    "name", sorted(n for n, s in describe(AgentSpec).items() if s.bounds != UNBOUNDED and n != "temperature")
)
def test_a_bound_holds_at_both_doors(name):
    """A run's setting and the same setting of an agent take and refuse the same numbers."""
    for value in (-1, 0, 0.5, 1, 1.0, 1.5, 2, math.inf, math.nan, True):
        taken = []
        for door in (lambda v: TrainConfig.of(**{name: v}), lambda v: AgentSpec("a", **{name: v})):
            try:
                door(value)
                taken.append(True)
            except ConfigError as error:
                assert name in str(error) or name.replace("_", " ") in str(error) or name.split("_")[-1] in str(error)
                taken.append(False)
        assert taken[0] == taken[1], value
