"""The base class of environments, `check_env`, and the registry."""

from __future__ import annotations

import io
import json
import os
import random
import re
import subprocess
import sys
import threading
from array import array
from collections import deque
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import mafrt
import mafrt.environment.registry
from mafrt.core.errors import ConfigError, EnvError
from mafrt.core.types import Evidence, StepResult
from mafrt.environment.base import Env
from mafrt.environment.checker import check_env
from mafrt.environment.contract import checked_reset
from mafrt.environment.registry import ENVIRONMENTS, make_env, register_env
from mafrt.environment.session import Session

DOCS = Path(__file__).parents[2] / "docs" / "environments.md"


@dataclass(frozen=True)
class Debate:
    topic: int
    said: tuple[str, ...] = ()


class Good(Env):
    """Two agents who speak at once, then one alone: simultaneous and turn-by-turn play in one."""

    agents = ("pro", "con")
    num_tasks = 5
    max_steps = 4

    def reset(self, seed=None, options=None):
        topic = (options or {}).get("task")
        self.state = Debate(self.rng.randrange(5) if topic is None else topic)
        return dict.fromkeys(self.agents, f"Topic {self.state.topic}"), {"task": f"topic {self.state.topic}"}

    def transition(self, state, actions):
        return replace(state, said=state.said + tuple(f"{who}: {text}" for who, text in sorted(actions.items())))

    def step(self, actions):
        self.state = self.transition(self.state, actions)
        bonus = self.rng.random()
        if len(self.state.said) >= 3:
            return StepResult({}, {"pro": bonus}, True, False, {"outcome": bonus})
        chat = [{"role": "system", "content": "Debate."}, {"role": "user", "content": "\n".join(self.state.said)}]
        return StepResult({"con": chat}, {}, False, False, {})


def test_a_good_environment_passes():
    check_env(Good())
    env = Session(Good())
    first = env.reset(seed=3)
    assert env.reset(seed=3) == first
    result = env.step({"pro": "yes", "con": "no"})
    assert list(result.observations) == ["con"] and result.rewards == {} and not result.terminated
    result = env.step({"con": "no"})
    assert result.terminated and result.rewards["pro"] == result.info["outcome"]


def test_seed_none_goes_on_drawing():
    env = Session(Good())
    env.reset(seed=0)
    topics = [env.reset()[1]["task"] for _ in range(40)]
    assert len(set(topics)) == 5


# --- one broken class for each clause of the contract ----------------------------------------------------------------


class NoReset(Env):
    agents = ("a",)

    def step(self, actions):
        return StepResult({}, {}, True, False, {})


class AgentsList(Good):
    agents = ["pro", "con"]  # noqa: RUF012


class AgentsTwice(Good):
    agents = ("pro", "con", "pro")


class AgentsBadName(Good):
    agents = ("pro", "the con")


class BadMaxSteps(Good):
    max_steps = 0


class WrongReturn(Good):
    def reset(self, seed=None, options=None):
        return super().reset(seed, options)[0]


class WrongObservationKey(Good):
    def reset(self, seed=None, options=None):
        return {"judge": "?"}, {}


class WrongObservationType(Good):
    def reset(self, seed=None, options=None):
        return {"pro": 7}, {}


class WrongMessage(Good):
    def reset(self, seed=None, options=None):
        return {"pro": [{"role": "user", "text": "x"}]}, {}


class NobodyActs(Good):
    def reset(self, seed=None, options=None):
        return {}, {}


class FourValues(Good):
    def step(self, actions):
        return tuple(super().step(actions))[:4]


class RewardNaN(Good):
    def step(self, actions):
        return super().step(actions)._replace(rewards={"pro": float("nan")})


class RewardText(Good):
    def step(self, actions):
        return super().step(actions)._replace(rewards={"pro": "1"})


class RewardStranger(Good):
    def step(self, actions):
        return super().step(actions)._replace(rewards={"judge": 1.0})


class RewardNumber(Good):
    def step(self, actions):
        return super().step(actions)._replace(rewards=1.0)


class FlagNumber(Good):
    def step(self, actions):
        return super().step(actions)._replace(terminated=1)


