"""One process of several, on the toy task of `toy.py`: started by `test_processes.py` with a job in JSON.

    {"layout": "ddp" | "fsdp" | "zero1" | "zero2" | "zero3", "timeout_s": 20, "out": FOLDER,
     "runs": [{"name": "a", "run_dir": PATH or null, "load_path": PATH or null, "settings": {...}}]}

A run may have a "layout" of its own.

Adapters of each run go to OUT/NAME.RANK.safetensors, and what was found out to OUT/RANK.json.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from helpers_models import tiny_base
from toy import Digits, settings

from mafrt.core.distributed import connect
from mafrt.runners.identity import Provenance
from mafrt.scripts.cli.run_main import run_main

CONFIGS = Path(__file__).parents[1] / "configs"


def main(words: Any) -> int:
    job = json.loads(words[0])
    torch.set_num_threads(1)
    processes = connect(cpu=True, timeout_s=job.get("timeout_s", 60))
    found: dict[str, Any] = {"rank": processes.rank}
    out = Path(job["out"])
    for run in job["runs"]:
        found[run["name"]] = one(run.get("layout", job["layout"]), run, processes, out)
    processes.close()
    found["threads"] = threads()
    (out / f"{processes.rank}.json").write_text(json.dumps(found))
    return 0


def threads() -> list[str]:
    """Names of this process's threads, those of libraries included."""
    return sorted(path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm"))


def one(layout: str, run: dict[str, Any], processes: Any, out: Path) -> dict[str, Any]:
    from safetensors.torch import save_file

    from mafrt.config.team import Team
    from mafrt.models.sharding import Root
    from mafrt.runners.build import spread
    from mafrt.runners.on_policy import OnPolicy
    from mafrt.storage.load_path import resolve
    from mafrt.training.deepspeed_config import read_zero

    config = settings(**run["settings"])
    zero = None
    if layout.startswith("zero"):
        zero = read_zero(CONFIGS / f"{layout}.json", config.learn, dtype=None, processes=processes.size)
        zero["zero_optimization"].pop("stage3_param_persistence_threshold", None)
        if layout == "zero3":
            zero["zero_optimization"]["stage3_param_persistence_threshold"] = 0
    base = tiny_base()
    numbers = sum(p.numel() for p in base.model.parameters())
    with mock.patch.object(Root, "to", autospec=True, side_effect=Root.to) as moves:
        spread(base, processes, zero, fsdp=layout == "fsdp")
    load = run.get("load_path")
    # Rank 1 is given another folder: nothing may ever appear there.
    where = (
        None if run.get("run_dir") is None else Path(run["run_dir"] + (f".{processes.rank}" if processes.rank else ""))
    )
    runner = OnPolicy(
        Digits(),
        Team.of(Digits.agents),
        base,
        config,
        run_dir=where,
        provenance=Provenance(resolve(load) if load else None),
    )
    summary = runner.run(lambda progress: print("iteration", progress.iteration, flush=True))
    state = {}
    for name in Digits.agents:
        state |= {f"{name}/{key}": value for key, value in base.adapter_state(name).items()}
    save_file(state, out / f"{run['name']}.{processes.rank}.safetensors")
    held = base.sharding.held() if base.sharding else numbers
    parts = runner.updater.learner.optimizers["first"].state.values()
    moments = sum(v.numel() for part in parts for v in part.values() if torch.is_tensor(v) and v.dim())
    return {
        "iterations": summary.iterations,
        "stopped_by": summary.stopped_by,
        "before": summary.before,
        "after": summary.after,
        "held": held,
        "numbers": numbers,
        "moments": moments,
        "moves": moves.call_count,
    }


if __name__ == "__main__":
    sys.exit(run_main(main, None))
