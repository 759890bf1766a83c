"""`check_env` shows an episode and notices an environment that never pays."""

from __future__ import annotations

from pathlib import Path

import pytest

from mafrt import Env, StepResult
from mafrt.environment.sample import payment_problem, sample_episode
from mafrt.scripts import check_env, train

GAME = """
from mafrt import Env, StepResult


class Game(Env):
    agents = ("first", "second")

    def reset(self, seed=None, options=None):
        return {{"first": "Say anything."}}, {{}}

    def step(self, actions):
        if "first" in actions:
            return StepResult({{"second": actions["first"]}}, {{}}, False, False, {{}})
        return StepResult({{}}, {rewards}, True, False, {info})
"""


class Pays(Env):
    agents = ("first",)

    def __init__(self, rewards, info):
        self.rewards, self.info = rewards, info

    def reset(self, seed=None, options=None):
        return {"first": "Say a \x1b[31mword.\nPlease."}, {}

    def step(self, actions):
        return StepResult({}, self.rewards, True, False, self.info)


@pytest.mark.parametrize(
    "rewards, info", [({"first": 0.0}, {}), ({}, {"outcome": 0.0}), ({"first": 1.0}, {"outcome": 1.0})]
)
def test_a_reward_or_an_outcome_is_payment_even_0(rewards, info):
    assert payment_problem([sample_episode(Pays(rewards, info))]) is None


@pytest.mark.parametrize(
    "info, hint", [({}, None), ({"outcom": 1.0}, "outcom"), ({"Outcome": 1.0}, "Outcome"), ({"a": 1}, None)]
)
def test_an_environment_that_never_pays_is_named_with_a_key_that_is_nearly_right(info, hint):
    said = payment_problem([sample_episode(Pays({}, info)) for _ in range(3)])
    assert "none of 3 sample episodes" in said
    assert (f"the key {hint!r}; did you mean 'outcome'?" in said) if hint else "did you mean" not in said


def test_a_sample_is_one_line_each_and_harmless_on_a_terminal():
    sample = sample_episode(Pays({"first": 0.5}, {"outcome": 1.0, "extra": [1]}))
    assert sample.lines[0].startswith("first sees:  Say a ") and " / Please." in sample.lines[0]
    assert "first earns: 0.5" in sample.lines and "outcome:    1" in sample.lines
    assert not any("\x1b" in line or "\n" in line for line in sample.lines)
    assert payment_problem([]) is None


@pytest.mark.slow
@pytest.mark.parametrize(
    "rewards, info, paid",
    [("{}", '{"outcom": 1.0}', False), ("{}", '{"outcome": 1.0}', True), ('{"second": 1}', "{}", True)],
)
def test_the_commands_say_so(tmp_path, monkeypatch, capsys, rewards, info, paid):
    monkeypatch.chdir(tmp_path)
    name = f"game_{abs(hash((rewards, info)))}"
    Path(f"{name}.py").write_text(GAME.format(rewards=rewards, info=info))
    assert check_env.main(["--env", f"{name}:Game"]) == 0
    said = capsys.readouterr().out
    assert "second says:" in said and ("Careful: none of 8" in said) is not paid
    words = ["--env", f"{name}:Game", "--iterations", "0", "--eval_episodes", "0", "--run_dir", "run"]
    assert train.main(words) == 0
    assert ("Careful: none of 3" in capsys.readouterr().out) is not paid
