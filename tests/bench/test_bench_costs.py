"""`mafrt bench memory`, `prefix` and `resume` at tiny sizes: parity holds, the counts are right, tables are whole."""

from __future__ import annotations

import multiprocessing
import time
from dataclasses import replace

import pytest
import torch
from helpers_warm import run_command

from bench import _measure, _trl, growth, handover, iteration, memory, prefix, resume, rollout, update
from bench._trl import Trl, Work
from mafrt.core.errors import ConfigError, ModelError
from mafrt.engines.local.engine import LocalEngine
from mafrt.engines.vllm import in_process
from mafrt.scripts.bench import names

TINY = ["--width", "64", "--mlp", "64", "--layers", "1", "--rounds", "1", "--clock", "cpu"]

pytestmark = pytest.mark.usefixtures("same_threads")


def test_they_are_listed():
    assert {"memory", "prefix", "resume", "turns"} <= set(names())


@pytest.mark.nightly
@pytest.mark.slow
def test_prefix_agrees_with_row_by_row_and_fits_a_slope(capsys):
    found = prefix.run(["--answers", "1", "8", "--prompt", "20", "--answer", "3", *TINY])
    assert [(row["part"], row["n"]) for row in found["rows"]] == [
        ("update", 1),
        ("update", 8),
        ("turns", 8),
        ("rollout", 1),
        ("rollout", 8),
    ]
    assert all(0.0 <= row["parity"] <= 1e-4 for row in found["rows"])
    assert set(found["bars"]) == {
        *(f"{part} at n=8: rows / shared >= 2.5" for part in ("update", "rollout")),
        *(f"{part}: rows / shared >= .8 of the tokens saved" for part in ("update", "turns")),
    }
    turns = found["rows"][2]
    # Prompts of 20 tokens, and 3 for every answer before.
    assert (turns["tokens"], turns["computed"]) == (8 * 20 + 3 * 36, 20 + 8 * 3)
    assert set(found["seconds_per_answer"]["update"]) == set(prefix.UPDATES)
    assert capsys.readouterr().out.count("\n| update |") == 2


