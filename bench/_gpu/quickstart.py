"""The quickstart on a device: does the shipped team learn there too?"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from mafrt.scripts import train_math


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
