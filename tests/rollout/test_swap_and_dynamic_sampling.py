"""CORY's swap and DAPO's dynamic sampling in the loop: what moves, what travels, and exact resume across both."""

from __future__ import annotations

import json

import pytest
import torch
from helpers_runs import adapters, cut_and_resumed, metrics, same
from toy import make

from mafrt.config.team import Team
from mafrt.config.train_config import TrainConfig
from mafrt.core.errors import ConfigError
from mafrt.core.types import Episode
from mafrt.rollout.dynamic_sampling import resample
from mafrt.rollout.player import PlayStats
from mafrt.rollout.task_stream import TaskStream
from mafrt.runners.algorithm import resolve_rule

DUO = Team.of(["a", "b"])


# ------------------------------------------------------------------------------------------------------------- CORY


def test_roles_swap_every_five_iterations_unless_told_otherwise():
    def pioneers(**settings):
        plan = resolve_rule(TrainConfig.of(n_rollout_threads=8, algorithm="cory", **settings), DUO).schedule.plan
        return "".join(plan(i).adapters["a"] for i in range(12))

    assert pioneers() == "aaaaabbbbbaa"
    assert pioneers(agent_iteration_interval=2) == "aabbaabbaabb"


def test_marft_trains_each_agent_for_five_iterations_unless_told_otherwise():
    plan = resolve_rule(TrainConfig.of(n_rollout_threads=8, algorithm="marft"), DUO).schedule.plan
    assert [plan(i).agents for i in (0, 4, 5, 9, 10)] == [("a",), ("a",), ("b",), ("b",), ("a",)]


@pytest.mark.slow
def test_optimizer_state_travels_with_the_adapter():
    """After a swap, what `first` says moves adapter `second`, and does so with that adapter's own Adam moments."""
    runner = make(None, algorithm="cory", agent_iteration_interval=2, iterations=2, eval_episodes=0)
    runner.run()
    plan = runner.assign_adapters()
    assert runner.state.iteration == 2 and plan.adapters == {"first": "second", "second": "first"}
    from mafrt.core.signals import StopRequest

    runner.stop = StopRequest()
    episodes, _, _ = runner.collector.play(runner.state.iteration, runner.state.drawn)
    runner.updater.critic.annotate(episodes, {"first": 1.0, "second": 1.0}, values=True, reference=False)
    from mafrt import algorithms

    algorithms.assign(episodes, rule="cory", normalize_advantages="none")
    before, learner = adapters(runner), runner.updater.learner
    moments = {
        name: [{k: v.clone() for k, v in entry.items()} for entry in learner.optimizers[name].state.values()]
        for name in before
    }
    assert all(entry["step"] == 8 for entry in moments["second"])  # 2 iterations, 2 epochs, 2 mini-batches
    turns = [turn for episode in episodes for turn in episode.turns]
    learner.update(turns, ("first",), 2, adapter_of=plan.adapters)
    after = adapters(runner)
    assert same(before["first"], after["first"]) and not same(before["second"], after["second"])
    old, new = moments["second"], list(learner.optimizers["second"].state.values())
    # Second moments only grow or decay: v' >= beta2^4 v after 4 steps. Fresh ones would know nothing of v.
    assert all(entry["step"] == 12 for entry in new)
    for was, now in zip(old, new, strict=True):
        assert (now["exp_avg_sq"] >= 0.999**4 * was["exp_avg_sq"] * (1 - 1e-5)).all()
    untouched = list(learner.optimizers["first"].state.values())
    assert all(torch.equal(a["exp_avg"], b["exp_avg"]) for a, b in zip(moments["first"], untouched, strict=True))


@pytest.mark.slow
def test_a_run_resumed_across_a_swap_is_exact(tmp_path):
    whole, cut = cut_and_resumed(tmp_path, 2, algorithm="cory", agent_iteration_interval=3, iterations=5)
    assert whole == cut


# ------------------------------------------------------------------------------------------------------------- DAPO