class InfoNone(Good):
    def step(self, actions):
        return super().step(actions)._replace(info=None)


class OutcomeText(Good):
    def step(self, actions):
        return super().step(actions)._replace(info={"outcome": "won"})


class TaskNumber(Good):
    def reset(self, seed=None, options=None):
        observations, info = super().reset(seed, options)
        return observations, {**info, "task": 3}


class Stuck(Good):
    def step(self, actions):
        return StepResult({}, {}, False, False, {})


class Raises(Good):
    def step(self, actions):
        return {}["nothing"]


class RaisesInTransition(Good):
    def transition(self, state, actions):
        raise ValueError("bad move")


class OwnChance(Good):
    def reset(self, seed=None, options=None):
        observations, info = super().reset(seed, options)
        return {agent: f"{text} {random.random()}" for agent, text in observations.items()}, info


class OwnChanceInStep(Good):
    def step(self, actions):
        result = super().step(actions)
        return result._replace(rewards={"pro": random.random()})


class StateSurvivesReset(Good):
    memory = 0

    def step(self, actions):
        self.memory += 1
        return super().step(actions)._replace(rewards={"pro": float(self.memory)})


class TransitionMutates(Env):
    agents = ("a",)
    max_steps = 2

    def reset(self, seed=None, options=None):
        self.state = {"said": []}
        return {"a": "go"}, {}

    def transition(self, state, actions):
        state["said"].append(actions["a"])
        return state

    def step(self, actions):
        self.state = self.transition(self.state, actions)
        return StepResult({"a": "go on"}, {}, False, False, {})


class TransitionDraws(Good):
    def transition(self, state, actions):
        return replace(super().transition(state, actions), topic=self.rng.randrange(9))


class TransitionForgets(TransitionMutates):
    def transition(self, state, actions):
        return {"said": [*state["said"], actions["a"], str(random.random())]}


class TransitionChangesEnv(Good):
    def reset(self, seed=None, options=None):
        self.log = []
        return super().reset(seed, options)

    def transition(self, state, actions):
        self.log.append(actions)
        return super().transition(state, actions)


class TaskIgnored(Good):
    def reset(self, seed=None, options=None):
        return super().reset(seed, None)


class TaskUnnamed(Good):
    def reset(self, seed=None, options=None):
        return super().reset(seed, options)[0], {}


class TaskSameName(Good):
    def reset(self, seed=None, options=None):
        return super().reset(seed, options)[0], {"task": "debate"}


class TaskRaises(Good):
    num_tasks = 6  # one more than there are

    def reset(self, seed=None, options=None):
        observations, _ = super().reset(seed, options)
        return observations, {"task": "abcde"[self.state.topic]}


class Endless(TransitionMutates):
    max_steps = None

    def transition(self, state, actions):
        return {"said": [actions["a"]]}


class Siblings(Good):
    heard: list[str] = []  # noqa: RUF012

    def reset(self, seed=None, options=None):
        self.heard.clear()
        return super().reset(seed, options)

    def step(self, actions):
        self.heard.extend(actions.values())
        return super().step(actions)._replace(rewards={"pro": float(len("".join(self.heard)))})


class SpawnSelf(Good):
    def spawn(self):
        return self


class SpawnRaises(Good):
    def spawn(self):
        raise OSError("no display")


class AgentsChange(Good):
    def reset(self, seed=None, options=None):
        self.agents = ("con", "pro")
        return super().reset(seed, options)


class CloseRaises(Good):
    def close(self):
        raise OSError("closed twice")


