"""Stratified order: exact proportions over an epoch, no task twice in a batch, a pure function of seed and draw."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from toy import Digits

from mafrt.core.errors import ConfigError
from mafrt.rollout.stratified_order import StratifiedOrder, strata_of
from mafrt.rollout.task_stream import TaskStream


@given(st.lists(st.sampled_from("abc"), min_size=1, max_size=24), st.integers(0, 5), st.integers(1, 30))
@settings(max_examples=60, deadline=None)
def test_every_window_holds_different_tasks_and_its_share_of_each_stratum(strata, seed, apart):
    order = StratifiedOrder(strata, seed, apart)
    n = len(strata)
    drawn = [order(draw) for draw in range(5 * n)]
    for epoch in range(5):
        assert sorted(drawn[epoch * n : (epoch + 1) * n]) == list(range(n))
    width = min(apart, n)
    sizes = Counter(strata)
    for start in range(len(drawn) - width + 1):
        window = drawn[start : start + width]
        assert len(set(window)) == width
        seen = Counter(strata[task] for task in window)
        for stratum, size in sizes.items():
            # A stratum lies within half a step of its even places; at either end of a window that may cost one.
            assert abs(seen[stratum] - width * size / n) < 2


def test_proportions_of_an_epoch_are_exact_and_of_a_fitting_batch_too():
    strata = ["classification"] * 6 + ["regression"] * 6
    order = StratifiedOrder(strata, 1, 4)
    for batch in range(9):
        drawn = [order(batch * 4 + i) for i in range(4)]
        assert Counter(strata[task] for task in drawn) == {"classification": 2, "regression": 2}


def test_epochs_differ_where_they_may_and_the_seed_decides():
    strata = ["a"] * 10 + ["b"] * 10
    one, other = StratifiedOrder(strata, 1, 4), StratifiedOrder(strata, 2, 4)
    first, second = [one(i) for i in range(20)], [one(i) for i in range(20, 40)]
    assert first != second
    assert first != [other(i) for i in range(20)]


def test_it_is_a_function_of_the_draw_alone():
    strata = ["a", "b", "b", "a", "b"]
    straight = StratifiedOrder(strata, 7, 2)
    expected = [straight(draw) for draw in range(50)]
    jumping = StratifiedOrder(strata, 7, 2)
    assert [jumping(draw) for draw in (49, 3, 17)] == [expected[49], expected[3], expected[17]]


def test_a_batch_larger_than_the_tasks_holds_each_as_evenly_as_can_be():
    order = StratifiedOrder(["a", "b", "a"], 0, 8)
    for batch in range(6):
        counts = Counter(order(batch * 8 + i) for i in range(8))
        assert sorted(counts.values()) == [2, 3, 3]


def test_a_stream_deals_the_order():
    order = StratifiedOrder(["a", "a", "b", "b"], 3, 2)
    stream = TaskStream(slots=4, n_samples=2, turns=1, order=order, seed=3, iteration=1, drawn=6)
    starts = [stream.next_start(slot, None) for slot in range(4)]
    assert [start.task for start in starts] == [order(6), order(6), order(7), order(7)]
    assert stream.drawn == 8


@dataclass
class One:
    id: str
    meta: dict


def test_strata_come_from_the_records():
    env = SimpleNamespace(tasks=[One("x", {"kind": 1}), One("y", {"kind": "b"})], num_tasks=2)
    assert strata_of(env, "kind") == ["1", "b"]
    env.tasks[1].meta = {"level": 2}
    with pytest.raises(ConfigError, match="the record of task y lacks; it has level"):
        strata_of(env, "kind")
    with pytest.raises(ConfigError, match="Digits has no tasks with records"):
        strata_of(Digits(), "kind")
