"""The quickstart's own command, shortened: a team that learns gets better, a frozen one does not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from mafrt.scripts import train_math

pytestmark = pytest.mark.takes(slow=22)

CONFIG = Path(__file__).parents[2] / "configs" / "quickstart_math.yaml"
SHORT = ["--config", str(CONFIG), "--eval_episodes", "48", "--eval_samples", "1"]
KEYS = {"before", "after", "greedy_before", "greedy_after", "train_seconds", "seed"}


def run(folder: Path, *flags: str) -> dict:
    torch.set_num_threads(1)
    assert train_math.main([*SHORT, "--run_dir", str(folder), *flags]) == 0
    summary = json.loads((folder / "summary.json").read_text())
    assert set(summary) >= KEYS
    return summary


@pytest.mark.nightly
@pytest.mark.slow
def test_the_team_gets_better_within_seven_iterations(tmp_path):
    summary = run(tmp_path / "run", "--iterations", "7", "--seed", "2")
    assert summary["before"] <= 0.55 and summary["seed"] == 2
    assert summary["after"] >= 0.8 and summary["greedy_after"] >= 0.8


@pytest.mark.slow
@pytest.mark.ci
def test_with_every_agent_frozen_the_same_command_shows_no_rise(tmp_path):
    summary = run(tmp_path / "run", "--iterations", "2", "--n_rollout_threads", "16", "--freeze", "all")
    assert summary["after"] == summary["before"] and summary["greedy_after"] == summary["greedy_before"]