BROKEN = [
    (NoReset, "does not define reset()"),
    (AgentsList, "agents must be a tuple"),
    (AgentsTwice, "holds a name twice"),
    (AgentsBadName, "'the con' is not a valid name"),
    (BadMaxSteps, "max_steps must be None or a whole number"),
    (WrongReturn, "must return (observations, info)"),
    (WrongObservationKey, "observation for 'judge', who is not among the agents"),
    (WrongObservationType, "the observation of 'pro' must be a text or a list"),
    (WrongMessage, "the observation of 'pro' must be a text or a list"),
    (NobodyActs, "no agent acts first"),
    (FourValues, "must return StepResult("),
    (RewardNaN, "the reward of 'pro' must be a finite number"),
    (RewardText, "the reward of 'pro' must be a finite number"),
    (RewardStranger, "reward for 'judge'"),
    (RewardNumber, "rewards must be a dict"),
    (FlagNumber, "terminated must be True or False"),
    (InfoNone, "info must be a dict"),
    (OutcomeText, 'info["outcome"] must be a finite number'),
    (TaskNumber, 'info["task"] must be a text'),
    (Stuck, "no agent can act"),
    (Raises, "Raises.step() raised KeyError at step 0: 'nothing'"),
    (RaisesInTransition, "RaisesInTransition.transition() raised ValueError at step 0: bad move"),
    (OwnChance, "gave different episodes when called twice"),
    (OwnChanceInStep, "the same seed (0) and actions gave different results"),
    (StateSurvivesReset, "set all state in reset()"),
    (TransitionMutates, "transition() changes its arguments"),
    (TransitionDraws, "transition() draws random numbers"),
    (TransitionForgets, "transition() gave different states for equal arguments"),
    (TransitionChangesEnv, "transition() changes the environment itself (log)"),
    (TaskIgnored, "it must pick the task"),
    (TaskUnnamed, 'no "task" that names the task'),
    (TaskSameName, "gave the same task 'debate'"),
    (TaskRaises, "TaskRaises.reset() raised IndexError"),
    (Endless, "did not end within 512 steps; set max_steps"),
    (Siblings, "disturb each other"),
    (SpawnSelf, "spawn() must return a SpawnSelf of its own"),
    (SpawnRaises, "spawn() raised OSError: no display"),
    (AgentsChange, "agents changed while playing"),
    (CloseRaises, "close() raised OSError"),
]


@pytest.mark.parametrize(("broken", "words"), BROKEN, ids=lambda v: v.__name__ if isinstance(v, type) else "")
def test_check_env_finds(broken, words):
    with pytest.raises(EnvError) as caught:
        check_env(broken())
    text = str(caught.value)
    assert words in text and text.startswith(broken.__name__) and "\n" not in text, text


def test_states_of_any_kind_are_compared_by_value():
    numpy = pytest.importorskip("numpy")

    @dataclass
    class Board:
        cells: object

    class Arrays(TransitionMutates):
        def reset(self, seed=None, options=None):
            self.state = {"board": Board(numpy.zeros(3))}
            return {"a": "go"}, {}

        def transition(self, state, actions):
            return {"board": Board(state["board"].cells + len(actions["a"]))}

    class InPlace(Arrays):
        def transition(self, state, actions):
            state["board"].cells += 1
            return state

    check_env(Arrays())
    with pytest.raises(EnvError, match="changes its arguments"):
        check_env(InPlace())


def test_check_env_reports_all_at_once():
    class TwoFaults(TransitionChangesEnv):
        def step(self, actions):
            return super().step(actions)._replace(rewards={"pro": random.random()})

    with pytest.raises(EnvError) as caught:
        check_env(TwoFaults())
    assert "different results" in str(caught.value) and "changes the environment itself" in str(caught.value)


def test_the_package_s_check_env_stays_a_function():
    # A submodule called check_env would take the function's place once it is imported.
    for _ in range(2):
        mafrt.check_env(Good())


def test_check_env_refuses_what_is_no_env():
    with pytest.raises(EnvError, match="it is a dict, not a mafrt"):
        check_env({})  # type: ignore[arg-type]


# --- the base class --------------------------------------------------------------------------------------------------


def test_the_turn_limit_truncates():
    class Forever(TransitionForgets):
        max_steps = 3

    env = Session(Forever())
    env.reset(seed=0)
    results = [env.step({"a": "x"}) for _ in range(3)]
    assert [r.truncated for r in results] == [False, False, True]
    assert not results[-1].terminated and results[-1].observations == {} and env.done


