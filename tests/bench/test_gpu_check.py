"""The check for a machine with a GPU: its stages run here on a CPU, and a wrong device is noticed."""

from __future__ import annotations

import json
import multiprocessing

import pytest
import torch

from bench import _trl, gpu
from bench._gpu import measured, parity
from bench._gpu.roofline import Roofline
from bench._gpu.speed import step_bytes
from bench._gpu.stages import GpuStage, run_stages
from bench._measure import Disagreement
from mafrt.cpu.library import library
from mafrt.models.shared_base import SharedBase

pytestmark = pytest.mark.takes(slow=45)


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


def test_a_decode_step_reads_weights_and_caches():
    base = parity._base("cpu", torch.float32)
    alone, many = (step_bytes(base, parity.SMALL, rows, 100) for rows in (0, 10))
    weights = sum(p.numel() for name, p in base.model.named_parameters() if "lora" not in name and "norm" not in name)
    assert alone == 4 * weights
    assert many - alone == 10 * 100 * 2 * parity.SMALL.layers * parity.SMALL.kv_heads * parity.SMALL.head_dim * 4
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
