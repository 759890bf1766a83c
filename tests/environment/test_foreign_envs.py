"""Environments from elsewhere and for elsewhere: plain classes, PettingZoo, Gymnasium."""

from __future__ import annotations

import random
import sys
import warnings

import gymnasium
import pytest
from gymnasium.utils.env_checker import check_env as gymnasium_check
from pettingzoo.test import api_test, parallel_api_test, parallel_seed_test, seed_test

from mafrt.core.errors import EnvError
from mafrt.core.types import StepResult
from mafrt.environment.base import Env
from mafrt.environment.checker import check_env
from mafrt.environment.registry import adapted, make_env
from mafrt.environment.session import Session
from mafrt.environment.to_gymnasium import AnyText, GymnasiumEnv
from mafrt.environment.to_pettingzoo import AecPettingZoo, ParallelPettingZoo

MODULE = '''
import random

class CustomEnv:
    """MARFT's README: no base class, reset(self), four values from step."""

    def __init__(self, largest=9):
        self.largest = largest

    def reset(self):
        self.secret = random.randint(1, self.largest)
        return f"Guess a number from 1 to {self.largest}."

    def step(self, action):
        right = action.strip() == str(self.secret)
        return f"It was not {action}.", float(right), right, {"secret": self.secret}

    def transition(self, state):
        return state


class Pair:
    n_agents = 2

    def reset(self):
        return ["you are first", "you are second"]

    def step(self, actions):
        self.heard = actions
        return ["again", "again"], [1.0, 0.5], [True, True], {}


class Wrong(Pair):
    def step(self, actions):
        return "only", 1.0


def pair(rounds=1):
    return Pair()


def parallel_env():
    """As the modules of PettingZoo's games name theirs."""
    from mafrt.environment.to_pettingzoo import ParallelPettingZoo
    from test_foreign_envs import Talk

    return ParallelPettingZoo(Talk())


class Empty:
    pass


class Numbers:
    action_space = "Discrete(3)"

    def reset(self):
        return "x"

    def step(self, action):
        return "x", 0.0, True, {}
'''


class Talk(Env):
    """Two speak at the same time, then one alone; the last step pays an outcome."""

    agents = ("ann", "bob", "judge")
    num_tasks = 3

    def reset(self, seed=None, options=None):
        self.topic = (options or {}).get("task", self.rng.randrange(3))
        self.round = 0
        return {"ann": f"topic {self.topic}", "bob": [{"role": "user", "content": f"topic {self.topic}"}]}, {}

    def step(self, actions):
        if "judge" not in actions:
            return StepResult({"judge": repr(sorted(actions.items()))}, {"ann": 0.5}, False, False, {})
        self.round += 1
        over = self.round == 3
        seen = {} if over else {"ann": actions["judge"], "bob": actions["judge"]}
        return StepResult(seen, {"judge": 1.0}, over, False, {"outcome": 2.0} if over else {})


