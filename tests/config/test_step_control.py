"""The size of a step: turns without a signal, the learning rate that follows it, and the limit on its KL."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from helpers_learner import CONFIG, make_base, make_learner, make_turns, weights

from mafrt.training import learner as learner_module
from mafrt.training.lr_schedule import signal_scale
from mafrt.training.step_control import probe, shrink, step_kl

FIXED = replace(CONFIG, lr_follows_signal=False)


def flatten(turns, places):
    for place in places:
        turns[place].advantages = [0.0] * len(turns[place].action_ids)
    return turns


def sampled_by(base, learner, turns):
    """The turns with the log-probabilities of the adapters as they are, as an engine would have recorded them."""
    for turn, values in zip(turns, learner.logprobs(turns), strict=True):
        turn.logprobs = values
    return turns


def test_turns_without_signal_need_no_pass_and_change_no_weight(monkeypatch):
    found, passes = {}, {}
    for skip in (True, False):
        base = make_base()
        learner = make_learner(base, FIXED)
        turns = flatten(make_turns(), (0, 2, 3, 5))
        if not skip:
            monkeypatch.setattr(learner_module, "zero_means_no_gradient", lambda *_: False)
        read = []
        original = learner._collate
        monkeypatch.setattr(learner, "_collate", lambda rows, cast, f=original, r=read: r.extend(rows) or f(rows, cast))
        learner.update(turns, ["ann", "bob"], 0)
        found[skip], passes[skip] = [weights(base, name) for name in ("ann", "bob")], len(read)
    assert passes == {True: 5, False: 9}
    for ours, theirs in zip(found[True], found[False], strict=True):
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-5)


def test_with_an_entropy_bonus_every_turn_is_read(monkeypatch):
    base = make_base()
    learner, read = make_learner(base, FIXED, entropy_coef=0.1), []
    original = learner._collate
    monkeypatch.setattr(learner, "_collate", lambda rows, cast: read.extend(rows) or original(rows, cast))
    learner.update(flatten(make_turns(), (0, 2)), ["ann", "bob"], 0)
    assert len(read) == 9


def test_a_flat_batch_changes_nothing():
    base = make_base()
    before = weights(base, "ann")
    metrics = make_learner(base).update(flatten(make_turns(), range(9)), ["ann", "bob"], 0)
    assert all(torch.equal(a, b) for a, b in zip(before, weights(base, "ann"), strict=True))
    assert metrics["skipped_updates"] == 0


def test_the_learning_rate_follows_the_signal():
    turns = [turn for turn in make_turns(12) if turn.agent == "ann"]  # 8 of 12: every third is bob's
    assert len(turns) == 8
    flatten(turns, range(2, 8))  # 2 of 8 turns have a signal: sqrt(.25) = .5
    assert signal_scale(turns, lambda turn: turn.agent) == {"ann": 0.5}
    rates = {}
    for config in (CONFIG, FIXED):
        learner = make_learner(make_base(), config)
        learner.update(turns, ["ann"], 0)
        rates[config.lr_follows_signal] = learner.optimizers["ann"].param_groups[0]["lr"]
    assert rates == {True: 0.005, False: 0.01}


def test_step_kl_by_hand():
    # d = ln 2 and -ln 2 in log space: k3 = 2 - 1 - ln 2 and 1/2 - 1 + ln 2; their mean is .25.
    ln2 = 0.6931471805599453
    assert step_kl([[-2.0, -1.0]], [[-2.0 + ln2, -1.0 - ln2]]) == pytest.approx(0.25)
    assert step_kl([], []) == 0.0


def test_shrink_halves_a_step_by_its_square():
    # KL = x^2 with a step of 1 and a limit of .25: the first try .9 * .5 = .45, whose square is below.
    x, before = torch.tensor([1.0]), torch.tensor([0.0])
    kl, kept = shrink([x], [before], lambda: float(x**2), 0.25)
    assert (kl, kept) == (pytest.approx(0.2025), pytest.approx(0.45)) and x.item() == pytest.approx(0.45)
    kl, kept = shrink([x], [before], lambda: 9.0, 0.25)  # never small enough: undone
    assert kept == 0.0 and x.item() == 0.0


@pytest.mark.parametrize("limit", [None, 0.01])
def test_an_update_keeps_to_its_limit(limit):
    base = make_base()
    learner = make_learner(base, replace(FIXED, lr=0.1, step_kl=limit))
    turns = sampled_by(base, learner, make_turns())
    old = [turn.logprobs for turn in turns]
    metrics = learner.update(turns, ["ann", "bob"], 0)
    by_agent = {
        name: step_kl(
            [row for row, turn in zip(old, turns, strict=True) if turn.agent == name],
            learner.logprobs([turn for turn in turns if turn.agent == name]),
        )
        for name in ("ann", "bob")
    }
    if limit is None:
        assert min(by_agent.values()) > 0.02 and "step_kl/ann" not in metrics
    else:
        for name, kl in by_agent.items():
            assert kl == pytest.approx(metrics[f"step_kl/{name}"], rel=1e-3) and 0 < kl <= limit
            assert 0 < metrics[f"step_kept/{name}"] < 1


def test_the_probe_takes_turns_without_a_gradient_first():
    turns = flatten(make_turns(90), range(60))
    chosen = probe(turns, 1, 2)
    assert len(chosen) == 64 and sum(turn.has_signal for turn in chosen) == 4
    assert chosen == probe(turns, 1, 2)
