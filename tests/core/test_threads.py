"""The number of threads is measured, repeatable, and given up when other work makes threads wait."""

from __future__ import annotations

import os

import pytest
import torch

from mafrt.core import threads
from mafrt.core.threads import ThreadWatch, candidates, choose_threads, cores, fastest, speed, wait_passively


@pytest.fixture(autouse=True)
def restored(monkeypatch):
    before = torch.get_num_threads()
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    yield
    torch.set_num_threads(before)


def test_what_is_asked_for_wins_then_the_environment_then_the_run(monkeypatch):
    assert choose_threads(3, 2).threads == torch.get_num_threads() == 3
    monkeypatch.setattr(threads, "cores", lambda: 4)
    assert choose_threads(None, 2).threads == torch.get_num_threads() == 2
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
    assert choose_threads(None, 2) == threads.ThreadChoice(1, "OMP_NUM_THREADS")


def test_a_recorded_number_that_the_machine_does_not_have_is_measured_anew(monkeypatch):
    monkeypatch.setattr(threads, "cores", lambda: 2)
    monkeypatch.setattr(threads, "speed", {1: 100.0, 2: 150.0}.__getitem__)
    assert choose_threads(None, 64).threads == 2
    monkeypatch.setattr(threads, "speed", {1: 1100.0, 2: 14.0}.__getitem__)
    assert choose_threads().threads == torch.get_num_threads() == 1


def test_more_threads_need_a_gain():
    assert fastest({1: 100, 2: 105, 4: 300, 8: 310}) == 4
    assert fastest({1: 100, 2: 105}) == 1
    assert [candidates(n) for n in (1, 2, 6, 8)] == [[1], [1, 2], [1, 2, 4, 6], [1, 2, 4, 8]]


def test_a_measurement_leaves_the_number_as_it_was():
    torch.set_num_threads(2)
    assert speed(1) > 0 and torch.get_num_threads() == 2 and cores() >= 1


def test_a_collapse_is_noticed_and_one_thread_is_taken():
    torch.set_num_threads(2)
    watch = ThreadWatch(patience=2)
    assert watch.look((1100.0, 14.0)) is None and watch.look((1100.0, 1000.0)) is None  # once is chance
    assert watch.look((1100.0, 14.0)) is None
    assert "2 threads were slower than one" in watch.look((1100.0, 14.0))
    assert torch.get_num_threads() == 1 and watch.look() is None


def test_threads_that_wait_sleep_unless_the_user_says_otherwise(monkeypatch):
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        monkeypatch.delenv(name, raising=False)
    wait_passively()
    assert os.environ["OMP_WAIT_POLICY"] == "PASSIVE"
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    wait_passively()
    assert os.environ["OMP_WAIT_POLICY"] == "ACTIVE"
