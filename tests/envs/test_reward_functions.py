"""Reward functions and coaches as users have them: signatures, numbers, and what they do to what they are given."""

from __future__ import annotations

import asyncio
import functools
import json
import math
import threading
import time
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pandas as pd
import pytest
import torch

from mafrt import Coach, Env, Scored, Session, StepResult, Unscored, make_env
from mafrt.coach.base import Case
from mafrt.coach.own_coach import verdicts_of
from mafrt.core.errors import CoachError, CoachInterruptedError, ConfigError, EnvError
from mafrt.core.text import real_number
from mafrt.core.types import Evidence
from mafrt.environment.contract import checked_step
from mafrt.envs.program.episode import read_reward
from mafrt.envs.tasks.reward_functions import reward_function
from mafrt.runners.judge import _checked

RECORD = {
    "problem": "2+2",
    "answer": "4",
    "data_source": "sums",
    "extra_info": {"index": 3},
    "reward_model": {"ground_truth": "four"},
    "tests": ["a"],
}


def paid(function, text="it is 4", record=RECORD):
    return reward_function(function, [record]).grade(text, record)


# ---------------------------------------------------------------------------------------------------------- numbers


@pytest.mark.parametrize(
    "value",
    [
        1,
        1.0,
        True,
        Fraction(2, 2),
        Decimal("1.0"),
        np.float16(1),
        np.float32(1),
        np.float64(1),
        np.int8(1),
        np.uint64(1),
        np.bool_(True),
        np.isclose(1, 1),
        np.array(1.0),
        np.array([1]),
        torch.tensor(1.0),
        torch.tensor(True),
        torch.tensor([1.0]),
        torch.tensor(1.0, requires_grad=True),
        torch.tensor(1, dtype=torch.bfloat16),
        torch.nn.Parameter(torch.tensor([[1.0]])),
        np.longdouble(1),
        np.ma.array([1.0]),
        pd.Series([1.0]),
    ],
)
def test_one_number_is_a_number_whoever_made_it(value):
    assert real_number(value) == 1.0 and type(real_number(value)) is float
    assert paid(lambda text, record: value).score == 1.0
    assert read_reward(value, ("a",)).outcome == 1.0
    assert read_reward({"reward": value, "rewards": {"a": value}}, ("a",)).rewards == {"a": 1.0}


@pytest.mark.parametrize(
    "value",
    [
        "1",
        "",
        b"1",
        1j,
        math.nan,
        math.inf,
        -math.inf,
        10**400,
        np.nan,
        np.array([1, 2]),
        np.array([]),
        torch.ones(2),
        torch.tensor(math.nan),
        [1.0],
        {},
        object(),
        np.array("1"),
        np.datetime64("2026-01-01"),
        np.timedelta64(1, "s"),
        np.ma.masked,
        np.ma.array([1.0], mask=True),
        np.complex64(1),
        Decimal("sNaN"),
        pd.NA,
        pd.NaT,
        pd.Timedelta("1s"),
    ],
)
def test_what_is_not_one_finite_number_is_none(value):
    assert real_number(value) is None
    with pytest.raises(EnvError, match="reward function"):
        paid(lambda text, record: value)
    with pytest.raises(EnvError, match="reward must be"):
        read_reward(value, ("a",))


class Counting(Env):
    """Pays with NumPy's numbers, and writes into the list of messages that it returned."""

    agents = ("a",)

    def reset(self, seed=None, options=None):
        self.chat = [{"role": "user", "content": "first"}]
        return {"a": self.chat}, {}

    def step(self, actions):
        self.chat.append({"role": "assistant", "content": "second"})
        self.chat[0]["content"] = "changed"
        info = {"outcome": np.float32(0.5), "measures": {"right": np.bool_(True)}}
        return StepResult({}, {"a": torch.tensor(0.25)}, np.bool_(True), False, info)


def test_an_environment_pays_with_any_number_and_may_use_its_list_again():
    session = Session(Counting())
    seen, _ = session.reset(seed=0)
    result = session.step({"a": "x"})
    assert seen == {"a": [{"role": "user", "content": "first"}]}
    told = json.dumps([result.rewards, result.info], sort_keys=True)
    assert told == '[{"a": 0.25}, {"measures": {"right": 1.0}, "outcome": 0.5}]'


@pytest.mark.parametrize(
    "flag", [np.True_, np.array(True), np.array([True]), torch.tensor(True), torch.ones(2).bool().all()]
)
def test_the_end_is_said_by_any_truth_value(flag):
    def step(flag, truncated=False, info=None):
        return checked_step(("a",), "Mine.step()", StepResult({}, {}, flag, truncated, info or {}))

    assert step(flag).terminated is True and step(False, flag).truncated is True
    for wrong in (1, None, "True", np.int64(1), torch.ones(2).bool(), torch.tensor(1.0)):
        with pytest.raises(EnvError, match="terminated must be True or False"):
            step(wrong)
    scores = Scored(np.float32(5), spans=(("x", torch.tensor(2.0)),))
    info = step(
        flag, info={"earlier": [("a", np.int64(0), Fraction(1, 2))], "evidence": {"a": Evidence(rules=scores)}}
    ).info
    assert info["earlier"] == [("a", 0, 0.5)]
    assert json.dumps(vars(info["evidence"]["a"].rules))  # in the episode's line


