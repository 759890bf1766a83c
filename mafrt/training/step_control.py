"""Size of an optimizer step: how much of the batch teaches anything, and how far a step may move the policy.

AdamW divides a gradient by its own running size, so a batch in which three of four groups have no spread makes as
large a step as a full one, with fewer turns to average the noise over. For such optimizers the learning rate goes with
the square root of the batch size (Malladi 2022, 2205.10287); `signal_scale` applies that to the turns that count.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mafrt.algorithms import Algorithm
from mafrt.core.seeding import permutation
from mafrt.core.types import Turn
from mafrt.training.policy_objective import Objective, PolicyLoss

if TYPE_CHECKING:
    from mafrt.training.policy_objective import Loss

PROBE_TURNS = 64
"""most turns per adapter on which a step's KL is measured"""
TRIES = 8


def has_signal(turn: Turn) -> bool:
    """Whether any token of the turn has an advantage other than 0."""
    return any(turn.advantages or ())


def zero_means_no_gradient(loss: Loss, objective: Objective, kl_coefs: Sequence[float]) -> bool:
    """Whether a turn with advantages of 0 has a gradient of 0, so that its forward and backward pass can be left out.

    True for the clipped policy loss without entropy bonus and without KL in the loss. A policy loss of one's own may
    have other terms.
    """
    rules = (objective.settings, *objective.own.values())
    stock = all(type(rule).policy_loss is Algorithm.policy_loss for rule in rules)
    return type(loss) is PolicyLoss and stock and not objective.uses_entropy and not any(kl_coefs)


def signal_scale(turns: Sequence[Turn], owner: Callable[[Turn], str]) -> dict[str, float]:
    """Adapter -> square root of the share of its turns that have a signal, in [0, 1]."""
    counts: dict[str, list[int]] = {}
    for turn in turns:
        count = counts.setdefault(owner(turn), [0, 0])
        count[0] += has_signal(turn)
        count[1] += 1
    return {name: math.sqrt(with_signal / total) for name, (with_signal, total) in counts.items()}


def probe(turns: Sequence[Turn], seed: int, iteration: int) -> list[Turn]:
    """Turns on which the size of a step is measured: those without a gradient first, since no step was fitted to them.

    At most `PROBE_TURNS`; a pure function of its arguments.
    """
    order = permutation(len(turns), seed, iteration, "probe")
    chosen = sorted(order, key=lambda place: has_signal(turns[place]))[:PROBE_TURNS]
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


def scaled_rates(
    rates: Mapping[str, float], turns: Sequence[Turn], owner: Callable[[Turn], str], follow: bool
) -> dict[str, float]:
    """Learning rate of each adapter for a step on `turns`; `follow`: scaled by the signal."""
    if not follow:
        return dict(rates)
    scales = signal_scale(turns, owner)
    return {name: rate * scales.get(name, 1.0) for name, rate in rates.items()}