def test_step_wants_exactly_those_who_were_asked():
    env = Session(Good())
    with pytest.raises(EnvError, match=r"before reset\(\)"):
        env.step({"pro": "x"})
    env.reset(seed=0)
    with pytest.raises(EnvError, match="got actions of 'pro', but"):
        env.step({"pro": "x"})
    with pytest.raises(EnvError, match="action of 'con' must be a text, found int 3"):
        env.step({"pro": "x", "con": 3})
    env.step({"pro": "x", "con": "y"})
    env.step({"con": "y"})
    with pytest.raises(EnvError, match="after the episode ended"):
        env.step({"con": "y"})


def test_an_episode_whose_step_raised_is_over_and_the_next_one_is_not():
    class Fragile(Good):
        def step(self, actions):
            if actions["con"] == "boom":
                raise RuntimeError("lost\nthe thread")
            return super().step(actions)

    env = Session(Fragile())
    env.reset(seed=0)
    with pytest.raises(EnvError, match="RuntimeError at step 0") as caught:
        env.step({"pro": "x", "con": "boom"})
    assert isinstance(caught.value.__cause__, RuntimeError)
    with pytest.raises(EnvError, match=r"call reset\(\) first"):
        env.step({"pro": "x", "con": "y"})
    env.reset(seed=0)
    env.step({"pro": "x", "con": "y"})


def test_errors_of_ours_pass_unchanged():
    class Careful(Good):
        def reset(self, seed=None, options=None):
            raise ConfigError("the board must be at least 3 wide, found 2")

    with pytest.raises(ConfigError, match=r"^the board"):
        Session(Careful()).reset()


def test_task_options_are_checked():
    with pytest.raises(EnvError, match=r"must be in 0\.\.4, found 5"):
        Session(Good()).reset(options={"task": 5})
    with pytest.raises(EnvError, match="draws its own tasks"):
        Session(TransitionForgets()).reset(options={"task": 0})


def test_rewards_become_floats_and_an_unknown_outcome_is_left_out():
    class Whole(TransitionForgets):
        def step(self, actions):
            return {}, {"a": True}, True, False, {"outcome": None, "state": self.state}

    env = Session(Whole())
    env.reset(seed=0)
    result = env.step({"a": "x"})
    assert isinstance(result, StepResult) and result.info == {"state": {"said": []}}
    assert result.rewards == {"a": 1.0} and type(result.rewards["a"]) is float


def test_numpy_numbers_are_numbers():
    numpy = pytest.importorskip("numpy")

    class Scored(TransitionForgets):
        def step(self, actions):
            return StepResult({}, {"a": numpy.float32(0.5)}, numpy.bool_(True), False, {"outcome": numpy.float64(1)})

    env = Session(Scored())
    env.reset(seed=0)
    result = env.step({"a": "x"})
    assert result.rewards == {"a": 0.5} and result.terminated is True


def test_spawn_builds_with_the_same_arguments():
    class Sized(Good):
        def __init__(self, size, *, depth=1):
            self.size, self.depth = size, depth

    sibling = Sized(3, depth=2).spawn()
    assert (sibling.size, sibling.depth) == (3, 2)
    with pytest.raises(TypeError, match="takes no arguments"):
        Good(3)


def test_super_reset_in_the_manner_of_gymnasium():
    class Loud(Good):
        def reset(self, seed=None, options=None):
            observations, info = super().reset(seed=seed, options=options)
            return {agent: text.upper() for agent, text in observations.items()}, info

    check_env(Loud())


# --- the registry ----------------------------------------------------------------------------------------------------


def test_register_and_make(monkeypatch):
    monkeypatch.setattr(ENVIRONMENTS, "_known", dict(ENVIRONMENTS._known))
    register_env("a_debate", Good)
    register_env("a_debate", Good)
    assert isinstance(make_env("a_debate").unwrapped, Good)
    with pytest.raises(EnvError, match="registered already"):
        register_env("a_debate", Stuck)
    with pytest.raises(EnvError, match="without ':'"):
        register_env("a:b", Good)
    with pytest.raises(EnvError, match="class or function"):
        register_env("c", 3)  # type: ignore[arg-type]
    register_env("made", lambda: 3)  # type: ignore[arg-type, return-value]
    with pytest.raises(EnvError, match="made a int, which is not a mafrt"):
        make_env("made")