# ------------------------------------------------------------------------------------------------------- signatures


def verl(data_source, solution_str, ground_truth, extra_info=None):
    right = (data_source, solution_str, ground_truth, extra_info) == ("sums", "it is 4", "four", {"index": 3})
    return {"score": float(right), "format": np.float32(0.5), "note": "none"}


def trl(completions, answer, **columns):
    assert columns["prompts"] == ["2+2"] and columns["tests"] == [["a"]]
    return [float(given in text) for text, given in zip(completions, answer, strict=True)]


async def later(text, record):
    await asyncio.sleep(0)
    return float(record["answer"] in text)


async def trl_later(prompts, completions, answer):
    return [1.0 for _ in completions]


class Callable_:
    def __call__(self, text, record):
        return 1.0

    def method(self, text, record):
        return 1.0


@pytest.mark.parametrize(
    "function",
    [
        verl,
        trl,
        later,
        trl_later,
        Callable_(),
        Callable_().method,
        lambda text: 1.0,
        lambda text, record=None: 1.0,
        lambda answer, record: 1.0,
        lambda text, answer=None: 1.0,
        lambda *both: 1.0,
        functools.partial(lambda k, text, record: k, 1.0),
        functools.partial(verl, extra_info={"index": 3}),
        lambda solution_str, **rest: float("ground_truth" in rest),
        lambda completions: [1.0],
        lambda completions, **_: np.array([1.0]),
        lambda *, completions, answer: (1.0,),
        lambda data_source, solution_str, ground_truth, extra_info, **kwargs: {"score": True},
    ],
)
def test_functions_of_every_form_are_called_as_they_are(function):
    assert paid(function).score == 1.0


def test_further_numbers_of_a_dict_are_measures():
    assert paid(verl).measures == {"format": 0.5}
    assert paid(lambda text: {"reward": 2, "length": 7}).score == 2.0


def test_a_chat_has_completions_of_messages():
    def trl_chat(completions, **columns):
        return [float(completion[0]["content"] == "it is 4") for completion in completions]

    assert paid(trl_chat, record={**RECORD, "prompt": [{"role": "user", "content": "2+2"}]}).score == 1.0


def test_none_is_no_opinion():
    assert paid(lambda completions: [None]).score is None
    with pytest.raises(EnvError, match="NoneType"):
        paid(lambda text: None)  # as likely a `return` that was forgotten


@pytest.mark.parametrize(
    "function, words",
    [
        (lambda a, b, c: 1.0, "no known form"),
        (lambda: 1.0, "no known form"),
        (lambda text, *, level: 1.0, "no known form"),
        (lambda completions, trainer_state: [1.0], "trainer_state"),
        (lambda completions, solution: [1.0], "'solution'"),
        (lambda solution_str, reward_router: 1.0, "reward_router, which mafrt does not give"),
        (lambda solution_text, ground_truth: 1.0, "ground_truth, which its form has not"),
        (lambda completion_ids, **kwargs: [1.0], "completion_ids, which its form has not"),
        (lambda completions, /, **kwargs: [1.0], "completions, which its form has not"),
        (lambda trainer_state, text: 1.0, "trainer_state, which its form has not"),
        (lambda completion, answer: 1.0, r"read record\['answer'\]"),
        (functools.partial(lambda k, text, problem: 1.0, 1), r"read record\['problem'\]"),
        ("no_such_module_of_mine:f", "no_such_module_of_mine"),
        (None, "--reward"),
        (7, "expected a function"),
    ],
)
def test_what_cannot_be_called_is_refused_before_anything_is_loaded(function, words):
    with pytest.raises(ConfigError, match=words):
        reward_function(function, [RECORD])


def yields(text, record):
    yield 1.0


async def yields_later(completions):
    yield [1.0]


@pytest.mark.parametrize("function", [Callable_, Counting, yields, yields_later, functools.partial(yields, record={})])
def test_what_returns_no_number_by_its_kind_is_refused_before_anything_is_loaded(function):
    with pytest.raises(ConfigError, match=r"gives (a generator|an object of its own), which is no number"):
        reward_function(function, [RECORD])


def test_a_refusal_names_file_and_line_of_the_user():
    def three(a, b, c):
        return 1.0

    with pytest.raises(ConfigError, match=r"three.*test_reward_functions\.py, line \d+"):
        reward_function(three)


