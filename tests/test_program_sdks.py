"""Programs that speak Responses, keep clients of the whole process, or find their address in the environment."""

from __future__ import annotations

from pathlib import Path

import pytest
import toy
from helpers_models import tiny_base

from mafrt.config.team import Team
from mafrt.core.errors import ConfigError
from mafrt.environment.registry import make_env
from mafrt.runners.on_policy import OnPolicy

PROGRAMS = Path(__file__).with_name("programs_sdk.py")
CALLED = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'


def program(name, **more):
    return make_env("program", program=f"{PROGRAMS}:{name}", timeout_s=60, **more)


def played(env, *answers, seed=1):
    """All observations and the last result of an episode; the last answer is given again and again."""
    seen, _ = env.reset(seed=seed)
    shown = [seen]
    while True:
        answer = answers[min(len(shown), len(answers)) - 1]
        result = env.step(dict.fromkeys(seen, answer))
        if result.terminated or result.truncated:
            return shown, result
        seen = result.observations
        shown.append(seen)


def test_the_default_mode_of_the_agents_sdk_is_played_side_by_side():
    env = program("default_mode", agents=["planner", "solver"])
    others = [env.spawn() for _ in range(3)]
    seen = [other.reset(seed=seed)[0] for seed, other in enumerate(others)]
    assert len({str(each) for each in seen}) == 3  # each call reached its own episode
    assert seen[0]["planner"][0] == {"role": "system", "content": "You plan."}
    for number, other in enumerate(others):
        assert list(other.step({"planner": f"plan {number}"}).observations["solver"]) == [
            {"role": "user", "content": f"plan {number}"}
        ]
    assert [other.step({"solver": "1a"}).info["outcome"] for other in others] == [0.5] * 3


@pytest.mark.parametrize("name", ["run_sync", "sets_the_environment", "sets_the_client"])
def test_programs_with_globals_of_their_own(name):
    env = program(name, agents=["solver"])
    others = [env, env.spawn()]
    for other in others:
        assert list(other.reset(seed=1)[0]) == ["solver"]
    assert all(other.step({"solver": "answer"}).terminated for other in others)


def test_tools_of_the_agents_sdk_travel_as_text():
    shown, result = played(program("tools", agents=["solver"]), CALLED, "answer")
    assert '"name": "add"' in shown[0]["solver"][0]["content"]
    assert shown[1]["solver"][2:] == [{"role": "assistant", "content": CALLED}, {"role": "tool", "content": "5"}]
    assert result.info["outcome"] == 1.0 and result.rewards == {"solver": 3.0}


def test_events_and_earlier_responses():
    shown, result = played(program("streams", agents=["solver"]), CALLED, "answer")
    assert len(shown) == 2 and result.info["outcome"] == 1.0
    shown, _ = played(program("remembers", agents=["solver"]), "first", "answer")
    assert [m["content"] for m in shown[1]["solver"]] == ["one", "first", "two"]


def test_agents_are_those_that_the_first_episodes_call():
    assert program("default_mode").agents == ("planner", "solver")
    assert program("handoffs").agents == ("first", "second")
    with pytest.raises(ConfigError, match=r"the agents of .* are not known"):
        make_env("program", command="false")


def test_the_default_mode_trains(tmp_path):
    env = program("default_mode", agents=["planner", "solver"])
    config = toy.settings(n_rollout_threads=8, iterations=2, ppo_epoch=1, num_mini_batch=1, eval_episodes=0)
    OnPolicy(env, Team.of(env.agents), tiny_base(), config, run_dir=tmp_path / "run").run()
    text = (tmp_path / "run" / "metrics.jsonl").read_text()
    assert text.count('"env_errors": 0') == 2