def test_make_env_says_what_is_missing(tmp_path, monkeypatch):
    (tmp_path / "my_game.py").write_text(
        "from mafrt.environment.base import Env\n"
        "class MyGame(Env):\n"
        "    agents = ('a',)\n"
        "    def __init__(self, width, depth=1): self.width = width\n"
        "class Plain: pass\n"
        "class Bare(Env): pass\n"
        "class Fails(Env):\n"
        "    def __init__(self): raise OSError('no display')\n"
        "three = 3\n"
    )
    (tmp_path / "broken_game.py").write_text("import no_such_package_here\n")
    (tmp_path / "typo_game.py").write_text("def f(:\n")
    (tmp_path / "ends_game.py").write_text("import sys\nsys.exit(4)\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "my_game", raising=False)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p])
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    assert make_env("my_game:MyGame", width=3).width == 3  # type: ignore[attr-defined]
    for path, kwargs, words in [
        ("maht", {}, "did you mean 'math'?"),
        ("my_gane:MyGame", {}, "there is no module 'my_gane' in"),
        ("my_game:MyGme", {"width": 3}, "did you mean 'MyGame'?"),
        ("my_game:", {}, "both parts are needed"),
        ("my_game:three", {}, "'three' is a int, not a class or function"),
        ("my_game:Plain", {}, "Plain is not a subclass of mafrt.Env"),
        ("my_game:MyGame", {"width": 3, "hight": 2}, "There is no setting 'hight'"),
        ("my_game:MyGame", {"width": 3, "dept": 2}, "did you mean 'depth'?"),
        ("my_game:MyGame", {}, "needs the setting 'width'"),
        ("my_game:Bare", {"width": 3}, "takes no settings, found 'width'"),
        ("my_game:Fails", {}, "could not be built: OSError: no display"),
        ("broken_game:X", {}, "needs 'no_such_package_here', which is not installed"),
        ("typo_game:X", {}, "importing the module raised SyntaxError"),
        ("ends_game:X", {}, "importing the module raised SystemExit: 4"),
        (f"{tmp_path}/ends_game.py:X", {}, "importing the module raised SystemExit: 4"),
    ]:
        with pytest.raises(EnvError) as caught:
            make_env(path, **kwargs)
        assert words in str(caught.value), str(caught.value)


@pytest.mark.slow
def test_import_is_light():
    code = (
        "import sys, mafrt.environment.base, mafrt.config.team, mafrt.envs.math; "
        "heavy = {'torch', 'transformers', 'sympy', 'math_verify', 'yaml', 'pyarrow'} & set(sys.modules); "
        "sys.exit(str(heavy) if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_documentation_s_environment_works(tmp_path):
    """The page's environment and the commands' Python below it, run as a user would."""
    blocks = re.findall(r"```python\n(.*?)```", DOCS.read_text(encoding="utf-8"), re.DOTALL)
    own = next(b for b in blocks if "class " in b and "(Env)" in b)
    assert len([line for line in own.splitlines() if line.strip()]) < 20
    (tmp_path / "number_game.py").write_text(own)
    use = next(b for b in blocks if "check_env(" in b)
    program = use + "\nimport json\nobs, info = env.reset(seed=1)\nprint(json.dumps(obs))\n"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, env={**os.environ}
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)


# --- the session -----------------------------------------------------------------------------------------------------


def write_game(folder: Path, monkeypatch, step: str, name: str = "line_game") -> Env:
    """An environment in a file of the user's; `step` is the body of its step(), from line 9 on."""
    (folder / f"{name}.py").write_text(
        "import sys\n"
        "from mafrt import Env, StepResult\n"
        "class Game(Env):\n"
        "    agents = ('a',)\n"
        "    def reset(self, seed=None, options=None):\n"
        "        self.said = []\n"
        "        return {'a': 'go'}, {}\n"
        "    def step(self, actions):\n" + "".join(f"        {line}\n" for line in step.splitlines())
    )
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "modules", {k: v for k, v in sys.modules.items() if k != name})
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p])
    return make_env(f"{name}:Game")


END = "return StepResult({}, {}, True, False, {})"


