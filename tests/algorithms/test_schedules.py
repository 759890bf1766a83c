"""Who learns when."""

from __future__ import annotations

from itertools import permutations

import pytest

from mafrt.core.errors import ConfigError
from mafrt.runners.schedules import SCHEDULES, make_schedule


def learning_adapters(plan):
    """Adapters that may change, in order of their update."""
    return tuple(dict.fromkeys(plan.adapters[agent] for agent in plan.agents))


def test_concurrent():
    plan = make_schedule("concurrent", ["a", "b"]).plan(17)
    assert plan.learners == (("a", "b"),) and plan.agents == ("a", "b") and plan.interval is None
    assert dict(plan.adapters) == {"a": "a", "b": "b"} and not plan.compound


def test_round_robin():
    # interval 3, agents a, b: a learns in 0..2, b in 3..5, a again in 6
    schedule = make_schedule("round_robin", ["a", "b"], interval=3)
    assert [schedule.plan(i).interval for i in range(7)] == ["a", "a", "a", "b", "b", "b", "a"]
    assert schedule.plan(4).learners == (("b",),) and learning_adapters(schedule.plan(4)) == ("b",)


def test_sequential_is_a_permutation_drawn_from_seed_and_iteration():
    schedule = make_schedule("sequential", ["a", "b", "c"], seed=1)
    orders = [schedule.plan(i).agents for i in range(200)]
    assert set(orders) == set(permutations("abc"))
    assert orders == [make_schedule("sequential", ["a", "b", "c"], seed=1).plan(i).agents for i in range(200)]
    assert orders != [make_schedule("sequential", ["a", "b", "c"], seed=2).plan(i).agents for i in range(200)]
    assert all(len(group) == 1 for group in schedule.plan(0).learners) and schedule.plan(0).compound


def test_sequential_order_is_the_same_on_every_python():
    # A resumed run may run on another version: these orders are pinned.
    schedule = make_schedule("sequential", ["a", "b", "c"], seed=0)
    assert ["".join(schedule.plan(i).agents) for i in range(4)] == PINNED


PINNED = ["bac", "bca", "acb", "acb"]


def test_swap_exchanges_two_roles():
    schedule = make_schedule("swap", ["pioneer", "observer"], interval=2, adapters={"pioneer": "x", "observer": "y"})
    casts = [dict(schedule.plan(i).adapters) for i in range(5)]
    straight, crossed = {"pioneer": "x", "observer": "y"}, {"pioneer": "y", "observer": "x"}
    assert casts == [straight, straight, crossed, crossed, straight]
    assert schedule.plan(2).learners == (("pioneer", "observer"),)
    assert learning_adapters(schedule.plan(2)) == ("y", "x")


def test_swap_of_three_comes_round_and_leaves_the_frozen_alone():
    schedule = make_schedule("swap", ["a", "f", "b", "c"], frozen=["f"])
    assert dict(schedule.plan(1).adapters) == {"a": "b", "f": "f", "b": "c", "c": "a"}
    assert dict(schedule.plan(3).adapters) == dict(schedule.plan(0).adapters)


@pytest.mark.parametrize("name", SCHEDULES)
def test_frozen_agents_never_learn_and_keep_their_adapter(name):
    schedule = make_schedule(name, ["a", "b", "c"], frozen=["b"], interval=1)
    plans = [schedule.plan(i) for i in range(8)]
    assert {agent for plan in plans for agent in plan.agents} == {"a", "c"}
    assert all(plan.adapters["b"] == "b" and "b" not in learning_adapters(plan) for plan in plans)
    nobody = make_schedule(name, ["a"], frozen=["a"]).plan(3)
    assert nobody.learners == () and nobody.agents == () and nobody.interval is None


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_plan_depends_on_the_iteration_alone(name):
    schedule = make_schedule(name, ["a", "b", "c"], interval=2)
    assert [schedule.plan(i) for i in range(9)] == [schedule.plan(i) for i in reversed(range(9))][::-1]


def test_shared_adapter_is_named_once():
    plan = make_schedule("concurrent", ["a", "b"], adapters={"a": "x", "b": "x"}).plan(0)
    assert learning_adapters(plan) == ("x",)


@pytest.mark.parametrize(
    ("args", "kwargs", "words"),
    [
        (("roundrobin", ["a"]), {}, "did you mean 'round_robin'"),
        (("round_robin", ["a"]), {"interval": 0}, "at least 1"),
        (("round_robin", ["a"]), {"interval": 1.5}, "whole number"),
        (("concurrent", []), {}, "at least one"),
        (("concurrent", ["a", "a"]), {}, "named once"),
        (("concurrent", ["solver"]), {"frozen": ["solvr"]}, "did you mean 'solver'"),
        (("concurrent", ["a", "b"]), {"adapters": {"a": "x"}}, "'b' has no adapter"),
        (("concurrent", ["a", "b"]), {"adapters": {"a": "x", "b": "x"}, "frozen": ["a"]}, "shared by the frozen"),
    ],
)
def test_what_cannot_be_says_so(args, kwargs, words):
    with pytest.raises(ConfigError, match=words):
        make_schedule(*args, **kwargs)
