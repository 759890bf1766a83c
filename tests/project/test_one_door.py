"""Parts of a user's own and shipped ones enter alike, declare what they need, and are refused in one sentence."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import pytest
import toy

import mafrt
from mafrt.algorithms.group_relative import GroupRelative
from mafrt.config.resolve import Registry
from mafrt.config.team import Team
from mafrt.core.errors import ConfigError
from mafrt.environment.registry import env_names, profile_of, register_env, settings_of
from mafrt.runners.on_policy import OnPolicy
from mafrt.runners.update import Updater
from mafrt.scripts import train
from mafrt.scripts.train import help_of, with_env_kwargs
from mafrt.storage.metrics import explain, glossary
from mafrt.training.critic import Critic

SMALL = {"iterations": 1, "n_rollout_threads": 8, "n_samples": 4, "eval_episodes": 0, "ppo_epoch": 1}


class Counting(Updater):
    """An updater of one's own: it counts its updates."""

    def update(self, *batch):
        return super().update(*batch) | {"updates_of_mine/first": 1.0, "odd": 2.0}


class Reading(Critic):
    """A critic of one's own."""


class Fixed(toy.Digits):
    profile = "mine.json"


@dataclass(frozen=True)
class Mine(GroupRelative):
    """A rule that declares its parts."""

    updater: ClassVar[str] = "test_one_door:Counting"
    critic_class: ClassVar[str] = "test_one_door:Reading"
    metrics: ClassVar[Mapping[str, tuple[str, str]]] = {"updates_of_mine/AGENT": ("updates of mine", "updates")}


@dataclass(frozen=True)
class Alone(GroupRelative):
    """A rule that learns on one base only."""

    one_base: ClassVar[str] = "compares hidden states"


def test_a_rule_brings_its_updater_its_critic_and_its_metrics(tmp_path, caplog):
    runner = toy.make(tmp_path / "run", algorithm="test_one_door:Mine", **SMALL)
    assert type(runner.updater) is Counting and type(runner.updater.critic) is Reading
    found = {}
    runner.run(lambda progress: found.update(progress.metrics))
    assert found["updates_of_mine/first"] == 1.0
    unknown = [record.message for record in caplog.records if "glossary" in record.message]
    assert len(unknown) == 1 and "'odd'" in unknown[0]  # the declared one is known, the other is not


def test_metrics_that_a_shipped_rule_declares_are_in_the_glossary():
    assert explain("pairs/first").text.endswith("(spin)") and explain("anchors_no_spread/a").unit == "0..1"
    assert glossary()["q_tot"].text.endswith("(qmix, vdn)")
    with pytest.raises(KeyError, match="no algorithm declares it"):
        explain("anchers")


@pytest.mark.parametrize("kind", ["algorithm", "environment", "engine", "workflow", "coach"])
def test_two_parts_of_one_name_are_told_with_the_places_of_both(kind):
    registry = Registry(kind, {"shipped": "mafrt.envs.math:MathEnv"})
    registry.register("mine", Counting)
    registry.register("mine", Counting)
    lines = {part: inspect.getsourcelines(part)[1] for part in (Counting, Reading)}
    with pytest.raises(ConfigError) as caught:
        registry.register("mine", Reading)
    for line in lines.values():
        assert f"test_one_door.py, line {line})" in str(caught.value)
    with pytest.raises(ConfigError, match=r"line \d+\) is registered already as mafrt.envs.math:MathEnv"):
        registry.register("shipped", Reading)


def test_a_name_of_a_shipped_environment_is_taken():
    with pytest.raises(Exception, match=r"'math' \(.*toy.py, line \d+\) is registered already"):
        register_env("math", toy.Digits)


@pytest.mark.parametrize("setting", ["beta", "gae_lambda", "influence_weight", "step_weight"])
def test_a_setting_of_another_rule_names_those_that_have_it_and_the_place_of_ones_own(setting):
    with pytest.raises(ConfigError) as caught:
        toy.settings(algorithm="test_one_door:Mine", **{setting: 0.5})
    line = inspect.getsourcelines(Mine)[1]
    assert f"test_one_door.py, line {line}) has no {setting}; it belongs to" in str(caught.value)