def test_dapo_clips_higher_and_searches_unless_told_otherwise():
    def rule(**settings):
        return resolve_rule(TrainConfig.of(n_rollout_threads=8, n_samples=4, **settings), DUO)

    dapo = rule(algorithm="dapo", max_new_tokens=30)
    assert (dapo.settings.clip_param, dapo.settings.clip_high, dapo.sampling_rounds) == (0.2, 0.28, 3)
    assert dapo.context().token_limits == {"a": 30, "b": 30}
    assert rule(algorithm="dapo", clip_high=0.3, dynamic_sampling_rounds=0).sampling_rounds == 0
    assert rule(algorithm="dapo", overlong_buffer=0.0).settings.overlong_buffer == 0.0
    assert rule(algorithm="grpo").sampling_rounds == 0
    assert rule(algorithm="grpo", dynamic_sampling_rounds=2, overlong_buffer=0.5).settings.overlong_buffer == 0.5
    with pytest.raises(ConfigError, match="n_samples is 1"):
        resolve_rule(TrainConfig.of(algorithm="ppo", dynamic_sampling_rounds=1), DUO)


def test_groups_are_replaced_by_the_next_tasks_until_the_limit():
    """Draws 0 and 1 were played; even draws are flat. Group 0 is replaced by draw 2, which is flat too, that by 3."""
    starts = []

    def stream(tasks: int, drawn: int, dealt: int) -> TaskStream:
        return TaskStream(
            slots=tasks * 2, n_samples=2, turns=1, order=None, seed=1, iteration=1, drawn=drawn, rounds=dealt
        )

    def play(some: TaskStream):
        found = [some.next_start(slot, None) for slot in range(some.slots)]
        starts.extend(found)
        return [Episode(start.id, start.group) for start in found], PlayStats(tokens=10)

    def flat(episodes):
        return sorted({e.group for e in episodes if int(e.group[-1]) % 2 == 0})

    def run(rounds: int):
        first, stats = stream(2, 0, 0), PlayStats(tokens=10)
        episodes, _ = play(first)
        found = resample(
            episodes, stats, rounds=rounds, flat=flat, stream=stream, play=play,
            blocks=2, drawn=first.drawn, dealt=first.rounds,
        )  # fmt: skip
        ids = [e.id for e in found.episodes]
        assert len(set(ids)) == 4 and ids == sorted(ids)
        return sorted({e.group[-1] for e in found.episodes}), found.drawn, found.rounds, found.replaced, stats.tokens

    assert run(0) == (["0", "1"], 2, 0, 0, 10)
    assert run(1) == (["1", "2"], 3, 1, 1, 20)
    assert run(2) == (["1", "3"], 4, 2, 2, 30)
    assert run(9) == (["1", "3"], 4, 2, 2, 30)
    assert len({start.id for start in starts[-6:]}) == 6


@pytest.mark.slow
@pytest.mark.ci
def test_dynamic_sampling_resumes_exactly(tmp_path):
    # Short answers of a random base are mostly without a digit, so groups of two are mostly flat.
    settings = {"algorithm": "dapo", "n_samples": 2, "max_new_tokens": 2, "iterations": 4, "dynamic_sampling_rounds": 2}
    whole, cut = cut_and_resumed(tmp_path, 2, **settings)
    assert whole == cut
    lines = metrics(tmp_path / "whole")
    assert all(line["episodes"] == 16 for line in lines)
    assert sum(line["groups_replaced"] for line in lines) > 0
    drawn = json.loads((sorted((tmp_path / "whole").rglob("step_*4/state/run.json"))[0]).read_text())["drawn"]
    assert drawn == 4 * 8 + sum(line["groups_replaced"] for line in lines)


# ---------------------------------------------------------------------------------------- REINFORCE++ with a critic


@pytest.mark.slow
def test_reinforce_pp_trains_its_critic_only_if_it_is_asked_for(tmp_path):
    def run(folder: str, **settings) -> tuple[bool, bool, list[dict]]:
        runner = make(
            tmp_path / folder, algorithm="reinforce_pp", iterations=2, eval_episodes=0, n_samples=1, **settings
        )
        head = [p.detach().clone() for p in runner.updater.critic.head.parameters()]
        before = adapters(runner)
        runner.run()
        moved = any(not torch.equal(a, b) for a, b in zip(head, runner.updater.critic.head.parameters(), strict=True))
        after = adapters(runner)
        return moved, all(not same(before[name], after[name]) for name in before), metrics(tmp_path / folder)

    moved, learnt, told = run("with", critic=True)
    assert moved and learnt and all("value_loss" in line for line in told)
    moved, learnt, told = run("without")
    assert not moved and learnt and not any("value_loss" in line for line in told)