@pytest.mark.parametrize(
    ("step", "words", "line"),
    [
        (f"x = 1\nx / 0\n{END}", "ZeroDivisionError at step 0: division by zero", 10),
        (f"import json\njson.loads('?')\n{END}", "JSONDecodeError", 10),  # raised inside the standard library
        (f"sys.exit(3)\n{END}", "SystemExit at step 0: 3", 9),
        (f"raise ValueError('a\\ud800b')\n{END}", "ValueError at step 0: a\N{REPLACEMENT CHARACTER}b", 9),
        ("raise type('Odd', (Exception,), {'__str__': lambda self: 1 / 0})()", "its text raises ZeroDivision", 9),
    ],
)
def test_an_error_shows_the_user_s_own_file_and_line(tmp_path, monkeypatch, step, words, line):
    env = write_game(tmp_path, monkeypatch, step)
    env.reset(seed=0)
    with pytest.raises(EnvError) as caught:
        env.step({"a": "x"})
    text = str(caught.value)
    assert words in text and text.endswith(f"line_game.py, line {line})") and "\n" not in text, text


@pytest.mark.parametrize(
    ("result", "words"),
    [
        ("StepResult({}, {}, True, False, {'outcome': 10**400})", "must be a finite number, found int 1000"),
        ("StepResult({}, {}, True, False, {'outcome': 10**5000})", "its repr raises ValueError"),
        ("StepResult({}, {'a': 10**400}, True, False, {})", "the reward of 'a' must be a finite number"),
        ("StepResult({}, {}, True, False, {'measures': {'x': 10**400}})", 'info["measures"]'),
        ("StepResult({}, {}, True, False, {'measures': {'x': 'good'}})", 'info["measures"]'),
        ("StepResult({}, {}, True, False, {'measures': [('x', 1)]})", 'info["measures"] must be a dict'),
        ("StepResult({}, {}, True, False, {'measures': {str(n): n for n in range(257)}})", "at most 256"),
        ("StepResult({}, {}, True, False, {'measures': {'a\\nb': 1}})", "names of one line"),
        ("StepResult({}, {}, True, False, {'measures': {'a\\tb': 1}})", "names of one line"),
        ("StepResult({}, {}, True, False, {'measures': {' ': 1}})", "names of one line"),
        ("StepResult({}, {}, True, False, {'measures': {'x' * 201: 1}})", "at most 200 characters"),
        ("StepResult({}, {}, True, False, {'measures': {1: 2, 'a': 3}})", "found int 1"),
        ("StepResult({}, {}, True, False, {'task': 'x' * 100_001})", "of 100000 characters at most"),
    ],
)
def test_numbers_that_no_float_holds_are_one_sentence(tmp_path, monkeypatch, result, words):
    env = write_game(tmp_path, monkeypatch, f"return {result}")
    env.reset(seed=0)
    with pytest.raises(EnvError) as caught:
        env.step({"a": "x"})
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_info_that_nests_without_end_is_one_sentence(tmp_path, monkeypatch):
    env = write_game(
        tmp_path, monkeypatch, "info = {}\ninfo['self'] = info\nreturn StepResult({}, {}, True, False, info)"
    )
    env.reset(seed=0)
    with pytest.raises(EnvError, match="nested deeper than 100 levels"):
        env.step({"a": "x"})


@pytest.mark.parametrize("call", ["set_grad_enabled(False)", "set_default_dtype(torch.float64)"])
def test_torch_s_global_switches_are_put_back_and_named(tmp_path, monkeypatch, call):
    import torch

    before = torch.is_grad_enabled(), torch.get_default_dtype()
    env = write_game(tmp_path, monkeypatch, f"import torch\ntorch.{call}\n{END}")
    env.reset(seed=0)
    with pytest.raises(EnvError, match=re.escape(f"called torch.{call}, which changes training")):
        env.step({"a": "x"})
    assert (torch.is_grad_enabled(), torch.get_default_dtype()) == before