TOO_MUCH = [
    ({"lr": 100.0}, "lr is 100.0; choose a value of at most 10"),
    ({"temperature": 1000.0}, "temperature is 1000.0; choose a value of at most 100"),
    ({"max_new_tokens": 2**25}, "max_new_tokens is 33554432; choose"),
    ({"lora_rank": 5000}, "lora_rank is 5000; choose a value of at most 4096"),
    ({"top_k": 2**25}, "top_k is 33554432; choose"),
    ({"weight_decay": 1e4}, "weight_decay is 10000.0; choose"),
]


@pytest.mark.parametrize("own, words", TOO_MUCH, ids=[next(iter(own)) for own, _ in TOO_MUCH])
def test_a_team_file_has_the_bounds_of_the_run(own, words, tmp_path, capsys, monkeypatch):
    """From Python and from the command line, by the same check."""
    specs = [{"role": "first", **own}, {"role": "second", "with_answer": True}]
    base, team = toy.tiny_base(), Team.parse(specs)
    if "lora_rank" not in own:  # an adapter of this rank is placed first
        with pytest.raises(ConfigError, match="agent 'first': ") as caught:
            OnPolicy(toy.Digits(), team, base, toy.settings(**SMALL))
        assert words in str(caught.value)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "team.json").write_text(json.dumps(specs))
    given = ["--env", "toy:Digits", "--profile_path", "team.json", "--run_dir", "run", "--iterations", "1"]
    assert train.main(given) == 2
    assert f"agent 'first': {words}" in capsys.readouterr().err


def test_a_rule_that_needs_one_base_says_why():
    from mafrt.runners.checks import check_several

    runner = toy.make(algorithm="test_one_door:Alone", **SMALL)
    models = {"first": "one", "second": "two"}
    with pytest.raises(ConfigError, match=r"2 bases \(one, two\), but .*Alone compares hidden states; give all agents"):
        check_several(runner.team, models, runner.config, runner.rule)


def test_an_environment_names_its_team():
    assert profile_of("dsbench") == "profiles/dsbench.json"
    assert profile_of("math") is None and profile_of("toy:Digits") is None
    assert profile_of("grpc://nowhere:1/x") is None and profile_of("no_such") is None
    assert profile_of("test_one_door:Fixed") == "mine.json"


class Shelf(toy.Digits):
    """Digits of a shelf.

    Args:
        wide: books of a row,
            two or more.
        labels: names of the rows.
        shut: whether it is closed.
    """

    def __init__(
        self, wide: int = 3, weight: float | None = None, labels: tuple[str, ...] = (), shut: bool = False
    ) -> None:
        super().__init__()
        self.had = wide, weight, labels, shut


@pytest.mark.parametrize(
    ("words", "had"),
    [
        ("", None),
        ("--wide 5", {"wide": 5}),
        ("--wide=5 --shut", {"wide": 5, "shut": True}),
        ("--no-shut --weight 0.5", {"shut": False, "weight": 0.5}),
        ("--no-shut --weight none", {"shut": False, "weight": None}),
        ("--labels a b --wide 2", {"labels": ["a", "b"], "wide": 2}),
        ("--weight -1.5", {"weight": -1.5}),
    ],
)
@pytest.mark.parametrize("env", ["test_one_door:Shelf", "shelf_of_a_name"])
def test_settings_of_an_environment_are_flags(env, words, had):
    register_env("shelf_of_a_name", Shelf)
    found = with_env_kwargs([*words.split(), "--seed", "3"], env, train.COMMAND.settings())
    given = json.loads(found[found.index("--env_kwargs") + 1]) if "--env_kwargs" in found else None
    assert given == had
    assert found[:2] == ["--seed", "3"]
    mafrt.make_env(env, **(had or {}))


def test_the_help_of_a_command_has_the_settings_of_the_environment(capsys):
    with pytest.raises(SystemExit):
        train.main(["test_one_door:Shelf", "--help"])
    said = " ".join(capsys.readouterr().out.split())
    assert "--wide INT books of a row, two or more (default: 3)" in said
    assert "--shut, --no-shut whether it is closed (default: off)" in said


@pytest.mark.parametrize("name", [name for name in env_names() if name != "shelf_of_a_name"])
def test_every_shipped_environment_says_its_settings(name):
    for setting in settings_of(name).values():
        assert setting.kind in (bool, int, float, str), setting
    assert settings_of(name)
    assert help_of(name, {}).count("--") >= len(settings_of(name))
