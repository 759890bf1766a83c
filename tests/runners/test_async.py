"""Sampling one step ahead: what is stale and by how much, that it is corrected for, resumed exactly, and learns."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers_models import tiny_base
from helpers_runs import hashes
from toy import Digits, make, settings, train

from mafrt.config.team import Team
from mafrt.core.atomic_files import load_tensors
from mafrt.core.errors import ConfigError, EnvError, ModelError
from mafrt.runners.async_rollout import check_async
from mafrt.runners.on_policy import OnPolicy
from mafrt.storage.load_path import resolve

pytestmark = pytest.mark.takes(slow=9)

TEAM = Team.of(Digits.agents)
SHORT = {"eval_episodes": 0, "save_interval": 0, "async_steps": 1}


def lines(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_a_batch_is_sampled_by_the_weights_that_the_iteration_before_began_with(tmp_path):
    runner = make(tmp_path / "run", iterations=4, ppo_epoch=2, num_mini_batch=2, **SHORT)
    began: list[dict[str, list[torch.Tensor]]] = []
    seen: list[list] = []
    learn = runner.updater.value

    def watched(episodes, *rest):
        names = runner.team.adapters
        began.append({name: [p.detach().clone() for p in runner.base.adapter_parameters(name)] for name in names})
        seen.append([turn for episode in episodes for turn in episode.turns])
        return learn(episodes, *rest)

    runner.updater.value = watched
    runner.run()
    # Four optimizer steps an iteration; the first batch is the only one that nothing has overtaken.
    assert [{turn.adapter_version for turn in turns} for turns in seen] == [{0}, {0}, {4}, {8}]
    assert [line["staleness/first"] for line in lines(tmp_path / "run")] == [0, 4, 4, 4]
    for number, turns in enumerate(seen[1:], 1):
        with torch.no_grad():
            for name, weights in began[number - 1].items():
                for parameter, value in zip(runner.base.adapter_parameters(name), weights, strict=True):
                    parameter.copy_(value)
                runner.base.bump(name)
        for turn, found in zip(turns, runner.updater.learner.logprobs(turns), strict=True):
            assert turn.logprobs == pytest.approx(found, abs=1e-4)
            assert turn.old_logprobs is not None and turn.old_logprobs != pytest.approx(found, abs=1e-4)
    weights = [line["importance_weight_mean/first"] for line in lines(tmp_path / "run")]
    assert weights[0] == pytest.approx(1.0, abs=1e-4) and all(w != pytest.approx(1.0, abs=1e-5) for w in weights[1:])


@pytest.mark.nightly
@pytest.mark.slow
def test_it_learns_as_in_turn(tmp_path):
    # In turn, with the same seed: .106 -> .308 at 5e-2, where stale samples are too far off to learn from.
    changes = {"iterations": 28, "n_rollout_threads": 32, "lr": 2e-2, "level": "action", "async_steps": 1}
    summary = train(tmp_path / "run", **changes)
    assert summary.after["eval/avg@2"] > summary.before["eval/avg@2"] + 0.1


@pytest.mark.slow
def test_two_runs_are_equal_and_a_stopped_one_goes_on_exactly(tmp_path):
    changes = {"iterations": 5, "eval_interval": 2, "async_steps": 1, "save_interval": 2, "keep_last": 9}
    train(tmp_path / "whole", **changes)
    runner = make(tmp_path / "cut", **changes)
    assert (
        runner.run(lambda p: os.kill(os.getpid(), signal.SIGTERM) if p.iteration == 3 else None).stopped_by == "SIGTERM"
    )
    copies = load_tensors(resolve(tmp_path / "cut").state("ahead.pt"))
    assert copies["first"]["version"] < runner.base.versions["first"]
    train(tmp_path / "cut", tmp_path / "cut", **changes)
    assert hashes(tmp_path / "cut") == hashes(tmp_path / "whole")
    again = train(
        tmp_path / "turned", tmp_path / "cut" / "checkpoints" / "step_000004", **{**changes, "async_steps": 0}
    )
    assert again.iterations == 5  # the copies are left behind, and it goes on in turn


@pytest.mark.slow
def test_a_run_that_has_ended_goes_on_as_a_longer_one(tmp_path):
    changes = {"eval_episodes": 0, "async_steps": 1, "save_interval": 1, "n_rollout_threads": 4}
    train(tmp_path / "whole", iterations=3, **changes)
    train(tmp_path / "part", iterations=2, **changes)
    train(tmp_path / "part", tmp_path / "part", iterations=3, **changes)
    for file in ("checkpoints/step_000003/first/adapter_model.safetensors", "metrics.jsonl", "episodes.jsonl"):
        assert (tmp_path / "part" / file).read_bytes() == (tmp_path / "whole" / file).read_bytes()


@pytest.mark.slow
def test_what_goes_wrong_while_playing_ahead_is_raised_and_keeps_what_was_learnt(tmp_path):
    class Late(Digits):
        bounded = True  # it reads a switch in this process
        broken = False

        def step(self, actions):
            if Late.broken:
                raise OSError("the game server is gone")
            return super().step(actions)

    wanted = settings(iterations=6, **SHORT)
    runner = OnPolicy(Late(), Team.of(Late.agents), tiny_base(), wanted, run_dir=tmp_path / "run")
    with pytest.raises(EnvError, match="the game server is gone"):
        runner.run(lambda p: setattr(Late, "broken", p.iteration == 3))
    assert resolve(tmp_path / "run").step in (3, 4)


@pytest.mark.slow
def test_what_goes_wrong_while_learning_leaves_nobody_playing(tmp_path):
    class Slow(Digits):
        def step(self, actions):
            time.sleep(0.05)
            return super().step(actions)

    runner = OnPolicy(Slow(), Team.of(Slow.agents), tiny_base(), settings(iterations=6, **SHORT), run_dir=tmp_path)
    learn = runner.updater.value

    def fail(*batch):
        if runner.state.iteration == 2:
            raise ModelError("nothing is finite")
        return learn(*batch)

    runner.updater.value = fail
    with pytest.raises(ModelError, match="nothing is finite"):
        runner.run()
    assert not any(thread.name == "sampler" for thread in threading.enumerate())


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"top_p": 0.9}, "top_p or top_k"),
        ({"importance_cap": None}, "importance_cap is none"),
        ({"engine": "vllm"}, "vLLM in this process sleeps"),
        ({"coach": "rules", "coach_feedback": True}, "coach_feedback"),
    ],
)
def test_what_cannot_go_on_side_by_side_is_refused(changes, said):
    with pytest.raises(ConfigError, match=said):
        check_async(settings(async_steps=1, **changes), TEAM, sharded=False)
    check_async(settings(**changes), TEAM, sharded=True)


@pytest.mark.parametrize("cut", [{"top_p": 0.9}, {"top_k": 5}])
def test_an_agent_that_samples_from_a_cut_support_of_its_own_is_refused_too(cut):
    first, second = TEAM.agents
    team = Team((first, replace(second, **cut)))
    with pytest.raises(ConfigError, match="top_p or top_k cut the distribution of 'second'"):
        check_async(settings(async_steps=1), team, sharded=False)
    alone = Team((first, replace(second, top_p=1.0, top_k=0)))
    with pytest.raises(ConfigError, match="distribution of 'first'"):
        check_async(settings(async_steps=1, **cut), alone, sharded=False)


def test_the_script_refuses_before_anything_is_loaded(tmp_path, monkeypatch, capsys):
    from mafrt.models.shared_base import SharedBase
    from mafrt.scripts import train_math

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(SharedBase, "load", lambda *_, **__: pytest.fail("a model was loaded"))
    assert train_math.main(["--async_steps", "1", "--top_p", "0.9"]) == 2
    assert "top_p or top_k" in capsys.readouterr().err and list(tmp_path.iterdir()) == []


def test_a_sharded_base_and_more_steps_are_refused():
    with pytest.raises(ConfigError, match="the base is sharded"):
        check_async(settings(async_steps=1), TEAM, sharded=True)
    with pytest.raises(ConfigError, match="async_steps is 2; choose 0, or 1"):
        settings(async_steps=2)
