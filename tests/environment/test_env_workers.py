"""Environments in worker processes: deadlines, crashes, forks, exactness."""

from __future__ import annotations

import gc
import os
import random
import signal
import threading
import time
from pathlib import Path

import pytest

from mafrt import make_env
from mafrt.core.errors import ConfigError, EnvError
from mafrt.core.types import Evidence, Scored, StepResult
from mafrt.environment.base import Env
from mafrt.environment.checker import play
from mafrt.environment.session import Session
from mafrt.environment.workers import (
    FEW_WORKERS,
    MOST_WORKERS,
    WorkerSession,
    WorkerStackError,
    guarded,
    guarded_problems,
)

pytestmark = pytest.mark.takes(slow=7)


class Game(Env):
    """Hangs, crashes or raises on demand; otherwise a counter with chance."""

    agents = ("a", "b")
    max_steps = 5

    def __init__(self, bias=0):
        self.bias = bias

    def reset(self, seed=None, options=None):
        self.said = [self.rng.random() + self.bias]
        return {"a": f"begin {self.said[0]}"}, {"task": "t", "answer": "7"}

    def step(self, actions):
        [(name, text)] = actions.items()
        if text == "loop":
            while True:
                pass
        if text == "sleep":
            time.sleep(1000)
        if text == "exit":
            os._exit(7)
        if text == "segv":
            os.kill(os.getpid(), signal.SIGSEGV)
        if text == "raise":
            raise KeyError("no such move")
        if text == "input":
            input()
        self.said.append(f"{name}:{text}:{self.rng.random()}")
        evidence = {name: Evidence("out\ud800", Scored(5, "so", (("x", 1.0),)), {"n": 1})}
        other = "b" if name == "a" else "a"
        info = {"evidence": evidence, "pid": os.getpid()}
        return StepResult({other: " ".join(map(str, self.said))}, {name: 0.1}, False, False, info)


def shown(result):
    return result[:4], result.info["evidence"]


def test_a_worker_plays_what_the_process_plays():
    here, there = Session(Game(bias=3)), guarded(Game(bias=3), 30)
    assert isinstance(there, WorkerSession) and there.agents == here.agents and there.class_name == "Game"
    for seed in (3, 4):
        assert here.reset(seed=seed) == there.reset(seed=seed)
        for number in range(5):
            actions = {"ab"[number % 2]: f"x{number}"}
            mine, theirs = here.step(actions), there.step(actions)
            assert shown(mine) == shown(theirs) and mine.truncated == (number == 4)
            assert theirs.info["pid"] != os.getpid() and there.step_count == number + 1
        assert there.done
    with pytest.raises(EnvError, match="after the episode ended"):
        there.step({"a": "x"})
    assert play(there, 1) == play(Game(bias=3), 1)


@pytest.mark.slow
@pytest.mark.parametrize("word", ["loop", "sleep"])
def test_a_hanging_step_is_killed_and_shown_with_the_user_s_line_and_the_next_episode_is_played(word):
    env = guarded(Game(), 1.0)
    env.reset(seed=1)
    pid = env.step({"a": "x"}).info["pid"]
    started = time.monotonic()
    with pytest.raises(EnvError) as caught:
        env.step({"b": word})
    assert time.monotonic() - started < 60  # and not the word's 1000
    text = str(caught.value)
    assert "Game.step() has not returned within 1 s" in text and "test_env_workers.py, line " in text, text
    assert "--env_timeout_s" in text and "\n" not in text
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    with pytest.raises(EnvError, match="call reset"):
        env.step({"b": "x"})
    env.reset(seed=1)
    assert env.step({"a": "x"}).info["pid"] != pid


@pytest.mark.parametrize(
    ("word", "words"),
    [
        ("exit", "ended its process (exit code 7)"),
        ("segv", "ended its process (signal SIGSEGV)"),
        ("raise", "Game.step() raised KeyError at step 0: 'no such move' ("),
        ("input", "Game.step() raised EOFError"),
    ],
)
def test_crashes_and_errors_are_one_sentence(word, words):
    env = guarded(Game(), 20)
    env.reset(seed=1)
    with pytest.raises(EnvError) as caught:
        env.step({"a": word})
    assert words in str(caught.value) and "\n" not in str(caught.value), str(caught.value)
    assert env.reset(seed=1) == Session(Game()).reset(seed=1)


def test_the_stack_of_the_worker_is_the_cause():
    env = guarded(Game(), 20)
    env.reset(seed=1)
    with pytest.raises(EnvError) as caught:
        env.step({"a": "raise"})
    assert isinstance(caught.value.__cause__, WorkerStackError)
    assert 'raise KeyError("no such move")' in str(caught.value.__cause__)


