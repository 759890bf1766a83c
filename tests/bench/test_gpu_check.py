"""The check for a machine with a GPU: its stages run here on a CPU, and a wrong device is noticed."""

from __future__ import annotations

import json
import multiprocessing
from dataclasses import replace

import pytest
import torch
from helpers_warm import run_command

from bench import _trl, gpu
from bench._gpu import measured, modelled, models, parity
from bench._gpu.roofline import Roofline
from bench._gpu.speed import step_bytes
from bench._gpu.stages import GpuStage, run_stages
from bench._measure import Disagreement
from mafrt.cpu.library import library
from mafrt.models.shared_base import SharedBase


@pytest.mark.nightly
@pytest.mark.ci
@pytest.mark.slow
def test_every_stage_runs_on_a_cpu(tmp_path, capsys, monkeypatch):
    # TRL's process is a fork, which imports little again; in test_bench_costs.py the same is timed.
    fork = multiprocessing.get_context("fork")
    monkeypatch.setattr(_trl.multiprocessing, "get_context", lambda kind: fork)
    found = gpu.run(["--device", "cpu", "--small", "--minutes", "4", "--output", str(tmp_path / "found.json")])
    stages = found["stages"]
    assert {entry["state"] for entry in stages.values()} == {"ok"}
    assert json.loads((tmp_path / "found.json").read_text()) == stages
    assert stages["decode small"]["result"][1]["tokens_s"] > 0 and stages["limits"]["result"]["flop_s"] > 1e8
    assert "| K | rows | context |" in capsys.readouterr().out


def test_stages_that_fail_or_would_end_too_late_leave_the_others(tmp_path, capsys):
    stages = [
        GpuStage("first", 0, lambda: 1 / 0),
        GpuStage("long", 100, lambda: 1),
        GpuStage("last", 0, lambda: {"x": 2}),
    ]
    found = run_stages(stages, 0.5, tmp_path / "found.json")
    assert [entry["state"] for entry in found.values()] == ["failed", "left out", "ok"]
    assert found["first"]["why"] == "ZeroDivisionError: division by zero" and found["last"]["result"] == {"x": 2}
    assert json.loads((tmp_path / "found.json").read_text()) == found


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.skipif(library() is None, reason="needs a C compiler")
def test_a_device_that_computes_something_else_is_noticed(monkeypatch):
    real = SharedBase.token_logprobs
    monkeypatch.setattr(parity, "_decoders", lambda *args, **kwargs: 0.0)
    assert max(parity.check("cpu", (torch.float32,)).values()) < 1e-5

    def wrong(self, hidden, ids, *args, **kwargs):
        factor = 1.01 if self.compute.kernels(torch.float32) == "c" else 1.0
        return real(self, hidden * factor, ids, *args, **kwargs)

    monkeypatch.setattr(SharedBase, "token_logprobs", wrong)
    with pytest.raises(Disagreement, match="own form and reference, log-probs"):
        parity.check("cpu", (torch.float32,))


@pytest.mark.parametrize("name", ["small", "qwen3.5-0.8b"])
def test_a_decode_step_reads_weights_and_caches(name):
    shape = replace(
        models.of_periods(models.NAMES[name], 1), vocabulary=1024, hidden=64, inner=128, state_keys=64, state_values=64,
        state_heads=4, state_rows=16 if models.NAMES[name].recurrent else 0,
    )  # fmt: skip
    base = models.random_base(shape, 1, device="cpu", dtype=torch.float32)
    alone, many, longer = (step_bytes(shape, *size, 4) for size in ((0, 100), (10, 100), (10, 200)))
    small = ("norm", "conv1d", "A_log", "dt_bias")
    named = base.model.named_parameters()
    weights = sum(p.numel() for path, p in named if "lora" not in path and not any(word in path for word in small))
    assert alone == 4 * weights
    kinds = getattr(base.config, "layer_types", ["full_attention"] * shape.layers)
    keys = 10 * 100 * 2 * kinds.count("full_attention") * shape.kv_heads * shape.head_dim * 4
    states = kinds.count("linear_attention") * 4 * 16 * 16 * 4 * 10
    assert longer - many == keys and many - alone == keys + 2 * states
    assert Roofline(1.0, 2.0).bytes_s == 1.0


def test_measured_rows_stand_beside_the_modelled_ones(monkeypatch):
    modelled = {
        "decoding": [{"model": "small", "K": 1, "waits": 2, "roofline": 9}, {"model": "small", "K": 4, "waits": 3}]
    }
    monkeypatch.setattr(measured, "_modelled", lambda name: modelled)
    rows = [{"model": "small", "K": 4, "waits": 5}, {"model": "small", "K": 16, "waits": 6}]
    assert measured.beside_modelled("small", "decoding", rows) == [
        {"model": "small", "K": 4, "waits": 5, "waits, modelled": 3},
        {"model": "small", "K": 16, "waits": 6},
    ]


@pytest.mark.nightly
@pytest.mark.ci
@pytest.mark.slow
def test_a_model_with_recurrent_states_is_counted_on_a_pretended_gpu():
    row = modelled.decode_row("qwen3.5-0.8b", 2, rows=4, context=64)
    assert row["waits"] == 1 and row["launches"] < 1900
    assert 0 < row["tokens/s"] <= row["roofline"]
    assert modelled.update_row("qwen3.5-0.8b", 2)["waits"] <= 20


@pytest.mark.nightly
@pytest.mark.slow
def test_what_was_measured_stays_where_nothing_can_be_modelled(capsys, monkeypatch):
    # A fork in place of an interpreter, which needs no word (-P) on where it looks for modules.
    monkeypatch.setattr(measured.subprocess, "run", lambda words, **how: run_command([words[0], *words[2:]], **how))
    rows = [{"model": "no such model", "K": 4, "waits": 5}]
    assert measured.beside_modelled("no such model", "updates", rows) == rows
    assert "no such model" in capsys.readouterr().out
