"""How far a step may move the policy: the KL of a finished step, measured on a probe, and scaled back to a limit."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from mafrt.core.seeding import permutation
from mafrt.core.types import Turn

PROBE_TURNS = 64
"""most turns per adapter on which a step's KL is measured"""
TRIES = 8


def probe(turns: Sequence[Turn], seed: int, iteration: int) -> list[Turn]:
    """Turns on which the size of a step is measured: those without a gradient first, since no step was fitted to them.

    At most `PROBE_TURNS`; a pure function of its arguments.
    """
    order = permutation(len(turns), seed, iteration, "probe")
    chosen = sorted(order, key=lambda place: turns[place].has_signal)[:PROBE_TURNS]
    return [turns[place] for place in sorted(chosen)]


def step_kl(before: Sequence[Sequence[float]], after: Sequence[Sequence[float]]) -> float:
    """KL(policy before, policy after) in nats per token, by the k3 estimator on samples of the policy before.

    Args:
        before: log-probabilities of each turn's action tokens under the policy that sampled them.
        after: the same under the policy after the step.
    """
    # In float64: after a small step the terms are differences of nearly equal numbers.
    old = torch.tensor([value for row in before for value in row], dtype=torch.float64)
    new = torch.tensor([value for row in after for value in row], dtype=torch.float64)
    # A ratio of e^10 already says that the step was far too large, and its term stays finite.
    gap = (new - old).clamp(-10, 10)
    return float((gap.exp() - 1 - gap).mean()) if len(gap) else 0.0


@torch.no_grad()
def shrink(
    parameters: Sequence[Tensor], before: Sequence[Tensor], measure: Callable[[], float], limit: float
) -> tuple[float, float]:
    """Scale a step back until `measure()` is at most `limit`.

    KL grows with the square of a small step, which gives the next scale; after `TRIES` tries the step is undone.

    Returns:
        (KL of the step as it is now, share of the step that was kept, in [0, 1]).
    """
    whole = [now - was for now, was in zip(parameters, before, strict=True)]
    scale, kl = 1.0, measure()
    for _ in range(TRIES):
        if kl <= limit:
            return kl, scale
        # At least a tenth less, so that the tries come to an end; at most down to a tenth, since the square holds for
        # small steps only.
        scale *= min(0.9, max(0.1, 0.9 * math.sqrt(limit / kl)))
        for parameter, was, step in zip(parameters, before, whole, strict=True):
            parameter.copy_(was + scale * step)
        kl = measure()
    if kl <= limit:
        return kl, scale
    for parameter, was in zip(parameters, before, strict=True):
        parameter.copy_(was)
    # Measured again: `measure` also tells the base that the weights have changed back.
    return measure(), 0.0
