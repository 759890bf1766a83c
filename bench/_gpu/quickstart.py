"""The quickstart on a device: does the shipped team learn there too?"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from mafrt.scripts import train_math

EVERY_STAGE = (
    *("--config", "configs/quickstart_math.yaml", "--algorithm", "ppo", "--kl_coef", "0.01", "--async_steps", "1"),
    *("--n_rollout_threads", "16", "--eval_interval", "2", "--eval_episodes", "8", "--save_interval", "2"),
)


def every_stage(device: str) -> dict[str, Any]:
    """Four iterations with critic, KL, play in the background, evaluations and checkpoints, and the last two resumed.

    Returns the largest difference of the resumed run's weights from the whole run's, and their largest change.
    """
    with tempfile.TemporaryDirectory() as folder:
        whole, resumed = Path(folder) / "whole", Path(folder) / "resumed"
        words = [*EVERY_STAGE, "--device", device, "--iterations", "4"]
        for run, more in ((whole, []), (resumed, ["--load_path", str(whole / "checkpoints/step_000002")])):
            if status := train_math.main([*words, "--run_dir", str(run), *more]):
                raise AssertionError(f"train_math ended with status {status}")
        ends = [_weights(run / "checkpoints/step_000004") for run in (whole, resumed)]
        middle = _weights(whole / "checkpoints/step_000002")
        apart, moved = (float((other - ends[0]).abs().max()) for other in (ends[1], middle))
        if not apart <= moved / 2:
            raise AssertionError(f"the resumed run's weights are {apart:.1e} apart, of a change of {moved:.1e}")
        return {"resumed apart": apart, "moved": moved}


def _weights(folder: Path) -> Tensor:
    files = sorted(folder.glob("*/adapter_model.safetensors"))
    tables = [load_file(file) for file in files]
    return torch.cat([table[name].flatten().float() for table in tables for name in sorted(table)])


def learn(device: str, iterations: int, episodes: int) -> dict[str, Any]:
    """Held-out scores before and after; raises AssertionError where a team that should have learnt has not."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        words = ["--config", "configs/quickstart_math.yaml", "--device", device, "--iterations", str(iterations)]
        words += ["--eval_episodes", str(episodes), "--run_dir", str(run)]
        status = train_math.main(words)
        if status:
            raise AssertionError(f"train_math ended with status {status}")
        summary: dict[str, Any] = json.loads((run / "summary.json").read_text(encoding="utf-8"))
    return summary