@pytest.mark.parametrize(
    "function",
    [
        lambda completions: [1.0, 2.0],
        lambda completions: 1.0,
        lambda completions: {1.0: "right"},
        lambda completions: {1.0},
        lambda completions: b"1",
        lambda completions: None,
        lambda completions: [math.nan],
        lambda completions: torch.tensor(1.0),
        lambda text: {"grade": 1.0},
        lambda text: "good",
        lambda solution_str: (1.0, {"acc": 1}),
    ],
)
def test_a_result_of_another_shape_is_the_users_error(function):
    with pytest.raises(EnvError, match="expected"):
        paid(function)


# ------------------------------------------------------------------------------------------------- what is given away


def test_a_function_may_do_what_it_likes_to_its_record(tmp_path):
    seen = []

    def score(text, record):
        seen.append((len(record["tests"]), record["answer"], sorted(record["deep"])))
        record["tests"].append("b")
        record["answer"] = "5"
        record["deep"]["more"] = 1
        del record["problem"]
        return 1.0

    (tmp_path / "t.jsonl").write_text(json.dumps({**RECORD, "deep": {}}))
    env = make_env("tasks", dataset_path=str(tmp_path / "t.jsonl"), reward=score)
    for one in (env, env.spawn(), env):
        one.reset(seed=0)
        one.step({"solver": "4"})
    assert len(seen) > 2 and all(entry == (1, "4", []) for entry in seen)


def test_no_opinion_leaves_the_outcome_open_and_measures_reach_the_episode(tmp_path):
    (tmp_path / "t.jsonl").write_text(json.dumps(RECORD))

    def play(function):
        env = make_env("tasks", dataset_path=str(tmp_path / "t.jsonl"), reward=function)
        env.reset(seed=0)
        return env.step({"solver": "it is 4"}).info

    assert "outcome" not in play(lambda completions: [None])
    assert play(verl)["outcome"] == 1.0 and play(verl)["measures"] == {"format": 0.5}


# ---------------------------------------------------------------------------------------------------------- coaches

CASES = [Case("a", said) for said in ("one", "two", "three")]


def coach(judge):
    return type("Mine", (Coach,), {"judge": judge})()


async def _async(self, cases):
    return [Scored(5.0, "")] * len(cases)


async def _async_generator(self, cases):
    for _ in cases:
        yield Scored(5.0, "")


def _generator(self, cases):
    yield from (Scored(5.0, "") for _ in cases)


@pytest.mark.parametrize(
    "judge",
    [
        _async,
        _generator,
        _async_generator,
        lambda self, cases: (5 for _ in cases),
        lambda self, cases: np.full(3, 5.0),
        lambda self, cases: ["5"] * 3,
        lambda self, cases: [Scored("5", "")] * 3,
        lambda self, cases: torch.full((3,), 5),
        lambda self, cases: [Scored(np.float32(5), "")] * 3,
        lambda self, cases: (Scored(Fraction(5), "") for _ in cases),
    ],
)
def test_a_coach_may_be_async_or_a_generator_and_score_with_any_number(judge):
    mine = coach(judge)
    verdicts = [_checked(verdict, mine) for verdict in verdicts_of(mine, CASES, 5.0)]
    assert verdicts == [Scored(5.0, "")] * 3
    assert all(type(verdict.score) is float for verdict in verdicts)


@pytest.mark.parametrize("score", [11, -1, math.nan, True, np.bool_(True), "ten", "5/10", "", [5], 10**400])
def test_what_is_no_score_is_never_another_one(score):
    assert isinstance(_checked(Scored(score, ""), coach(_async)), Unscored)


def test_none_of_a_coach_is_unscored():
    assert isinstance(_checked(None, coach(_async)), Unscored)


def test_a_coach_that_raises_on_one_case_loses_that_case(caplog):
    def judge(self, cases):
        return [Scored(10.0 / {"one": 1, "two": 0, "three": 3}[case.said], "") for case in cases]

    verdicts = verdicts_of(coach(judge), CASES, 5.0)
    assert [type(verdict) for verdict in verdicts] == [Scored, Unscored, Scored]
    assert "ZeroDivisionError" in verdicts[1].why and "test_reward_functions.py, line" in verdicts[1].why
    assert "one by one" in caplog.text


def test_a_coach_that_raises_on_every_case_pauses_the_run():
    def judge(self, cases):
        raise KeyError("rubric")

    with pytest.raises(CoachError, match=r"KeyError.*every case"):
        verdicts_of(coach(judge), CASES, 5.0)


def test_a_coach_that_hangs_has_a_deadline_and_hears_a_request_to_stop():
    released = threading.Event()
    hanging = coach(lambda self, cases: released.wait(600) and [])
    try:
        with pytest.raises(CoachError, match="coach_deadline"):
            verdicts_of(hanging, CASES, 0.4)
        hanging.interrupted = lambda: True
        began = time.monotonic()
        with pytest.raises(CoachInterruptedError):
            verdicts_of(hanging, CASES, 600.0)
        assert time.monotonic() - began < 300
    finally:
        released.set()