def test_texts_are_cleaned_at_the_boundary(tmp_path, monkeypatch):
    env = write_game(
        tmp_path,
        monkeypatch,
        "from mafrt.core.types import Evidence\n"
        "seen = {'a': [{'role': 'user', 'content': 'x\\ud83d\\x00'}]}\n"
        "return StepResult(seen, {}, False, False, {'k\\udc00': ['\\x1b'], 'evidence': {'a': Evidence('\\ud800')}})",
    )
    env.reset(seed=0)
    result = env.step({"a": "x"})
    assert result.observations == {"a": [{"role": "user", "content": "x\ufffd\ufffd"}]}
    assert result.info["k\ufffd"] == ["\ufffd"] and result.info["evidence"]["a"].tool_output == "\ufffd"


def test_the_bare_object_is_the_user_s_code_and_make_env_wraps_it():
    bare = Good()
    observations, _ = bare.reset()
    assert observations and bare.step_count == 0 and not hasattr(bare, "done")
    session = mafrt.Session(bare)
    assert session.unwrapped is bare and session.class_name == "Good" and isinstance(session, Env)
    session.reset(seed=0)
    session.step({"pro": "x", "con": "y"})
    assert bare.step_count == 1 and session.state is bare.state
    with pytest.raises(AttributeError, match="nothing_like_it"):
        _ = session.nothing_like_it


def test_an_environment_may_have_attributes_of_the_session_s_names():
    class Own(Good):
        def reset(self, seed=None, options=None):
            self.done = self._played = self._acting = "mine"
            return super().reset(seed, options)

    check_env(Own())


def test_every_wrapper_shows_what_an_environment_declares(monkeypatch):
    from mafrt.environment.plain_class import PlainEnv
    from mafrt.environment.session import Session
    from mafrt.environment.workers import WorkerSession, guarded

    # A declaration that the library does not know today, with a default on the base class.
    monkeypatch.setattr(Env, "weather", "none", raising=False)

    class Duel(Env):
        agents = ("a", "b")
        opponents, weather, rubric, costly_reset = True, "rain", "math", True

        def reset(self, seed=None, options=None):
            return {"a": "go"}, {}

        def step(self, actions):
            return StepResult({}, {}, True, False, {})

    for wrapped in (Session(Duel()), Session(Duel()).spawn(), Session(Session(Duel())), guarded(Duel(), 60.0)):
        assert wrapped.opponents and wrapped.costly_reset and wrapped.weather == "rain" and wrapped.rubric == "math"
        assert wrapped.num_tasks is None and wrapped.agents == ("a", "b") and wrapped.class_name == "Duel"
    assert isinstance(wrapped, WorkerSession) and wrapped.blocking  # a wrapper's own declarations stay its own
    session = Session(Duel())
    session.max_steps = 3
    assert session.unwrapped.max_steps == 3 == session.max_steps

    class Foreign:
        agents, opponents, weather, max_steps = ("a", "b"), True, "rain", 7

        def reset(self):
            return "go"

    kind = type("Adapted", (PlainEnv,), {"factory": Foreign})
    adapted = Session(kind())
    assert adapted.opponents and adapted.max_steps == 7


class Reusing(Env):
    """Shows and returns the very objects that it goes on writing into, and edits what it is given."""

    agents = ("a",)
    num_tasks = 3

    def reset(self, seed=None, options=None):
        self.task = (options or {}).pop("task", 0)
        self.chat = [{"role": "user", "content": "0"}]
        self.board, self.used, self.queue = np.zeros(2), set(), deque()
        self.facts = {"board": self.board, "deep": ([self.used],), "bytes": bytearray(b"")}
        self.info = {"board": self.board, "used": self.used, "queue": self.queue, "deep": ({"b": [self.board]},)}
        self.shown, self.paid = {"a": self.chat}, {"a": 0.0}
        return self.shown, self.info

    def step(self, actions):
        self.chat[0]["content"] += actions.pop("a")
        self.chat.append({"role": "assistant", "content": "more"})
        self.board += 1
        self.used.add(len(self.used))
        self.queue.append([len(self.used)])
        self.facts["bytes"] += b"x"
        self.paid["a"] += 1
        self.info["evidence"] = {"a": Evidence(facts=self.facts)}
        return StepResult(self.shown, self.paid, False, False, self.info)


