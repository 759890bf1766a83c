"""Offline losses: preferences (DPO) and imitation of recorded answers (SFT).

As in `mafrt.algorithms.losses`, each is a *sum* over the entries given, divided by a `denominator` that the caller
computes once for the mini-batch of an adapter, so micro-batches add up to the same gradient; entries that are not
finite are masked before anything is computed from them, counted (`nonfinite`), and stay in the denominator.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mafrt.algorithms.losses import Stats, blank, check_denominator, finite


def dpo_loss(
    chosen: Tensor,
    rejected: Tensor,
    ref_chosen: Tensor,
    ref_rejected: Tensor,
    *,
    beta: float,
    denominator: float,
) -> tuple[Tensor, Stats]:
    """Direct preference optimisation (Rafailov 2023, 2305.18290, equation 7).

        r(y) = beta * (log pi(y) - log pi_ref(y))
        L = -sum_k log sigmoid(r(chosen_k) - r(rejected_k)) / denominator

    Args:
        chosen: [p] log-probability of each pair's chosen answer, summed over its tokens; differentiable.
        rejected: [p] the same of the rejected answer.
        ref_chosen: [p] under the reference, without gradient.
        ref_rejected: [p].
        beta: weight of the log-ratios, above 0; larger values keep the policy closer to the reference.
        denominator: pairs of the adapter in the whole mini-batch.

    Returns:
        the loss, and sums `count`, `accuracy` (pairs with r(chosen) > r(rejected); a tie, as before the first step,
        does not count), `margin` (of the two r), `chosen_reward`, `rejected_reward` and `nonfinite`.

    Raises:
        ValueError: `beta` or `denominator` is not above 0.
    """
    if not beta > 0.0:
        raise ValueError(f"beta is {beta}; expected a number above 0.")
    check_denominator(denominator)
    good = finite(chosen, rejected, ref_chosen, ref_rejected)
    better = beta * (blank(chosen, good) - blank(ref_chosen, good))
    worse = beta * (blank(rejected, good) - blank(ref_rejected, good))
    margin = better - worse
    terms = blank(-torch.nn.functional.logsigmoid(margin), good)
    with torch.no_grad():
        stats = {
            "count": good.sum(),
            "accuracy": ((margin > 0) & good).sum(),
            "margin": margin.sum(),
            "chosen_reward": better.sum(),
            "rejected_reward": worse.sum(),
            "nonfinite": (~good).sum(),
        }
    return terms.sum() / denominator, stats


def sft_loss(logprobs: Tensor, *, denominator: float) -> tuple[Tensor, Stats]:
    """Negative log-likelihood of answers: L = -sum_t log pi(a_t) / denominator, over action tokens [n] alone.

    `denominator` is the number of the adapter's action tokens in the whole mini-batch: every token counts alike, so a
    long answer weighs more than a short one (as in TRL and `transformers`). Sums: `count` (tokens), `nonfinite`.
    Raises ValueError for a denominator that is not above 0.
    """
    check_denominator(denominator)
    good = finite(logprobs)
    stats = {"count": good.sum(), "nonfinite": (~good).sum()}
    return -blank(logprobs, good).sum() / denominator, stats
