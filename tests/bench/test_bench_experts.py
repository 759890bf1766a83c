"""`mafrt bench experts` at a tiny size: it measures what agrees with PEFT, and nothing else."""

from __future__ import annotations

import pytest

from bench import _measure, experts
from mafrt.models import expert_lora

TINY = ["--width", "64", "--mlp", "16", "--layers", "1", "--experts", "4", "--chosen", "2", "--vocab", "64"]
SHORT = [*TINY, "--rounds", "1", "--clock", "cpu", "--tokens", "12", "--adapters", "1", "3"]

pytestmark = pytest.mark.usefixtures("same_threads")


@pytest.mark.nightly
@pytest.mark.slow
def test_a_team_on_experts_is_measured(capsys):
    rows = experts.run(SHORT)["rows"]
    assert [row["K"] for row in rows] == [1, 3]
    for row in rows:
        assert row["parity"] < 1e-3 and row["play_tokens_per_s"] > 0
        assert min(row[name]["median"] for name in ("play/bare", "learn/bare", "peft/learn")) > 0
    assert "K=3" in capsys.readouterr().out


@pytest.mark.nightly
@pytest.mark.slow
def test_experts_without_their_adapters_are_not_timed(monkeypatch):
    product = expert_lora._product

    def bare(module, name, layers, *rest):
        return product(module, name, {}, *rest)

    monkeypatch.setattr(expert_lora, "_product", bare)
    with pytest.raises(_measure.Disagreement):
        experts.run(SHORT)
