"""Best weights: kept, restored when the held-out score falls, and the same in a resumed run."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest
import torch
from helpers_learner import make_base, make_learner, weights
from toy import make

from mafrt.config.train_config import RunConfig
from mafrt.core.atomic_files import save_tensors
from mafrt.core.errors import CheckpointError
from mafrt.runners.evaluation import Evaluation
from mafrt.runners.held_out_guard import HeldOutGuard, has_fallen, task_scores


def evaluation(*sampled, greedy=()):
    return Evaluation(
        {str(n): (score, score) for n, score in enumerate(sampled)},
        {str(n): score for n, score in enumerate(greedy)},
        2,
        0,
    )


def make_guard(**settings):
    base = make_base()
    learner = make_learner(base)
    return base, learner, HeldOutGuard(base, ("ann", "bob"), learner, RunConfig(**settings))


def move(base):
    with torch.no_grad():
        for parameter in base.adapter_parameters("ann"):
            parameter.add_(1.0)


def test_task_scores_average_sampled_and_greedy():
    assert task_scores(evaluation(1.0, 0.5, greedy=(0.0, 1.0))) == {"0": 0.5, "1": 0.75}
    assert task_scores(evaluation(0.2)) == {"0": 0.2}


def test_a_fall_is_judged_by_paired_differences():
    best = {str(n): 0.5 for n in range(16)}
    # 8 of 16 fall by .5: mean -.25, deviation .258, error .065; 2.5 errors are .161.
    assert has_fallen(best, {task: 0.0 if int(task) % 2 else 0.5 for task in best})
    # 1 of 16: mean -.031, error .031.
    assert not has_fallen(best, {**best, "0": 0.0})
    assert not has_fallen({"0": 1.0}, {"0": 0.0})  # one task has no interval
    # All alike: the least deviation is .1, so the error is .025 and a fall by .05 is none.
    assert not has_fallen(best, dict.fromkeys(best, 0.45)) and has_fallen(best, dict.fromkeys(best, 0.4))


def test_best_weights_return_at_half_the_rate_and_the_run_stops_after_too_many_falls():
    base, learner, guard = make_guard(max_rollbacks=1)
    rate = learner.rate("ann", 0)
    assert guard.look(0, evaluation(*[0.5] * 16)) is None
    move(base)
    assert guard.look(2, evaluation(*[0.9] * 16)) is None and guard.iteration == 2
    best = weights(base, "ann")
    move(base)
    said = guard.look(4, evaluation(*[0.1] * 16))
    assert said is not None and "fell from 0.900 (iteration 2) to 0.100" in said
    assert all(torch.equal(a, b) for a, b in zip(best, weights(base, "ann"), strict=True))
    assert learner.rate("ann", 0) == rate / 2 and not guard.stops
    assert guard.look(6, evaluation(*[0.1] * 16)) and guard.stops


@pytest.mark.parametrize("choice, stops", [("warn", False), ("stop", True)])
def test_warn_and_stop(choice, stops):
    base, _, guard = make_guard(on_collapse=choice)
    guard.look(0, evaluation(*[0.9] * 16))
    move(base)
    moved = weights(base, "ann")
    assert guard.look(1, evaluation(*[0.1] * 16))
    same = all(torch.equal(a, b) for a, b in zip(moved, weights(base, "ann"), strict=True))
    assert same == (choice == "warn") and guard.stops == stops


def test_state_survives_a_checkpoint_and_a_foreign_one_is_refused(tmp_path):
    base, _, guard = make_guard()
    guard.look(0, evaluation(*[0.9] * 16))
    move(base)
    guard.look(1, evaluation(*[0.1] * 16))
    save_tensors(tmp_path / "best.pt", guard.state())
    _, other_learner, other = make_guard()
    other.load(tmp_path / "best.pt")
    assert (other.iteration, other.score, other.falls, other_learner.slowdown) == (0, pytest.approx(0.9), 1, 0.5)
    assert torch.equal(next(iter(other.weights["ann"].values())), next(iter(guard.weights["ann"].values())))
    other.load(tmp_path / "none.pt")
    assert other.falls == 1
    save_tensors(tmp_path / "bad.pt", {"weights": {"carl": {}}})
    with pytest.raises(CheckpointError, match="best weights of this team"):
        other.load(tmp_path / "bad.pt")


@pytest.mark.parametrize("place", ["adapter", "score", "rename"])
def test_a_full_disk_leaves_the_best_adapters_so_far(tmp_path, monkeypatch, place):
    base, _, guard = make_guard()
    guard.look(0, evaluation(*[0.1] * 16))
    guard.write(tmp_path)
    best = tmp_path / "best"
    before = {path: path.read_bytes() for path in best.rglob("*") if path.is_file()}
    move(base)
    guard.look(1, evaluation(*[0.9] * 16))

    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    replace, rename = os.replace, []
    with monkeypatch.context() as patch:
        if place == "adapter":
            patch.setattr("mafrt.models.peft_format.PeftFiles.save", full)
        elif place == "score":
            patch.setattr(Path, "write_text", full)
        else:
            # The second of the two renames, after the earlier folder was moved.
            patch.setattr(os, "replace", lambda *a: full() if rename.append(a) or len(rename) == 2 else replace(*a))
        with pytest.raises(CheckpointError, match=r"No space left on device.*make room"):
            guard.write(tmp_path)
    assert {path: path.read_bytes() for path in best.rglob("*") if path.is_file()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["best"]
    guard.write(tmp_path)
    assert json.loads((best / "best.json").read_text())["iteration"] == 1
    assert [path.name for path in tmp_path.iterdir()] == ["best"]


@pytest.mark.slow
def test_a_run_whose_adapters_are_destroyed_ends_with_its_best_weights(tmp_path):
    runner = make(
        tmp_path / "run", iterations=10, lr=5e-2, n_rollout_threads=32, eval_interval=8, eval_episodes=5, eval_samples=8
    )

    def destroy(progress):
        if progress.iteration == 9:
            with torch.no_grad():
                for name in ("first", "second"):
                    for parameter in runner.base.adapter_parameters(name):
                        parameter.zero_()
                    runner.base.bump(name)

    summary = runner.run(destroy)
    lines = [json.loads(line) for line in (tmp_path / "run/evaluations.jsonl").read_text().splitlines()]
    scores = [(line["eval/avg@8"] + line["eval/greedy"]) / 2 for line in lines]
    assert scores[1] > scores[0] + 0.1 and scores[2] < scores[1] - 0.1
    assert json.loads((tmp_path / "run/best/best.json").read_text()) == {
        "iteration": 8,
        "score": pytest.approx(scores[1]),
    }
    assert any(
        "fell from" in finding and "back at the weights of iteration 8" in finding for finding in summary.findings
    )
    runner.base.load_adapter("again", tmp_path / "run/best/first")
    ours, theirs = runner.base.adapter_state("first"), runner.base.adapter_state("again")
    assert all(torch.equal(ours[name], theirs[name]) for name in ours) and any(t.any() for t in ours.values())
    assert runner.updater.learner.slowdown == 0.5
