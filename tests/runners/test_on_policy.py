"""The loop: it learns, repeats itself, stops and goes on exactly, and moves only whom the schedule names."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from helpers_models import tiny_base
from helpers_runs import adapters, hashes, same
from helpers_warm import WarmProcess, start_python
from toy import Digits, make, settings, train

from mafrt.config.agent import LoraSpec
from mafrt.config.team import AgentSpec, Team
from mafrt.core.errors import CheckpointError, ConfigError, EnvError, PromptTooLongError
from mafrt.core.types import StepResult
from mafrt.runners.build import place_adapters
from mafrt.runners.identity import Provenance
from mafrt.storage.load_path import LoadSource, resolve

pytestmark = pytest.mark.takes(slow=22)


@pytest.mark.slow
def test_it_learns_on_both_levels_and_the_files_are_there(tmp_path):
    for level, iterations in (("token", 14), ("action", 16)):
        run = tmp_path / level
        changes = {"normalization_mode": "token"} if level == "action" else {}
        changes |= {"level": level, "eval_interval": iterations // 2}
        summary = train(run, iterations=iterations, n_rollout_threads=32, lr=5e-2, **changes)
        assert summary.after["eval/avg@2"] > summary.before["eval/avg@2"] + 0.1, (level, summary)
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        assert [line["iteration"] for line in lines] == list(range(1, iterations + 1))
        found = [json.loads(line) for line in (run / "evaluations.jsonl").read_text().splitlines()]
        assert [(e["when"], e["iteration"]) for e in found] == [
            ("before", 0),
            ("during", iterations // 2),
            ("after", iterations),
        ]
        assert len((run / "episodes.jsonl").read_text().splitlines()) == iterations * 32
        assert (run / "args.yaml").is_file() and any((run / "tensorboard").iterdir())
        assert {"first", "second"} <= {p.name for p in resolve(run).path.iterdir()}


def test_an_adapter_goes_on_with_the_layers_that_its_run_began_with(tmp_path):
    """As where a later version adapts layers by default that it took for routers before."""
    old, team = tiny_base("llama"), Team((AgentSpec("a"),))
    old.add_adapter("a", LoraSpec(targets=("q_proj", "up_proj")), seed=0)
    old.save_adapter("a", tmp_path / "a")
    before = old.adapter_state("a")
    run = LoadSource("run", tmp_path, {"a": tmp_path / "a"}, None)
    for default, loads in ((LoraSpec(), True), (LoraSpec(rank=4), False), (LoraSpec(targets=("q_proj",)), False)):
        base = tiny_base("llama")
        place_adapters(base, team, default, 0, run)
        if loads:
            base.load_adapter("a", tmp_path / "a")
            after = base.adapter_state("a")
            assert before.keys() == after.keys() and all(map(torch.equal, before.values(), after.values()))
        else:  # what is asked for by name is no default
            with pytest.raises(CheckpointError, match="rank, alpha and targets"):
                base.load_adapter("a", tmp_path / "a")


@pytest.mark.slow
def test_with_everybody_frozen_nothing_rises_and_nothing_moves(tmp_path):
    runner = make(None, iterations=6, freeze=("all",))
    before = adapters(runner)
    summary = runner.run()
    assert summary.before == summary.after
    after = adapters(runner)
    assert all(same(before[name], after[name]) for name in before)


@pytest.mark.slow
def test_agent_by_agent_the_frozen_adapter_is_bit_identical_over_the_interval(tmp_path):
    runner = make(None, iterations=8, agent_iteration_interval=2)
    seen = [adapters(runner)]
    runner.run(lambda _: seen.append(adapters(runner)))
    for iteration, (old, new) in enumerate(pairwise(seen)):
        learner, frozen = ("first", "second") if iteration // 2 % 2 == 0 else ("second", "first")
        assert same(old[frozen], new[frozen]) and not same(old[learner], new[learner])


@pytest.mark.slow
def test_two_runs_with_one_seed_are_equal_and_another_seed_is_not(tmp_path):
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        train(tmp_path / name, seed=seed, iterations=2)
    assert hashes(tmp_path / "a") == hashes(tmp_path / "b")
    assert hashes(tmp_path / "a") != hashes(tmp_path / "c")


@pytest.mark.slow
@pytest.mark.parametrize("interval", [0, 3])
def test_a_run_stopped_by_a_signal_goes_on_exactly(tmp_path, interval):
    settings = {"iterations": 5, "eval_interval": 2, "agent_iteration_interval": interval}
    train(tmp_path / "whole", **settings)
    runner = make(tmp_path / "cut", **settings)
    summary = runner.run(lambda p: os.kill(os.getpid(), signal.SIGTERM) if p.iteration == 2 else None)
    assert summary.stopped_by == "SIGTERM" and summary.iterations == 2 and summary.after is None
    again = train(tmp_path / "cut", tmp_path / "cut", **settings)
    assert again.iterations == 5 and again.before == summary.before
    assert hashes(tmp_path / "cut") == hashes(tmp_path / "whole")


def iterations(run: Path) -> int:
    """Iterations that a run has written so far."""
    return (run / "metrics.jsonl").read_bytes().count(b"\n") if (run / "metrics.jsonl").exists() else 0


@pytest.mark.slow
@pytest.mark.ci
def test_killed_at_any_point_and_resumed_it_equals_the_run_that_was_not(tmp_path):
    def start(run: Path, load: str) -> WarmProcess:
        return start_python(Path(__file__).parents[1] / "toy.py", run, load, "8")

    whole = start(tmp_path / "whole", "-")
    began = time.monotonic()
    assert whole.wait(timeout=300) == 0, whole.stderr
    iteration_s = (time.monotonic() - began) / 8
    rng, cut, before = random.Random(7), tmp_path / "cut", tmp_path / "before"
    cut.mkdir()
    # Killed somewhere in the first iteration, and after so many iterations; checkpoints are written every second one.
    for done in (0, 3, 6, 7):
        later_s = iteration_s * rng.uniform(0, 1)
        shutil.copytree(cut, before)
        while True:
            process = start(cut, str(cut) if (cut / "args.yaml").exists() else "-")
            while process.poll() is None and (not (cut / "args.yaml").exists() or iterations(cut) < done):
                time.sleep(0.002)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=later_s)
            process.kill()
            if process.wait() != 0:
                assert process.wait() == -signal.SIGKILL, process.stderr
                break
            # It came to its end first, as the machine has more time than it had: once more, and sooner.
            later_s /= 2
            shutil.rmtree(cut)
            shutil.copytree(before, cut)
        shutil.rmtree(before)
    last = start(cut, str(cut))
    assert last.wait(timeout=300) == 0, last.stderr
    assert hashes(cut) == hashes(tmp_path / "whole")


@pytest.mark.slow
def test_a_folder_of_adapters_gives_initial_weights_and_the_critic(tmp_path):
    train(tmp_path / "old", iterations=4)
    start = tmp_path / "weights"
    newest = resolve(tmp_path / "old").path
    start.mkdir()
    for name in ("first", "second", "critic.pth"):
        (newest / name).rename(start / name)
    runner = make(tmp_path / "new", start, iterations=1)
    assert runner.state.iteration == 0
    assert any(p.abs().sum() > 0 for p in runner.base.adapter_parameters("first")[1::2])
    runner.run()
    assert json.loads((tmp_path / "new" / "metrics.jsonl").read_text().splitlines()[0])["iteration"] == 1


@pytest.mark.slow
def test_a_checkpoint_of_another_team_or_base_is_refused(tmp_path):
    train(tmp_path / "run", iterations=2)
    newest = resolve(tmp_path / "run").path
    run = json.loads((newest / "manifest.json").read_text())
    assert run["meta"]["team"] == ["first", "second"]
    from helpers_models import tiny_base

    from mafrt.config.team import Team
    from mafrt.runners.on_policy import OnPolicy

    class Others(Digits):
        agents = ("first", "third")

    others, resume = Team.of(["first", "third"]), resolve(tmp_path / "run")
    with pytest.raises(ConfigError, match=r"the team \(first, second, now first, third\)"):
        OnPolicy(Others(), others, tiny_base(), settings(), provenance=Provenance(resume))
    with pytest.raises(CheckpointError, match="third"):
        OnPolicy(Others(), others, tiny_base(), settings(), provenance=Provenance(resume, accept_changes=True))
    with pytest.raises(CheckpointError, match="another base"):
        other = tiny_base(seed=99)
        OnPolicy(
            Digits(), Team.of(["first", "second"]), other, settings(), provenance=Provenance(resolve(tmp_path / "run"))
        )


@pytest.mark.slow
def test_the_samplers_logprobs_are_the_trainers_at_the_first_update_for_every_turn():
    class Long(Digits):
        """`first` speaks again after `second`, so a later turn of an agent is covered."""

        def step(self, actions):
            result = super().step(actions)
            if result.terminated and self.step_count < 3:
                return StepResult({"first": self.word + self.said}, {}, False, False, {})
            return result if result.terminated else result._replace(terminated=self.step_count >= 2)

    from helpers_models import tiny_base

    from mafrt.config.team import Team
    from mafrt.runners.on_policy import OnPolicy

    runner = OnPolicy(Long(), Team.of(Long.agents), tiny_base(), settings(iterations=1, eval_episodes=0))
    with torch.no_grad():
        for name in ("first", "second"):
            for parameter in runner.base.adapter_parameters(name):
                parameter.add_(0.1 * torch.randn_like(parameter))
            runner.base.bump(name)
    from mafrt.core.signals import StopRequest

    runner.stop = StopRequest()
    episodes, _, _ = runner.collector.play(runner.state.iteration, runner.state.drawn)
    turns = [turn for episode in episodes for turn in episode.turns]
    assert max(turn.turn for turn in turns) >= 1
    runner.updater.learner.recompute_logprobs(turns)
    gaps = [abs(a - b) for turn in turns for a, b in zip(turn.logprobs, turn.old_logprobs, strict=True)]
    assert max(gaps) < 1e-4


def test_an_environment_that_always_breaks_ends_the_run_with_its_own_sentence(tmp_path):
    class Broken(Digits):
        def step(self, actions):
            raise KeyError("lost")

    from helpers_models import tiny_base

    from mafrt.config.team import Team
    from mafrt.runners.on_policy import OnPolicy

    runner = OnPolicy(Broken(), Team.of(Broken.agents), tiny_base(), settings(eval_episodes=0))
    with pytest.raises(EnvError, match=r"Broken\.step\(\)"):
        runner.run()


def test_freezing_somebody_who_is_not_there_names_the_nearest():
    with pytest.raises(ConfigError, match="first"):
        make(None, freeze=("frist",))


@pytest.mark.slow
def test_prompts_and_windows_that_cannot_work_are_refused_before_anything_is_sampled():
    with pytest.raises(PromptTooLongError, match="'ash' gives 'first' a prompt of"):
        make(None, context_window=20)
    with pytest.raises(ConfigError, match="up to 256"):
        make(None, context_window=1000)
    with pytest.raises(ConfigError, match="no second"):
        from helpers_models import tiny_base

        from mafrt.config.team import Team
        from mafrt.runners.on_policy import OnPolicy

        OnPolicy(Digits(), Team.of(["first"]), tiny_base(), settings())


@pytest.mark.slow
@pytest.mark.parametrize("still", ["first", "second"])
def test_happo_equals_mappo_when_the_others_do_not_move_and_differs_when_they_do(still):
    from helpers_models import tiny_base

    from mafrt.config.agent import AgentSpec
    from mafrt.config.team import Team
    from mafrt.runners.on_policy import OnPolicy

    def weights_after(algorithm, rates):
        team = Team(tuple(AgentSpec(name=name, lr=rates.get(name)) for name in Digits.agents))
        wanted = settings(algorithm=algorithm, iterations=2, num_mini_batch=1, eval_episodes=0)
        if algorithm == "mappo":  # with one advantage for a joint step, as HAPPO has it
            joint = {"joint_advantage": True, "normalize_advantages": "batch"}
            wanted = replace(wanted, algorithm=replace(wanted.algorithm, **joint))
        runner = OnPolicy(Digits(), team, tiny_base(), wanted)
        runner.run()
        return adapters(runner)

    def gap(rates):
        happo, mappo = (weights_after(name, rates) for name in ("happo", "mappo"))
        return max((a - b).abs().max().item() for n in happo for a, b in zip(happo[n], mappo[n], strict=True))

    assert gap({still: 1e-30}) < 1e-4
    assert gap({}) > 1e-3


@pytest.mark.slow
def test_an_environment_that_breaks_late_costs_nothing_that_was_learnt(tmp_path):
    class Late(Digits):
        bounded = True  # it reads a switch in this process
        broken = False

        def step(self, actions):
            if Late.broken:
                raise OSError("the game server is gone")
            return super().step(actions)

    from helpers_models import tiny_base

    from mafrt.config.team import Team
    from mafrt.runners.on_policy import OnPolicy

    wanted = settings(iterations=5, save_interval=0, eval_episodes=0)
    runner = OnPolicy(Late(), Team.of(Late.agents), tiny_base(), wanted, run_dir=tmp_path / "run")
    with pytest.raises(EnvError, match="the game server is gone"):
        runner.run(lambda p: setattr(Late, "broken", p.iteration == 3))
    assert resolve(tmp_path / "run").step == 3


def test_evaluations_may_have_a_temperature_of_their_own(monkeypatch):
    from mafrt.rollout.player import Player

    seen = []
    as_before = Player.sampling_as

    def noted(player, sampling):
        seen.append({name: how.temperature for name, how in sampling.items()})
        return as_before(player, sampling)

    monkeypatch.setattr(Player, "sampling_as", noted)
    runner = make(None, eval_temperature=0.6, temperature=0.9, eval_episodes=1, eval_samples=1)
    runner.evaluate()
    assert seen == [{"first": 0.6, "second": 0.6}, {"first": 0.0, "second": 0.0}]
    assert {how.temperature for how in runner.player.sampling.values()} == {0.9}
    with pytest.raises(ConfigError, match="eval_temperature is 0; choose a value above 0"):
        settings(eval_temperature=0)
