"""Learning rates: warm-up, then constant, linear or cosine; and scaled by how much of a batch teaches anything."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from mafrt.config.train_config import LearnConfig
from mafrt.core.types import Turn

LrSchedule = Callable[[int], float]
"""Iterations completed -> factor on the learning rates, from 0 to 1."""


def make_lr_schedule(learn: LearnConfig, iterations: int) -> LrSchedule:
    """The schedule of a run of `iterations` iterations. A pure function of the iteration, so resuming is exact.

    Warm-up rises in equal steps to 1. Then `linear` decays in equal steps and `cosine` along half a wave. Both reach 0
    one iteration after the last, so that the last iteration still learns.
    """
    warmup = learn.lr_warmup

    def factor(iteration: int) -> float:
        if iteration < warmup:
            return (iteration + 1) / (warmup + 1)
        gone = min(max(iteration - warmup, 0) / max(iterations - warmup, 1), 1.0)
        if learn.lr_schedule == "linear":
            return 1.0 - gone
        return (1.0 + math.cos(math.pi * gone)) / 2.0 if learn.lr_schedule == "cosine" else 1.0

    return factor


def make_entropy_schedule(learn: LearnConfig, iterations: int) -> LrSchedule:
    """Iterations completed -> factor on the weight of the entropy bonus; `linear` falls in equal steps to 0."""
    if learn.entropy_schedule == "constant":
        return lambda _: 1.0
    return lambda iteration: max(1.0 - iteration / max(iterations, 1), 0.0)


def signal_scale(turns: Sequence[Turn], owner: Callable[[Turn], str]) -> dict[str, float]:
    """Adapter -> factor on its learning rate: the root of the share of its turns that have a signal, in [0, 1].

    AdamW's step is as large for a batch with few such turns, and noisier; its learning rate goes with the square root
    of the batch size (Malladi 2022, 2205.10287), here of the turns that count.
    """
    counts: dict[str, list[int]] = {}
    for turn in turns:
        count = counts.setdefault(owner(turn), [0, 0])
        count[0] += turn.has_signal
        count[1] += 1
    return {name: math.sqrt(with_signal / total) for name, (with_signal, total) in counts.items()}
