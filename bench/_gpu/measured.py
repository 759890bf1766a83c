"""What `modelled` counts on a pretended GPU, measured on a real one, beside it: the same work on the whole model."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from bench._gpu.modelled import Cost, learnt, played, update_bytes, update_size
from mafrt.models.memory_estimate import ModelShape
from mafrt.models.shared_base import SharedBase

WAITS = ("cudaStreamSynchronize", "cudaEventSynchronize")
LAUNCHES = ("cudaLaunchKernel", "cuLaunchKernel", "cudaGraphLaunch", "cudaMemcpyAsync", "cudaMemsetAsync")
"""beginnings of the names of calls"""


class ProfiledMeter:
    """Launches and waits by torch's profiler, bytes by its allocator."""

    def __init__(self) -> None:
        torch.cuda.synchronize()
        self.before, self.costs = torch.cuda.memory_allocated(), dict[str, Cost]()

    def __call__(self, name: str, work: Callable[[], Any]) -> Any:
        from torch.profiler import ProfilerActivity, profile

        torch.cuda.reset_peak_memory_stats()
        with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:
            done = work()
            torch.cuda.synchronize()
        events = profiler.events()
        kernels = sum(event.device_type == torch.autograd.DeviceType.CUDA for event in events)
        launched = sum(event.name.startswith(LAUNCHES) for event in events)
        waited = sum(event.name in WAITS for event in events)
        live, peak = torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()
        self.costs[name] = Cost(launched, kernels, waited, live - self.before, peak - self.before)
        return done


@functools.cache
def _modelled(name: str) -> dict[str, Any]:
    """What `mafrt bench gpu --pretend` prints, by a process without a GPU, in which none can be taken for the other."""
    command = [sys.executable, "-P", "-m", "mafrt.scripts.main", "bench", "gpu", "--pretend", "--models", name]
    done = subprocess.run(command, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""}, capture_output=True, text=True)
    if done.returncode:  # what was measured is not lost for it
        print(f"nothing modelled stands beside {name}: {done.stderr[-500:]}")
        return {"decoding": [], "updates": []}
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def beside_modelled(name: str, title: str, rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each measured row (`title`: "decoding" or "updates"), every number followed by the modelled one."""
    modelled = {row["K"]: row for row in _modelled(name)[title]}
    made = []
    for row in rows:
        other, both = modelled.get(row["K"], {}), dict[str, Any]()
        for key, value in row.items():
            both[key] = value
            if key in other and key not in ("model", "K", "tokens"):
                both[f"{key}, modelled"] = other[key]
        made.append(both)
    return made


def decode_rows(name: str, base: SharedBase, adapters: tuple[int, ...]) -> list[dict[str, Any]]:
    """The lines of `modelled.decode_row`, but for its speeds, which `speed.decode` measures."""
    rows = []
    for count in adapters:
        with torch.no_grad():
            costs = played(base, ProfiledMeter(), count, 16, 1024)
        step, first = costs["step"], costs["first step"]
        rows.append(
            {
                "model": name,
                "K": count,
                "launches": step.launches,
                "kernels": step.kernels,
                "waits": step.waits,
                "more in the first step": first.kernels - step.kernels,
                "GB beside the base": round(step.live / 1e9, 2),
                "GB at the peak of a join": round(costs["join"].peak / 1e9, 2),
            }
        )
    return beside_modelled(name, "decoding", rows)


def update_rows(name: str, base: SharedBase, shape: ModelShape, adapters: tuple[int, ...]) -> list[dict[str, Any]]:
    """The lines of `modelled.update_row`."""
    rows = []
    for count in adapters:
        cost = learnt(base, ProfiledMeter(), count, checkpointing=True, **update_size(count))["update"]
        tokens, formula = update_bytes(shape, count)
        rows.append(
            {
                "model": name,
                "K": count,
                "tokens": tokens,
                "launches": cost.launches,
                "waits": cost.waits,
                "peak, GB": round(cost.peak / 1e9, 2),
                "formula, GB": round(formula / 1e9, 2),
            }
        )
    return beside_modelled(name, "updates", rows)
