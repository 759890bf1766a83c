"""Losses as pure functions on flat tensors: one entry per action token of the learner's turns, padding left out.

Every loss is a *sum* over the entries given, divided by a `denominator` that the caller computes once for the global
batch. So a batch may be split into micro-batches or over processes in any way, and the gradients add up to the same;
at action level a turn must stay whole within its micro-batch.

Entries whose inputs are not finite are masked before anything is computed from them, so that neither they nor a
0 * NaN reach a gradient, and are counted (`nonfinite`). They stay in the denominator, since whether one is bad is not
known globally in advance. At action level one bad token takes its whole turn out.

Statistics are detached 0-d tensors holding sums (or a maximum); `mean_stats` merges those of all micro-batches.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from mafrt.config.algorithm_groups import PolicyLossSettings

Stats = dict[str, Tensor]


@dataclass(frozen=True)
class PolicyTerms:
    """Inputs of the policy loss: the action tokens of one adapter in one micro-batch, `[n]` each."""

    logprobs: Tensor
    """under the current weights, differentiable"""
    old_logprobs: Tensor
    """under the weights before the update"""
    advantages: Tensor
    denominator: float
    """tokens (or turns at action level) of the adapter in the whole mini-batch"""
    turn: Tensor
    """number of each token's turn, long"""
    words: Tensor
    """words of each token's turn, long"""
    weights: Tensor | None = None
    """factors without gradient: truncated importance weights, HAPPO's M"""
    ref_logprobs: Tensor | None = None
    """under the base without adapter; None without a reference"""


MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to +- this before exp, as in verl: e^20 is far outside every clip, and still finite."""


def policy_loss(terms: PolicyTerms, settings: PolicyLossSettings) -> tuple[Tensor, Stats]:
    """Clipped policy gradient loss.

        L = -sum_k w_k * min(rho_k * A_k, clip(rho_k, 1 - clip_param, 1 + clip_high) * A_k) / denominator

    `level="token"`: k runs over tokens, rho = exp(logprob - old). `level="action"`: k runs over turns,
    rho = exp(sum of the turn's log-ratios / m), m = 1 (`normalization_mode="sum"`), the turn's tokens (`"token"`) or
    its words (`"word"`, TWOSOME, 2401.14151); a turn's tokens share advantage and weight. `dual_clip=c` bounds the loss
    of a term with A < 0 by -c * A (Ye 2020, 1912.09729). The denominator may be a constant (Dr. GRPO).

    Returns the loss, and sums over the terms, among them `clipped` (where the clip cuts the gradient off) and
    `approx_kl` (rho - 1 - log rho, Schulman's k3 of the old against the new policy).
    """
    check_denominator(terms.denominator)
    log_ratio, advantage, weight, good = _by_action(terms, settings)
    # Clamped before exp: an infinite ratio would turn the masked terms' zeros into NaN gradients.
    log_ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio = log_ratio.exp()
    plain = -advantage * ratio
    high = settings.clip_param if settings.clip_high is None else settings.clip_high
    clipped = -advantage * ratio.clamp(1.0 - settings.clip_param, 1.0 + high)
    # The pessimistic bound: a term is clipped only where that lowers the objective.
    losses = torch.maximum(plain, clipped)
    if settings.dual_clip is not None:
        # Without it, a large ratio with a negative advantage has an unbounded loss.
        losses = torch.where(advantage < 0, torch.minimum(losses, -settings.dual_clip * advantage), losses)
    if weight is not None:
        # Weights correct the sampling distribution; a gradient through them would change the policy to fit them.
        losses = losses * weight.detach()
    with torch.no_grad():
        stats = {
            "count": good.sum(),
            "clipped": ((clipped > plain) & good).sum(),
            "approx_kl": blank(ratio - 1.0 - log_ratio, good).sum(),
            "ratio": blank(ratio, good).sum(),
            # A zero is appended because max() of an empty tensor raises.
            "ratio_max": torch.cat([blank(ratio, good), ratio.new_zeros(1)]).max(),
            "nonfinite": (~good).sum(),
        }
    return blank(losses, good).sum() / terms.denominator, stats


def _by_action(terms: PolicyTerms, settings: PolicyLossSettings) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """Log-ratio, advantage, weight and mask of finite entries, [n] tokens or, at action level, [turns]."""
    good = finite(terms.logprobs, terms.old_logprobs, terms.advantages, terms.weights)
    log_ratio = blank(terms.logprobs, good) - blank(terms.old_logprobs, good)
    advantage = blank(terms.advantages, good)
    weight = None if terms.weights is None else blank(terms.weights, good)
    if settings.level == "token":
        return log_ratio, advantage, weight, good
    turn, first, tokens = _turns(terms.turn)
    # One bad token makes the turn's ratio unknown, so the whole turn is masked.
    whole = torch.zeros_like(tokens).index_add(0, turn, (~good).long()) == 0
    log_ratio = torch.zeros_like(tokens, dtype=log_ratio.dtype).index_add(0, turn, log_ratio)
    if settings.normalization_mode == "word":
        log_ratio = log_ratio / terms.words[first].clamp(min=1)  # an answer of punctuation alone has no words
    elif settings.normalization_mode != "sum":
        log_ratio = log_ratio / tokens
    weight = None if weight is None else blank(weight[first], whole)
    return blank(log_ratio, whole), blank(advantage[first], whole), weight, whole


def value_loss(
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    *,
    denominator: float,
    clip: float | None = None,
    huber_delta: float | None = None,
) -> tuple[Tensor, Stats]:
    """Squared or Huber error of the critic, optionally clipped around the old values (PPO, as in baselines).

        l(e) = e^2 / 2, or delta * (|e| - delta / 2) where |e| > delta
        L = sum max(l(v - R), l(old + clamp(v - old, -clip, clip) - R)) / denominator

    All tensors are [n], one entry per step of the rule (a token, or a turn). Sums: `count`, `clipped`, `error`
    (squared, unclipped), `nonfinite`.
    """
    check_denominator(denominator)
    good = finite(values, old_values, returns)
    value, old, target = blank(values, good), blank(old_values, good), blank(returns, good)

    def error(e: Tensor) -> Tensor:
        square = 0.5 * e * e
        if huber_delta is None:
            return square
        return torch.where(e.abs() <= huber_delta, square, huber_delta * (e.abs() - 0.5 * huber_delta))

    terms = plain = error(value - target)
    if clip is not None:
        terms = torch.maximum(plain, error(old + (value - old).clamp(-clip, clip) - target))
    with torch.no_grad():
        stats = {
            "count": good.sum(),
            "clipped": ((terms > plain) & good).sum(),
            "error": ((value - target) ** 2).sum(),
            "nonfinite": (~good).sum(),
        }
    return terms.sum() / denominator, stats


def kl_k1(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """log pi - log pi_ref per token: unbiased for KL(pi || ref), may be negative. For rewards; as a loss its gradient
    has mean zero (Schulman, "Approximating KL divergence", 2020)."""
    return logprobs - ref_logprobs


def kl_k3(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """exp(d) - d - 1 with d = log pi_ref - log pi, per token: unbiased for KL(pi || ref), never negative, of small
    variance. For the loss."""
    d = (ref_logprobs - logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return d.exp() - d - 1.0


def kl_k2(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """(log pi - log pi_ref)^2 / 2 per token: biased as an estimate, and as a loss on the policy's own samples of the
    exact gradient of KL(pi || ref)."""
    return 0.5 * (logprobs - ref_logprobs) ** 2


def kl_loss(
    logprobs: Tensor,
    ref_logprobs: Tensor,
    *,
    coef: float,
    denominator: float,
    kind: Literal["k1", "k2", "k3", "k3_corrected"] = "k2",
    old_logprobs: Tensor | None = None,
) -> tuple[Tensor, Stats]:
    """coef * sum of KL terms / denominator, over tokens [n].

    | `kind` | gradient, in expectation over the policy's samples |
    |---|---|
    | `k1` | 0 |
    | `k2` | that of KL(pi || ref) |
    | `k3` | that of KL(ref || pi), to first order near the reference |
    | `k3_corrected` | that of KL(pi || ref): rho k3 with rho = pi / pi_old differentiable (2510.01555) |

    `old_logprobs` [n] are those of the policy that sampled. `k2` is weighted by rho without gradient, so that it holds
    in later passes over a batch too. Sums: `count`, `kl` (the k3 estimate of KL(pi || ref), whatever the loss is),
    `nonfinite`.
    """
    check_denominator(denominator)
    good = finite(logprobs, ref_logprobs, old_logprobs)
    new, ref = blank(logprobs, good), blank(ref_logprobs, good)
    old = new.detach() if old_logprobs is None else blank(old_logprobs, good)
    rho = (new - old).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    if kind == "k2":
        terms = rho.detach() * kl_k2(new, ref)
    elif kind == "k3_corrected":
        terms = rho * kl_k3(new, ref)
    else:
        terms = {"k1": kl_k1, "k3": kl_k3}[kind](new, ref)
    terms = blank(terms, good)
    with torch.no_grad():
        estimate = blank(kl_k3(new, ref), good).sum()
    stats = {"count": good.sum(), "kl": estimate, "nonfinite": (~good).sum()}
    return coef * terms.sum() / denominator, stats


def entropy_loss(entropy: Tensor, *, coef: float, denominator: float) -> tuple[Tensor, Stats]:
    """-coef * sum of entropies / denominator, over tokens [n]: minimising it keeps the policy broad."""
    check_denominator(denominator)
    good = finite(entropy)
    terms = blank(entropy, good)
    stats = {"count": good.sum(), "entropy": terms.detach().sum(), "nonfinite": (~good).sum()}
    return -coef * terms.sum() / denominator, stats


def truncated_importance_weights(
    old_logprobs: Tensor, engine_logprobs: Tensor, *, cap: float = 2.0, turn: Tensor | None = None
) -> tuple[Tensor, Stats]:
    """min(pi_old / pi_engine, cap) without gradient, [n], for tokens that another engine sampled.

    With `turn`, the number of each token's turn, the ratio is the whole turn's, the same on all its tokens (action
    level). Entries that are not finite become NaN, which `policy_loss` masks and counts. Sums over tokens: `count`,
    `weight`, `capped` (ratio above the cap), `nonfinite`. Source: Yao 2025, "Your efficient RL framework secretly
    brings you off-policy RL training".
    """
    with torch.no_grad():
        good = finite(old_logprobs, engine_logprobs)
        log_ratio = torch.where(good, old_logprobs - engine_logprobs, torch.nan)
        if turn is not None:
            place, _, tokens = _turns(turn)
            log_ratio = torch.zeros_like(tokens, dtype=log_ratio.dtype).index_add(0, place, log_ratio)[place]
        # From above only: a small ratio is a small weight, which needs no bound.
        ratio = log_ratio.clamp(max=MAX_LOG_RATIO).exp()
        weights, good = ratio.clamp(max=cap), finite(ratio)
        stats = {
            "count": good.sum(),
            "weight": blank(weights, good).sum(),
            "capped": ((ratio > cap) & good).sum(),
            "nonfinite": (~good).sum(),
        }
        return weights, stats


class AdaptiveKL:
    """Coefficient of the KL penalty that steers the measured KL to a target (Ziegler 2019, 1909.08593, section 2.2).

    coef <- coef * (1 + clip(kl / target - 1, -.2, .2) * samples / horizon). A KL that is not finite changes nothing.
    """

    def __init__(self, coef: float, target: float, horizon: float) -> None:
        if coef < 0.0 or target <= 0.0 or horizon <= 0.0:
            raise ValueError(f"AdaptiveKL({coef=}, {target=}, {horizon=}): expected coef >= 0, others above 0.")
        self.coef, self.target, self.horizon = float(coef), float(target), float(horizon)

    def update(self, kl: float, samples: int) -> float:
        """Take the mean KL of `samples` samples into account; returns the coefficient to use next."""
        # False for NaN too.
        if abs(kl) < float("inf"):
            error = min(max(kl / self.target - 1.0, -0.2), 0.2)
            # A batch of more than five horizons would make the factor negative.
            self.coef = max(self.coef * (1.0 + error * samples / self.horizon), 0.0)
        return self.coef

    def state_dict(self) -> dict[str, float]:
        """The coefficient, for a checkpoint."""
        return {"coef": self.coef}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Restore the coefficient from a checkpoint."""
        self.coef = float(state["coef"])


def finite(*tensors: Tensor | None) -> Tensor:
    """[n] bool: True where all given tensors are finite."""
    present = [t for t in tensors if t is not None]
    good = torch.isfinite(present[0].detach())
    for t in present[1:]:
        good = good & torch.isfinite(t.detach())
    return good


def blank(tensor: Tensor, good: Tensor) -> Tensor:
    """`tensor` with 0 where `good` is False; those entries get gradient 0, even if they hold NaN."""
    return torch.where(good, tensor, torch.zeros((), dtype=tensor.dtype, device=tensor.device))


def sum_stats(parts: Iterable[Stats]) -> dict[str, float]:
    """Statistics of several micro-batches as those of one: sums, and maxima of `*_max`."""
    totals: dict[str, float] = {}
    for part in parts:
        for name, value in part.items():
            number = float(value)
            known = totals.get(name, 0.0)
            totals[name] = max(known, number) if name.endswith("_max") else known + number
    return totals


def mean_stats(parts: Iterable[Stats]) -> dict[str, float]:
    """Means of the statistics of micro-batches, by `count`; `count` and `nonfinite` stay sums, `*_max` maxima."""
    totals = sum_stats(parts)
    count = max(totals.get("count", 0.0), 1.0)
    sums = ("count", "nonfinite")
    return {name: v if name in sums or name.endswith("_max") else v / count for name, v in totals.items()}


def check_denominator(denominator: float) -> None:
    """Raise ValueError for an empty batch: it has no mean, so the caller must skip it."""
    if not denominator > 0.0:
        raise ValueError(f"denominator is {denominator}; expected the global count of tokens or turns, above 0.")


def _turns(number: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Per token its turn as 0..S-1; per turn the index of its first token, and how many tokens it has."""
    _, turn, tokens = number.unique(return_inverse=True, return_counts=True)
    index = torch.arange(len(number), device=number.device)
    # `unique` does not say where a number first occurs.
    first = torch.full_like(tokens, len(number)).scatter_reduce(0, turn, index, "amin")
    return turn, first, tokens