@pytest.mark.nightly
@pytest.mark.slow
def test_memory_is_that_of_the_adapters_and_flat_beside_them(capsys):
    shape = ["--rows", "16", "--tokens", "8", "--scored", "1024", "--hidden", "8", "--vocabularies", "64", "30000"]
    found = memory.run(["--adapters", "1", "16", *shape, *TINY])
    one, many = found["adapters"]
    assert many["K"] == 16 and many["ranks"] == [2, 4, 8, 16] and many["parity"] <= 1e-5
    # Ranks are 8, 2, 16, 4 in turn: 30 for four adapters. Weights, gradients and two moments are 16 bytes each, and
    # a step counter of 4 bytes belongs to each of the 14 tensors.
    parameters = (one["held"] - 14 * 4) // 16
    assert one["held"] == 16 * parameters + 14 * 4
    assert many["held"] == 16 * parameters * (16 // 4 * 30) // 8 + 16 * 14 * 4
    small, large = found["vocabularies"]
    # All logits of 1,024 tokens at least, against chunks of 2^22 / 30,000 = 139 tokens.
    assert large["full"] >= 4 * 1024 * 30000 and large["share"] <= 0.3 < small["share"]
    assert found["bars"] == {
        "rest at the largest K <= 1.15 of the smallest": many["rest"] <= 1.15 * one["rest"],
        "chunked <= .3 of full at the largest vocabulary": True,
    }
    assert "| 30,000 | 1,024 |" in capsys.readouterr().out


def test_the_peak_of_a_call_is_counted():
    def call():
        first = torch.empty(1000)
        del first
        return torch.empty(500), torch.empty(700)

    assert memory.peak_bytes(call, "cpu") == 4 * 1200


@pytest.mark.nightly
@pytest.mark.ci
@pytest.mark.slow
def test_resume_is_checked_before_it_is_timed(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(resume.subprocess, "run", run_command)  # what a cold start takes is no matter here
    arguments = ["--adapters", "2", "--rank", "2", "--rows", "2", "--tokens", "3", "--rounds", "1"]
    found = resume.run([*arguments, "--folder", str(tmp_path)])
    (row,) = found["rows"]
    assert row["checkpoint_mib"] > 0 and row["resume_s"]["median"] > 0 and row["cold_resume_s"]["median"] > 0
    assert list(tmp_path.iterdir()) == [] and "| 2 |" in capsys.readouterr().out
    monkeypatch.setattr(resume.Training, "restore", lambda self, path: None)
    with pytest.raises(_measure.Disagreement, match="resumed"):
        resume.run([*arguments, "--folder", str(tmp_path)])


def test_more_adapters_than_rows_are_refused():
    with pytest.raises(ConfigError, match="ound 65 adapters for 64 rows"):
        memory.run(["--adapters", "65"])


@pytest.mark.parametrize("bench", [iteration, update])
def test_a_number_format_that_there_is_not_is_refused(bench):
    with pytest.raises(ConfigError, match="choose from"):
        bench.run(["--dtype", "float17"])


def test_a_table_for_markdown():
    assert _measure.markdown(["a", "b"], [[1, "x"]]) == "| a | b |\n| --- | --- |\n| 1 | x |"


@pytest.mark.parametrize("text", ["0", "-4", "many", "1.5", "9" * 5000])
def test_counts_of_a_bench_are_whole_and_positive(text):
    with pytest.raises(ConfigError, match="expected a whole number of at least 1") as error:
        growth.run(["--agents", "1", text])
    assert len(str(error.value)) < 4000


ONE_STEP = ["--adapters", "1", "--prompts", "1", "--samples", "2", "--tokens", "3", "--rounds", "1", "--warmup", "1"]


@pytest.fixture
def forked(monkeypatch):
    """The rival's process is a fork, which imports little again, and knows what a test has changed."""
    context = multiprocessing.get_context("fork")
    monkeypatch.setattr(_trl.multiprocessing, "get_context", lambda kind: context)


@pytest.mark.nightly
@pytest.mark.ci
@pytest.mark.slow
def test_an_iteration_against_trl_is_checked_and_timed(forked, tmp_path, monkeypatch):
    pytest.importorskip("trl")
    monkeypatch.chdir(tmp_path)
    (row,) = iteration.run(ONE_STEP)["rows"]
    assert row["trl_s"] > 0 and row["ours_s"] > row["play_s"] > 0 and row["trl/ours per agent"]["median"] > 0


def test_an_error_of_the_rival_is_told(forked, monkeypatch):
    def refuses(pipe, work):
        raise ValueError("a group of one answer")

    monkeypatch.setattr(_trl, "_make_trainer", refuses)
    args = iteration._parser().parse_args(ONE_STEP)
    with pytest.raises(RuntimeError, match="TRL's trainer failed: ValueError: a group of one answer"):
        Trl(Work(args, [[{"role": "user", "content": "1 + 1"}]], iteration.reward, 1e-6, 1))


@pytest.mark.parametrize("bench", [iteration, resume, rollout])
def test_a_base_that_cannot_be_had_is_one_sentence(bench, monkeypatch):
    for name in ("https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(ModelError, match="cannot be loaded: the model hub cannot be reached"):
        bench.run(["--model", "nowhere/at-all"])


class _Beside:
    """Stands in for vLLM: samples with the adapters that were handed over last, which it keeps as copies."""

    def __init__(self, base, config, *, window):
        assert config.engine == "vllm" and window >= 6
        self.base, self.given = base, 0
        self.closed = False
        _Beside.made = self

    def hand_over(self, requests):
        self.given += len({request.adapter for request in requests})
        time.sleep(0.02)

    def generate(self, requests):
        return LocalEngine(self.base, eos_ids=()).generate(requests)

    def close(self):
        self.closed = True


class _Deaf(_Beside):
    def generate(self, requests):
        return LocalEngine(self.base, eos_ids=()).generate([replace(request, adapter=None) for request in requests])


@pytest.mark.nightly
@pytest.mark.slow
def test_the_hand_over_is_timed_apart_and_is_part_of_the_iteration(monkeypatch, capsys):
    monkeypatch.setattr(in_process, "VllmEngine", _Beside)
    arguments = ["--adapters", "2", "--rank", "2", "--answers", "2", "--tokens", "3", "--rounds", "2"]
    found = handover.run(arguments)
    (row,) = found["rows"]
    assert row["answers"] == 4 and row["parity"] < 1e-3
    assert _Beside.made.closed and _Beside.made.given == 2 * 4  # two adapters, two rounds before and two timed
    parts = [row[f"{name}_s"]["median"] for name in ("hand_over", "play", "learn")]
    assert parts[0] >= 0.02 and row["iteration_s"]["median"] == pytest.approx(sum(parts), rel=0.2)
    share = row["hand_over/iteration"]["median"]
    assert found["bars"] == {"hand-over <= .05 iteration": share <= 0.05}
    assert "| 2 | 4 |" in capsys.readouterr().out
    monkeypatch.setattr(in_process, "VllmEngine", _Deaf)
    with pytest.raises(ModelError, match="vLLM"):
        handover.run(arguments)
    assert _Deaf.made.closed