@pytest.mark.slow
def test_a_hanging_reset_and_spawn_have_the_deadline_too():
    class Stuck(Game):
        def reset(self, seed=None, options=None):
            time.sleep(1000)

    class Slow(Game):
        def spawn(self):
            time.sleep(1000)

    with pytest.raises(EnvError, match=r"Stuck.reset\(\) has not returned within 0.5 s \(.*line"):
        guarded(Stuck(), 0.5).reset(seed=0)
    with pytest.raises(EnvError, match=r"Slow.spawn\(\) has not returned within 0.5 s"):
        guarded(Slow(), 0.5).reset(seed=0)
    [problem] = guarded_problems(Stuck(), (0,), 0.5)
    assert "Stuck.reset() has not returned" in problem


@pytest.mark.slow
def test_a_check_in_a_worker_finds_what_a_check_in_process_finds():
    class Own(Game):
        def reset(self, seed=None, options=None):
            super().reset(seed, options)
            return {"a": str(random.random())}, {}

    assert guarded_problems(Game(), (0, 1), 20) == []
    [problem] = guarded_problems(Own(), (0,), 20)
    assert "gave different episodes when called twice" in problem


class Forking(Game):
    def fork(self):
        other = Forking(self.bias)
        other.said, other.step_count = list(self.said), self.step_count
        other.rng.setstate(self.rng.getstate())
        return other


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Game, Forking])
def test_forks_go_on_from_the_same_point_and_one_that_hangs_disturbs_nobody(kind):
    env, reference = guarded(kind(), 1.0), Session(Game())
    for session in (env, reference):
        session.reset(seed=5)
        session.step({"a": "one"})
    left, right = env.fork(), env.fork()
    assert left.step_count == 1
    with pytest.raises(EnvError, match="has not returned"):
        left.step({"b": "loop"})
    # The fork's process was also that of the episode and of the other fork: both are played again elsewhere.
    expected = shown(reference.step({"b": "two"}))
    assert shown(right.step({"b": "two"})) == expected == shown(env.step({"b": "two"}))
    assert env.step_count == 2


@pytest.mark.slow
@pytest.mark.parametrize(("blocking", "most"), [(True, MOST_WORKERS), (False, FEW_WORKERS)])
def test_sessions_that_share_a_worker_survive_the_death_of_one(blocking, most):
    class Waiting(Game):
        pass

    Waiting.blocking = blocking
    env = guarded(Waiting(), 1.0)
    sessions = [env.spawn() for _ in range(most + 2)]
    shared = [s for s in sessions if s._worker is sessions[0]._worker]
    assert len(shared) == 2
    for number, session in enumerate(shared):
        session.reset(seed=number)
        session.step({"a": "x"})
    with pytest.raises(EnvError, match="exit code 7"):
        shared[0].step({"b": "exit"})
    reference = Session(Game())
    reference.reset(seed=1)
    reference.step({"a": "x"})
    assert shown(shared[1].step({"b": "y"})) == shown(reference.step({"b": "y"}))


@pytest.mark.slow
def test_an_episode_that_cannot_be_repeated_is_lost_with_its_worker():
    class Moody(Game):
        def reset(self, seed=None, options=None):
            return {"a": str(os.getpid())}, {}

        def step(self, actions):
            if "exit" in actions.values():
                os._exit(1)
            return StepResult({"a": "go on"}, {}, False, False, {})

    env = guarded(Moody(), 5)
    env.reset(seed=0)
    fork = env._worker  # another episode in the same process
    with pytest.raises(EnvError, match="exit code 1"):
        fork.call(env._life, "step", handle=env._handle, actions={"a": "exit"})
    with pytest.raises(EnvError, match="went another way; draw from self"):
        env.step({"a": "x"})


@pytest.mark.slow
def test_bounded_environments_stay_in_the_process_and_say_so_themselves():
    class Known(Game):
        bounded = True

    class Derived(Known):
        pass

    assert type(guarded(Known(), 5)) is Session
    assert isinstance(guarded(Derived(), 5), WorkerSession)
    assert type(guarded(Derived(), None)) is Session
    assert type(guarded(make_env("math"), 5)) is Session
    worker = guarded(Derived(), 5)
    assert guarded(worker, 5) is worker


def test_a_workflow_of_one_s_own_is_not_taken_for_a_bounded_one(monkeypatch):
    from mafrt.envs.math import MathEnv
    from mafrt.envs.workflows.registry import WORKFLOWS, Chain

    class Mine(Chain):
        pass

    monkeypatch.setattr(WORKFLOWS, "_known", {**WORKFLOWS._known, "mine": Mine})
    assert isinstance(guarded(MathEnv(workflow="mine"), 5), WorkerSession)


