"""MathEnv and its workflows."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import FrozenInstanceError
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mafrt.config.agent import AgentSpec
from mafrt.config.team import Team
from mafrt.core.errors import ConfigError, DataError, EnvError
from mafrt.core.transcript import quoted, speakers
from mafrt.environment.base import Env
from mafrt.environment.checker import check_env
from mafrt.environment.registry import make_env
from mafrt.environment.session import session_of
from mafrt.envs.math import MathEnv, Task
from mafrt.envs.workflows.registry import WORKFLOWS, TaskState, make_workflow, transcript

DOCS = Path(__file__).parents[2] / "docs" / "environments.md"
PROFILES = Path(__file__).parents[2] / "profiles"
TASKS = (Task("t:0", "What is 3 + 4?", "7"), Task("t:1", "What is 2 + 2?", "4"))


def play(env: MathEnv, said: list[str], task: int = 0):
    """Reset to `task` and say the texts one after the other; the observation before each, and the results."""
    env = session_of(env)
    observations, info = env.reset(seed=0, options={"task": task})
    seen, results = [], []
    for text in said:
        ((agent, observation),) = observations.items()
        seen.append((agent, observation))
        results.append(env.step({agent: text}))
        observations = results[-1].observations
    return seen, results, info


def test_the_chain_word_for_word():
    # MARFT's chain over two rounds, written out by hand.
    seen, results, info = play(
        MathEnv(tasks=TASKS, horizon=2),
        ["Add 3 to 4.", "3 + 4 = 8 \\boxed{8}", "Add 4 to 3.", "4 + 3 = 7 \\boxed{7}"],
    )
    assert seen == [
        ("reasoner", "Problem: What is 3 + 4?"),
        ("actor", "Problem: What is 3 + 4?\nreasoner: Add 3 to 4."),
        (
            "reasoner",
            "Problem: What is 3 + 4?\nreasoner: Add 3 to 4.\nactor: 3 + 4 = 8 \\boxed{8}\n"
            "judge: The answer is incorrect.",
        ),
        (
            "actor",
            "Problem: What is 3 + 4?\nreasoner: Add 3 to 4.\nactor: 3 + 4 = 8 \\boxed{8}\n"
            "judge: The answer is incorrect.\nreasoner: Add 4 to 3.",
        ),
    ]
    assert [(r.terminated, r.truncated) for r in results] == [(False, False)] * 3 + [(True, False)]
    assert [r.info.get("outcome") for r in results] == [None, 0.0, None, 1.0]
    assert [r.rewards for r in results] == [{}] * 4
    assert results[3].info["correct"] == {"actor": True} and results[3].info["rounds"] == 2
    assert info == {"task": "t:0", "problem": "What is 3 + 4?", "answer": "7"}


def test_a_right_answer_ends_the_episode_at_once():
    _, results, _ = play(MathEnv(tasks=TASKS, horizon=3), ["Add.", "\\boxed{7}"])
    assert results[-1].terminated and results[-1].info["outcome"] == 1.0


def test_the_horizon_ends_it_too_and_is_no_truncation():
    _, results, _ = play(MathEnv(tasks=TASKS, horizon=2), ["", "\\boxed{1}", "", "no answer"])
    assert (results[-1].terminated, results[-1].truncated) == (True, False)
    assert results[-1].info["outcome"] == 0.0
    env = MathEnv(tasks=TASKS, horizon=2)
    assert env.max_steps == 4


def test_without_judge_lines_nobody_is_told():
    seen, _, _ = play(MathEnv(tasks=TASKS, horizon=2, judge_lines=False), ["a", "b", "c"])
    assert seen[2][1] == "Problem: What is 3 + 4?\nreasoner: a\nactor: b"


def test_the_score_is_the_fraction_of_answering_agents():
    team = Team(tuple(AgentSpec(n, with_answer=n != "critic") for n in ("ann", "ben", "critic", "dora", "eve")))
    env = MathEnv(tasks=TASKS, team=team, horizon=2)
    # Of the four that answer, ann and eve are right; the critic's box does not count.
    _, results, _ = play(env, ["\\boxed{7}", "\\boxed{6}", "\\boxed{7}", "seven", "\\boxed{7.0}"])
    assert results[-1].info["outcome"] == 0.5 and results[-1].terminated
    assert results[-1].info["correct"] == {"ann": True, "ben": False, "dora": False, "eve": True}


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [("outcome_only", {}), ("last", {"actor": 1.0}), ("each", {"reasoner": 1.0, "actor": 1.0})],
)
def test_rewards(rewards, expected):
    env = MathEnv(tasks=TASKS, horizon=2, rewards=rewards)
    _, results, _ = play(env, ["", "\\boxed{1}", "", "\\boxed{7}"])
    assert [r.rewards for r in results] == [{}, {}, {}, expected]


def test_last_number_is_a_setting():
    for last_number in (False, True):
        _, results, _ = play(MathEnv(tasks=TASKS, last_number=last_number), ["", "It is 7."])
        assert results[-1].info["outcome"] == float(last_number)


def test_the_answer_is_in_no_observation():
    env = MathEnv(tasks=(Task("t:0", "Which?", "8675309"),), horizon=2)
    seen, _, _ = play(env, ["a", "b", "c", "d"])
    assert not any("8675309" in observation for _, observation in seen)


@pytest.mark.slow
def test_contract_with_the_shipped_problems_and_a_profile():
    env = make_env("math", horizon=2)
    check_env(env)
    assert env.num_tasks == 2000 and make_env("math", split="test").num_tasks == 256
    octet = Team.load(DOCS.parent.parent / "profiles" / "math_octet.json")
    check_env(MathEnv(tasks=TASKS, team=octet, horizon=2))


def test_seeds_pick_tasks_and_options_override_them():
    env = session_of(MathEnv())
    picked = [env.reset(seed=s)[1]["task"] for s in range(8)]
    assert picked == [env.reset(seed=s)[1]["task"] for s in range(8)] and len(set(picked)) > 4
    assert {env.reset(seed=s, options={"task": 17})[1]["task"] for s in range(3)} == {"word_problems_train:17"}


def test_spawn_shares_the_tasks_and_nothing_else():
    env = session_of(MathEnv(horizon=2))
    env.reset(seed=1)
    sibling = env.spawn()
    assert sibling.tasks is env.tasks and sibling.rng is not env.rng
    with pytest.raises(EnvError, match=r"before reset\(\)"):
        sibling.step({"reasoner": "x"})
    sibling.reset(seed=2)
    before = env.state
    sibling.step({"reasoner": "x"})
    assert env.state is before


def test_settings_are_checked():
    for kwargs, words in [
        ({"rewards": "all"}, "no rewards setting 'all'"),
        ({"workflow": "chian"}, "did you mean 'chain'?"),
        ({"horizon": 0}, "horizon is 0; choose a value of at least 1"),
        ({"tasks": ()}, "tasks is empty"),
        ({"team": Team((AgentSpec("a"), AgentSpec("b")))}, "(a, b) has with_answer: true"),
        ({"team": Team.of(["solver", "judge"])}, "no agent may be called 'judge'"),
    ]:
        with pytest.raises(ConfigError) as caught:
            MathEnv(**{"tasks": TASKS, **kwargs})
        assert words in str(caught.value)
    with pytest.raises(DataError, match="no split 'dev'"):
        MathEnv(split="dev")
    with pytest.raises(EnvError, match="did you mean 'dataset_path'"):
        make_env("math", dataset_pth="x")


texts = st.text(max_size=30)


@settings(deadline=None)  # the machine may be busy
@given(st.lists(texts, min_size=1, max_size=6), texts)
def test_the_chain_s_functions_are_pure(said, problem):
    """States stay as they were, and equal moves from equal states give equal states."""
    flow = make_workflow("chain", Team.of(["a", "b"]), 3, True)
    states = [TaskState(problem)]
    for text in said:
        state = states[-1]
        ((name, observation),) = flow.observe(state).items()
        assert observation == transcript(state, "ab")
        assert observation.startswith(f"Problem: {quoted(problem, speakers('ab'))}")
        after = flow.transition(state, {name: text})
        assert after == flow.transition(state, {name: text}) and after.said == (*state.said, (name, text))
        if flow.answers(after) is not None:
            assert flow.answers(after) == {"b": text}
            after = flow.judged(after, 0.0)
        states.append(after)
        if after.over:
            break
    assert states[0] == TaskState(problem)
    assert states[-1].over == (len(said) >= 6)
    with pytest.raises(FrozenInstanceError):
        states[0].round = 1  # type: ignore[misc]


@pytest.mark.slow
def test_the_documentation_s_workflow_and_data(tmp_path, monkeypatch):
    pages = (DOCS, DOCS.parent / "workflows.md")
    blocks = [b for page in pages for b in re.findall(r"```python\n(.*?)```", page.read_text("utf-8"), re.DOTALL)]
    workflow = next(b for b in blocks if "WORKFLOWS[" in b)
    use = (
        workflow + "\nfrom mafrt.environment.checker import check_env\nfrom mafrt.envs.math import MathEnv, Task\n"
        "from mafrt.config.team import AgentSpec, Team\n"
        "team = Team(tuple(AgentSpec(n, with_answer=True) for n in 'abc'))\n"
        "env = MathEnv(tasks=[Task('t:0', 'What is 3 + 4?', '7')], team=team, workflow='all_at_once')\n"
        "check_env(env)\n"
        "from mafrt.environment.session import session_of\n"
        "env = session_of(env)\n"
        "assert set(env.reset(seed=0)[0]) == set('abc')\n"
        "result = env.step({'a': '#### 7', 'b': '7', 'c': 'so \\\\boxed{7}'})\n"
        "assert result.terminated and abs(result.info['outcome'] - 2 / 3) < 1e-9\n"
    )
    others = [b for b in blocks if "load_tasks" in b or 'make_env("math"' in b]
    assert len(others) == 2
    for program in (use, *others):
        done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr


def test_every_workflow_says_how_long_it_may_take():
    teams = {"chain": "quickstart_math", "mathchat": "mathchat", "solver_verifier": "solver_verifier"}
    steps = {"chain": 2 * 2, "mathchat": 2 * 4, "solver_verifier": 2 * 2}
    assert teams.keys() <= set(WORKFLOWS)
    for name in teams:
        flow = make_workflow(name, Team.load(PROFILES / f"{teams[name]}.json"), 2, True)
        assert flow.max_steps == steps[name]
    assert issubclass(MathEnv, Env)