@pytest.fixture
def plain(tmp_path, monkeypatch):
    (tmp_path / "from_marft.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "from_marft", raising=False)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p])
    return "from_marft"


def test_a_plain_class_plays_as_it_stands(plain):
    env = make_env(f"{plain}:CustomEnv", largest=3)
    assert env.agents == ("agent",) and env.class_name == "CustomEnv"
    check_env(env)  # seeds, spawned siblings, turn limit
    before = random.getstate()
    first, _ = env.reset(seed=5)
    assert first == {"agent": "Guess a number from 1 to 3."} and random.getstate() == before
    secret = env.step({"agent": "0"}).info["secret"]
    result = env.step({"agent": str(secret)})
    assert result.terminated and result.rewards == {"agent": 1.0} and result.observations == {}
    env.reset(seed=5)
    assert env.step({"agent": "0"}).info["secret"] == secret


def test_lists_have_one_entry_per_agent(plain):
    env = make_env(f"{plain}:Pair")
    observations, _ = env.reset(seed=0)
    assert observations == {"agent_0": "you are first", "agent_1": "you are second"}
    result = env.step({"agent_0": "a", "agent_1": "b"})
    assert env.unwrapped.inner.heard == ["a", "b"]
    assert result.terminated and result.rewards == {"agent_0": 1.0, "agent_1": 0.5}


def test_a_function_that_makes_a_foreign_environment_is_one(plain):
    env = make_env(f"{plain}:pair", rounds=2)
    assert env.reset(seed=0)[0] == {"agent_0": "you are first", "agent_1": "you are second"}
    assert env.class_name == "pair" and type(env.unwrapped).__module__ == plain
    game = make_env(f"{plain}:parallel_env")
    check_env(game)
    assert set(game.agents) == {"ann", "bob", "judge"}


def test_faults_of_plain_classes_are_one_sentence(plain):
    with pytest.raises(EnvError, match="it has no reset"):
        make_env(f"{plain}:Empty")
    with pytest.raises(EnvError, match=r"There is no setting 'larges'.*did you mean 'largest'"):
        make_env(f"{plain}:CustomEnv", larges=3)
    with pytest.raises(EnvError, match="act by texts"):
        make_env(f"{plain}:Numbers")
    env = make_env(f"{plain}:Wrong")
    env.reset(seed=0)
    with pytest.raises(EnvError, match=r"Wrong\.step\(\) must return \(observation, reward, done, info\)"):
        env.step({"agent_0": "a", "agent_1": "b"})


def test_a_run_records_the_users_class(plain):
    from mafrt.runners.identity import environment_record

    record = environment_record(make_env(f"{plain}:CustomEnv", largest=4))
    assert record.path == f"{plain}:CustomEnv" and record.arguments == {"largest": 4}
    assert record.file is not None and record.file.endswith("from_marft.py")


def test_pettingzoos_own_tests_pass():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # texts are no arrays, says PettingZoo
        api_test(AecPettingZoo(Talk()), num_cycles=20)
        parallel_api_test(ParallelPettingZoo(Talk()), num_cycles=20)
        seed_test(lambda: AecPettingZoo(Talk()), num_cycles=10)
        parallel_seed_test(lambda: ParallelPettingZoo(Talk()), num_cycles=10)


def test_gymnasiums_own_check_passes():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", ".*not within the observation space|.*render")
        gymnasium_check(GymnasiumEnv(Talk()), skip_render_check=True)


def test_gymnasium_asks_agent_after_agent():
    env = GymnasiumEnv(Talk())
    text, info = env.reset(seed=0, options={"task": 2})
    assert (text, info["agent"]) == ("topic 2", "ann")
    text, reward, *_, info = env.step("x")
    assert (text, reward, info["agent"]) == ("user: topic 2", 0.0, "bob")
    text, reward, *_, info = env.step("y")
    assert (text, reward, info["agent"]) == ("[('ann', 'x'), ('bob', 'y')]", 0.5, "judge")
    for words in ("v", "x", "y", "v", "x", "y"):
        env.step(words)
    text, reward, terminated, *_ = env.step("v")
    assert (text, reward, terminated) == ("", 1.0 + 2.0, True)  # the judge's reward and the outcome


@pytest.mark.parametrize("form", [AecPettingZoo, ParallelPettingZoo])
def test_ours_as_theirs_as_ours(form):
    """Through PettingZoo and back: the same agents act, are shown the same texts, and are paid the same."""

    class Theirs(form):
        def __init__(self):
            super().__init__(Talk(), add_outcome=False)

    wrapped = adapted(Theirs)
    assert wrapped is not None
    session = Session(wrapped())
    assert session.agents == Talk.agents
    shown, _ = session.reset(seed=1)
    assert shown["ann"].startswith("topic")
    paid: dict[str, float] = {}
    while not session.done:
        result = session.step({agent: agent.upper() for agent in shown})
        shown = result.observations
        for agent, reward in result.rewards.items():
            paid[agent] = paid.get(agent, 0.0) + reward
    assert result.terminated and paid == {"ann": 1.5, "bob": 0.0, "judge": 3.0}  # three rounds of .5 and of 1


def test_a_gymnasium_environment_of_texts_is_adapted():
    class Echo(gymnasium.Env):
        observation_space, action_space = AnyText(), AnyText()

        def reset(self, *, seed=None, options=None):
            super().reset(seed=seed)
            self.number = int(self.np_random.integers(100))
            return f"say {self.number}", {"task": str(self.number)}

        def step(self, action):
            return "", float(action == str(self.number)), True, False, {}

    wrapped = adapted(Echo)
    assert wrapped is not None
    session = Session(wrapped())
    shown, info = session.reset(seed=3)
    assert shown == {"agent": f"say {info['task']}"}
    assert session.step({"agent": info["task"]}).rewards == {"agent": 1.0}
    assert session.reset(seed=3)[0] == shown and session.reset(seed=4)[0] != shown


# ---------------------------------------------------------------------------------------------------------------- MRLM

OF_MRLM = '''
import random
from dataclasses import dataclass, field
from typing import Any

from mrlm.core import SimulatedEnvironment
from mrlm.core.types import Message, MessageRole, Observation, Reward


class Sums(SimulatedEnvironment):
    """As MRLM's page shows it, with the feedback form of its own environments."""

    max_turns = 5

    def reset(self) -> Observation:
        self.a = random.randint(1, 9)
        return Observation(messages=[Message("system", "You add."), Message(MessageRole.USER, f"{self.a} + 1 = ?")])

    def step(self, action: Message) -> tuple[Observation, Reward]:
        assert action.role is MessageRole.ASSISTANT
        right = action.content == str(self.a + 1)
        told = Message(role=MessageRole.ENVIRONMENT, content="no")
        reward = Reward(value=float(right), components={"right": float(right)})
        return Observation(messages=[action, told], done=right, info={"right": right}), reward


@dataclass
class Said:
    role: str
    content: str


@dataclass
class Seen:
    messages: list
    done: bool = False


class Own:
    """The same shape without MRLM's names; every observation is the whole conversation, the reward a number."""

    form = staticmethod(lambda role, content: Said(role=role, content=content))

    def reset(self):
        self.log = [self.form(role="user", content="go")]
        return Seen(self.log)

    def step(self, action):
        self.log = [*self.log, action, self.form(role="user", content="on")]
        return Seen(self.log, done=len(self.log) > 4), 0.5


class OfDicts(Own):
    form = dict


class Broken(Own):
    def reset(self):
        return Seen([Said("user", 3)])
'''


@pytest.fixture
def of_mrlm(tmp_path, monkeypatch):
    (tmp_path / "of_mrlm.py").write_text(OF_MRLM)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] in ("mrlm", "of_mrlm")]:
        del sys.modules[name]


