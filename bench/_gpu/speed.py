"""Decoding and updates of real dimensions, as shares of the device's measured limits.

A decode step has to read every weight once and each row's keys and values; an update computes 2 FLOP a weight and token
forward, and as much backward, since the base is frozen and only the gradients of the activations pass through it.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch

from bench._gpu.roofline import Roofline, best_time
from bench._measure import synchronize
from mafrt.core.types import Request, SamplingParams
from mafrt.engines.local.engine import LocalEngine
from mafrt.models.memory_estimate import ModelShape
from mafrt.models.shared_base import SharedBase


def decode(
    base: SharedBase,
    shape: ModelShape,
    limit: Roofline,
    *,
    adapters: Iterable[int],
    rows: Iterable[int],
    contexts: Iterable[int],
    steps: int,
) -> list[dict[str, Any]]:
    """Tokens/s of the local engine over K adapters, rows and context, with the bare base beside each."""
    engine = LocalEngine(base, eos_ids=())
    device, number, measured = str(base.device), base.model.dtype.itemsize, []
    for context in contexts:
        for count in rows:
            for k in (0, *adapters):
                requests = _requests(shape, context, count, k, steps)
                first = best_time(partial(engine.generate, _shortened(requests)), device, 2)
                whole = best_time(partial(engine.generate, requests), device, 2)
                step = max((whole - first) / (steps - 1), 1e-9)
                measured.append(
                    {
                        "K": k,
                        "rows": count,
                        "context": context,
                        "prefill_s": round(first, 4),
                        "step_ms": round(1000 * step, 3),
                        "tokens_s": round(count / step),
                        "share_of_bytes_s": round(step_bytes(shape, count, context, number) / step / limit.bytes_s, 3),
                    }
                )
    return measured


def step_bytes(shape: ModelShape, rows: int, context: int, number: int) -> float:
    """Bytes that one decode step cannot avoid to move, for weights of `number` bytes.

    Weights, keys and values are read; the states of a gated delta rule, float32, are read and written.
    """
    weights = shape.block_weights + shape.vocabulary * shape.hidden
    attending = 2.0 * rows * context * (shape.layers - shape.recurrent) * shape.kv_heads * shape.head_dim
    return number * (weights + attending) + 2 * 4.0 * rows * shape.recurrent * shape.state_rows * shape.state_values


def _requests(shape: ModelShape, context: int, rows: int, adapters: int, steps: int) -> list[Request]:
    rng, sampling = random.Random(context), SamplingParams(max_new_tokens=steps, temperature=1.0)
    made = []
    for row in range(rows):
        prompt = [rng.randrange(1, shape.vocabulary) for _ in range(context)]
        made.append(Request(prompt, f"agent{row % adapters}" if adapters else None, sampling, seed=row))
    return made


def _shortened(requests: Sequence[Request]) -> list[Request]:
    """The same, one token each: the time of the prompts."""
    one = SamplingParams(max_new_tokens=1, temperature=1.0)
    return [Request(r.prompt_ids, r.adapter, one, r.seed) for r in requests]


def update(
    base: SharedBase,
    shape: ModelShape,
    limit: Roofline,
    *,
    adapters: Iterable[int],
    tokens: Iterable[int],
    length: int = 512,
) -> list[dict[str, Any]]:
    """Seconds of a forward and backward pass with log-probabilities, by tokens per adapter."""
    device, measured = str(base.device), []
    base.gradient_checkpointing(True)
    for count in adapters:
        for each in tokens:
            rows = max(1, each // length) * count
            ids = torch.randint(1, shape.vocabulary, (rows, min(length, each)), device=base.device)
            index = torch.arange(rows) % count
            seconds = best_time(partial(one_pass, base, ids, index), device, 2)
            amount = ids.numel()
            # Checkpointing computes the blocks' forward pass twice.
            flop = 2.0 * amount * (3 * shape.block_weights + 2 * shape.vocabulary * shape.hidden)
            measured.append(
                {
                    "K": count,
                    "tokens_per_adapter": each,
                    "seconds": round(seconds, 4),
                    "tokens_s": round(amount / seconds),
                    "share_of_flop_s": round(flop / seconds / limit.flop_s, 3),
                }
            )
    base.gradient_checkpointing(False)
    return measured


def one_pass(base: SharedBase, ids: torch.Tensor, index: torch.Tensor) -> None:
    for name in base.adapters:
        for parameter in base.adapter_parameters(name):
            parameter.grad = None
    hidden = base.forward(ids, None, index)
    logprobs, _ = base.token_logprobs(hidden[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), entropy_grad=False)
    logprobs.sum().backward()


def kernels(base: SharedBase, shape: ModelShape, most: int = 12) -> dict[str, list[dict[str, Any]]]:
    """The kernels that take the most time in a decode of 8 rows and in an update of 2,048 tokens."""
    from torch.profiler import ProfilerActivity, profile

    cuda = base.device.type == "cuda"
    engine, requests = LocalEngine(base, eos_ids=()), _requests(shape, 64, 8, min(4, len(base.adapters)), 16)
    ids = torch.randint(1, shape.vocabulary, (4, 512), device=base.device)
    index, slowest = torch.arange(4) % len(base.adapters), {}
    for name, call in (("decode", lambda: engine.generate(requests)), ("update", lambda: one_pass(base, ids, index))):
        call()
        started = time.perf_counter()
        with profile(activities=[ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU]) as profiler:
            call()
            synchronize(str(base.device))
        wall = time.perf_counter() - started
        time_of = "self_device_time_total" if cuda else "self_cpu_time_total"
        events = sorted(profiler.key_averages(), key=lambda event: -getattr(event, time_of))
        busy = sum(getattr(event, time_of) for event in events) / 1e6
        slowest[name] = [{"kernel": "all", "ms": round(1000 * busy, 2), "of_wall": round(busy / wall, 3)}] + [
            {"kernel": event.key[:80], "calls": event.count, "ms": round(getattr(event, time_of) / 1000, 2)}
            for event in events[:most]
        ]
    return slowest