def test_values_that_are_no_json_are_named_or_converted():
    numpy = pytest.importorskip("numpy")

    class Odd(Game):
        def step(self, actions):
            info = {"tuple": {(1, 2): 3}} if "bad" in actions.values() else {"n": numpy.float64(0.5), "s": {"b", "a"}}
            return StepResult({"a": "go on"}, {"a": numpy.float32(1)}, False, False, info)

    env = guarded(Odd(), 10)
    env.reset(seed=0)
    assert env.step({"a": "x"}).info == {"n": 0.5, "s": ["a", "b"]}
    with pytest.raises(EnvError, match=r"Odd.step\(\) returned a value that cannot be sent as JSON"):
        env.step({"a": "bad"})
    env.reset(seed=0)


def test_an_environment_cannot_touch_the_trainer_s_switches():
    import torch

    class Switch(Game):
        def step(self, actions):
            torch.set_grad_enabled(False)
            return super().step(actions)

    env = guarded(Switch(), 10)
    env.reset(seed=0)
    with pytest.raises(EnvError, match=r"torch.set_grad_enabled\(False\)"):
        env.step({"a": "x"})
    assert torch.is_grad_enabled()


def children_of(pid: int) -> list[int]:
    try:
        with open(f"/proc/{pid}/task/{pid}/children") as file:
            return [int(word) for word in file.read().split()]
    except FileNotFoundError:
        return []


@pytest.mark.slow
def test_nothing_is_left_when_the_sessions_are_gone():
    before = set(children_of(os.getpid()))
    env = guarded(Game(), 10)
    siblings = [env.spawn() for _ in range(3)]
    for session in siblings:
        session.reset(seed=0)
    [nursery] = set(children_of(os.getpid())) - before
    workers = children_of(nursery)
    assert len(workers) == 3
    del env, siblings, session
    gc.collect()
    assert nursery not in children_of(os.getpid())
    until = time.monotonic() + 60  # a busy machine takes a while to bury what was killed
    while any(Path(f"/proc/{pid}").exists() for pid in workers):
        assert time.monotonic() < until
        time.sleep(0.02)


@pytest.mark.slow
def test_a_nursery_that_was_killed_is_replaced():
    before = set(children_of(os.getpid()))
    env = guarded(Game(), 10)
    env.reset(seed=0)
    [nursery] = set(children_of(os.getpid())) - before
    workers = children_of(nursery)
    os.kill(nursery, signal.SIGKILL)
    # Its workers end with it, on a busy machine a little later.
    for _ in range(600):
        if not any(Path(f"/proc/{worker}").exists() for worker in workers):
            break
        time.sleep(0.05)
    assert workers
    with pytest.raises(EnvError, match="ended its process"):
        env.step({"a": "x"})
    assert env.reset(seed=2) == Session(Game()).reset(seed=2)


@pytest.mark.slow
def test_threads_step_workers_side_by_side(tmp_path):
    class Meeting(Game):
        blocking = True

        def step(self, actions):
            (tmp_path / str(os.getpid())).touch()
            while len(list(tmp_path.iterdir())) < 8:  # until all are here
                time.sleep(0.02)
            return super().step(actions)

    env = guarded(Meeting(), 60)
    sessions = [env.spawn() for _ in range(8)]
    for session in sessions:
        session.reset(seed=0)
    threads = [threading.Thread(target=session.step, args=({"a": "x"},)) for session in sessions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [session.step_count for session in sessions] == [1] * 8


@pytest.mark.parametrize("value", [0, -1, float("nan"), float("inf")])
def test_a_deadline_that_is_none_is_refused(value):
    from mafrt.config.train_config import TrainConfig

    with pytest.raises(ConfigError, match="env_timeout_s is"):
        TrainConfig.of(env_timeout_s=value)


def test_the_line_of_a_hang_is_found_however_slowly_the_stack_is_written(monkeypatch):
    """The handler writes line by line: on a busy machine a read may end after any of them."""
    whole = os.read

    def slow(descriptor, size):
        return whole(descriptor, min(size, 16))

    env = guarded(Game(), 0.3)
    env.reset(seed=1)
    env.step({"a": "x"})
    monkeypatch.setattr("mafrt.environment.workers.os.read", slow)
    with pytest.raises(EnvError, match=r"test_env_workers.py, line \d+\)"):
        env.step({"b": "loop"})