def test_an_environment_of_mrlm_plays_as_its_page_shows_it(of_mrlm):
    env = make_env("of_mrlm:Sums")
    check_env(env)
    assert env.agents == ("agent",) and env.max_steps == 5
    seen, _ = env.reset(seed=4)
    first = [{"role": "system", "content": "You add."}, {"role": "user", "content": f"{env.unwrapped.a} + 1 = ?"}]
    assert seen == {"agent": first}
    result = env.step({"agent": "77"})
    # Its feedback goes on from what was shown, and MRLM's own role is one that chat templates know.
    more = [{"role": "assistant", "content": "77"}, {"role": "user", "content": "no"}]
    assert result.observations == {"agent": first + more} and result.rewards == {"agent": 0.0}
    result = env.step({"agent": str(env.unwrapped.a + 1)})
    assert result.terminated and result.rewards == {"agent": 1.0}
    assert result.info["measures"] == {"reward/right": 1.0} and result.info["right"] is True
    again, _ = env.reset(seed=4)
    assert again == {"agent": first}


@pytest.mark.parametrize("name", ["Own", "OfDicts"])
def test_objects_of_that_shape_will_do(of_mrlm, name):
    env = make_env(f"of_mrlm:{name}")
    env.reset(seed=1)
    result = env.step({"agent": "a"})
    chat = [("user", "go"), ("assistant", "a"), ("user", "on")]
    assert [(m["role"], m["content"]) for m in result.observations["agent"]] == chat
    assert result.rewards == {"agent": 0.5} and not result.terminated
    assert env.step({"agent": "b"}).terminated


def test_what_mrlm_has_besides_is_an_ordinary_error(of_mrlm, tmp_path):
    with pytest.raises(EnvError, match="a text as content"):
        make_env("of_mrlm:Broken").reset(seed=1)
    (tmp_path / "of_mrlm_math.py").write_text("from mrlm.environments.math import MathReasoningEnvironment\n")
    with pytest.raises(EnvError, match=r"needs 'mrlm\.environments', which is not installed"):
        make_env("of_mrlm_math:MathReasoningEnvironment")
    (tmp_path / "of_nobody.py").write_text("import nobody_has_this\n")
    with pytest.raises(EnvError, match="needs 'nobody_has_this'"):
        make_env("of_nobody:X")
