"""How many agents fit: measured memory by number of adapters, beside the estimate of `mafrt info --memory`."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import Any

import torch

from bench._gpu.models import add_adapter
from bench._gpu.speed import one_pass
from mafrt.config.train_config import LearnConfig
from mafrt.models.memory_estimate import MemoryInputs, ModelShape, adapter_weights, footprint
from mafrt.models.shared_base import SharedBase
from mafrt.training.optimizer_steps import make_optimizer_steps

TOKENS, LENGTH = 4096, 512


def agents_that_fit(base: SharedBase, shape: ModelShape, counts: Sequence[int]) -> dict[str, Any]:
    """Peak bytes of an update with each number of agents, the estimate's, and how many the device's memory holds."""
    if base.device.type != "cuda":
        return {"left out": "only a GPU tells the peak of its memory"}
    base.gradient_checkpointing(True)
    rows: list[dict[str, Any]] = []
    for count in sorted(counts):
        while len(base.adapters) < count:
            add_adapter(base, len(base.adapters))
        rows.append({"agents": count, "measured": _peak(base, count, shape), "estimate": _estimate(shape, base, count)})
    base.gradient_checkpointing(False)
    first, last = rows[0], rows[-1]
    each = (last["measured"] - first["measured"]) / (last["agents"] - first["agents"])
    total = torch.cuda.get_device_properties(base.device).total_memory
    fits = int(first["agents"] + (total - first["measured"]) / each)
    return {"by_agents": rows, "bytes_per_agent": round(each), "memory": total, "agents_that_fit": fits}


def _peak(base: SharedBase, count: int, shape: ModelShape) -> int:
    """Bytes at the peak of the second optimizer step in which every agent learns: the first has no moments yet."""
    gc.collect()  # models of earlier stages lie in circles of references
    steps = make_optimizer_steps(base, {name: LearnConfig() for name in base.adapters})
    ids = torch.randint(1, shape.vocabulary, (max(count, TOKENS // LENGTH), LENGTH), device=base.device)
    for _ in range(2):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        one_pass(base, ids, torch.arange(len(ids)) % count)
        for optimizer in steps.optimizers.values():
            optimizer.step()
    torch.cuda.synchronize()
    return int(torch.cuda.max_memory_allocated())


def _estimate(shape: ModelShape, base: SharedBase, count: int) -> int:
    bits = 8 * base.model.dtype.itemsize
    tokens = max(count, TOKENS // LENGTH) * LENGTH
    use = MemoryInputs(agents=count, bits=bits, micro_batch_tokens=tokens, rows=0)
    # The estimate holds a copy of the last good weights too, which only a whole run makes.
    spare = 4 * count * adapter_weights(shape, use)
    return int(footprint(shape, use).learning - spare)