def test_what_an_environment_uses_again_is_recorded_as_it_was():
    session, options = Session(Reusing()), {"task": 2}
    shown, info = session.reset(seed=1, options=options)
    first, said = session.step({"a": "x"}), {"a": "y"}
    second = session.step(said)
    assert options == {"task": 2} and said == {"a": "y"}
    results = [(shown, {}, info), (first.observations, first.rewards, first.info)]
    results.append((second.observations, second.rewards, second.info))
    for n, (observations, rewards, about) in enumerate(results):
        assert observations["a"][0]["content"] == "0xy"[: n + 1] and len(observations["a"]) == n + 1
        assert about["board"].tolist() == about["deep"][0]["b"][0].tolist() == [n, n]
        assert len(about["used"]) == len(about["queue"]) == n and rewards == ({"a": n} if n else {})
        if n:
            facts = about["evidence"]["a"].facts
            assert facts["board"].tolist() == [n, n] and len(facts["deep"][0][0]) == len(facts["bytes"]) == n
    assert session.fork().task == 2


class Own:
    """A mutable object of a user's own class."""

    def __init__(self):
        self.said = []


OWN = {
    "class": (Own(), lambda it: it.said.append(1), lambda it: it.said),
    "namespace": (SimpleNamespace(n=0), lambda it: setattr(it, "n", 1), lambda it: it.n),
    "array": (array("i", [0]), lambda it: it.append(1), list),
    "tensor": (torch.zeros(1), lambda it: it.add_(1), lambda it: it.tolist()),
    "generator": (random.Random(1), lambda it: it.random(), lambda it: it.getstate()),
    "file": (io.StringIO("a"), lambda it: it.write("b"), lambda it: it.getvalue()),
    "evidence": (Evidence(facts={"a": []}), lambda it: it.facts["a"].append(1), lambda it: it.facts),
    "object in a list": ([Own()], lambda it: it[0].said.append(1), lambda it: it[0].said),
    "object in a set": ({o := Own()}, lambda it: next(iter(it)).said.append(1), lambda it: next(iter(it)).said),
    "object in a key": ({(o,): 1}, lambda it: next(iter(it))[0].said.append(1), lambda it: next(iter(it))[0].said),
}


@pytest.mark.parametrize("kind", OWN)
def test_objects_of_ones_own_in_info_stay_as_they_were(kind):
    mine, edit, read = OWN[kind]
    _, info = checked_reset(("a",), "reset()", ({"a": "go"}, {"mine": mine, "deep": [{"mine": mine}]}))
    before = read(mine)
    before = before if kind == "generator" else deepcopy(before)
    edit(mine)
    assert read(info["mine"]) == read(info["deep"][0]["mine"]) == before != read(mine)


def test_what_cannot_be_copied_is_handed_on():
    lock = threading.Lock()
    _, info = checked_reset(("a",), "reset()", ({"a": "go"}, {"lock": lock, "more": (x for x in "a")}))
    assert info["lock"] is lock and list(info["more"]) == ["a"]


class Counting(Env):
    """Shows chats and the options it was given, so that playing again shows whether these were edited."""

    agents = ("a", "b")

    def reset(self, seed=None, options=None):
        self.options = options
        return self.seen(), {}

    def seen(self):
        said = f"{self.step_count} {self.options}"
        return {name: [{"role": "user", "content": said}] for name in self.agents}

    def step(self, actions):
        return StepResult(self.seen(), {"a": 1.0}, False, False, {"kept": [1]})


def test_what_a_caller_edits_does_not_reach_a_later_fork():
    session, options = Session(Counting()), {"deep": [1]}
    shown, _ = session.reset(seed=1, options=options)
    actions = {"a": "x", "b": "y"}
    result = session.step(actions)
    for observations in (shown, result.observations):
        observations["a"][0]["content"] += "more"
        observations["a"].append({"role": "user", "content": "more"})
        del observations["b"]
    options["deep"].append(2)
    actions["a"], result.rewards["a"], result.info["kept"][0] = "z", 5.0, 2
    twin = session.fork().fork()
    assert twin.step_count == 1 and twin.options == {"deep": [1]}
    assert twin.step({"a": "x", "b": "y"})[:4] == session.step({"a": "x", "b": "y"})[:4]
