"""CISPO: the clip bounds the weight of a token's gradient, and takes no token out.

    L = - sum over tokens of sg[min(rho, 1 + clip_high)] A log pi / tokens of the batch
    rho = pi / pi_old,    sg: no gradient

The gradient of a token is its weight times A times that of log pi. PPO's clip gives a token whose ratio has left the
range no gradient at all: rare tokens at which an answer changes course ("However", "Wait") leave it after the first
pass over a batch and are never learnt.

There is no lower bound, as in the paper's experiments. The paper names no upper one; 5, that is `clip_high` 4, is
ScaleRL's (2510.13786), which finds 4 to 8 alike. The advantage is that of `grpo`.

Source: MiniMax-M1 (2506.13585), equations 4 and 5.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from mafrt.algorithms.group_relative import GroupRelative

if TYPE_CHECKING:
    from torch import Tensor

    from mafrt.algorithms.losses import PolicyTerms, Stats


@dataclass(frozen=True)
class Cispo(GroupRelative):
    """GRPO whose clip bounds the weight of a token's gradient and takes no token out."""

    clip_high: float | None = 4.0

    paper: ClassVar[str] = "CISPO, MiniMax-M1 (2506.13585)"
    compared: ClassVar[str] = "worse than grpo on a task of ours"
    unused: ClassVar[frozenset[str]] = frozenset({"clip_param", "level", "normalization_mode", "dual_clip"})

    def policy_loss(self, terms: PolicyTerms) -> tuple[Tensor, Stats]:
        """As `mafrt.algorithms.losses.policy_loss`; `clipped` counts the tokens whose weight the clip bounds."""
        import torch

        from mafrt.algorithms.losses import MAX_LOG_RATIO, blank, check_denominator, finite

        check_denominator(terms.denominator)
        good = finite(terms.logprobs, terms.old_logprobs, terms.advantages, terms.weights)
        logprobs, old, advantage = (blank(t, good) for t in (terms.logprobs, terms.old_logprobs, terms.advantages))
        log_ratio = (logprobs.detach() - old).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        ratio = log_ratio.exp()
        weight = ratio.clamp(max=1.0 + (self.clip_param if self.clip_high is None else self.clip_high))
        bounded = weight != ratio
        if terms.weights is not None:
            weight = weight * blank(terms.weights, good).detach()
        stats = {
            "count": good.sum(),
            "clipped": (bounded & good).sum(),
            "approx_kl": blank(ratio - 1.0 - log_ratio, good).sum(),
            "ratio": blank(ratio, good).sum(),
            # A zero is appended because max() of an empty tensor raises.
            "ratio_max": torch.cat([blank(ratio, good), ratio.new_zeros(1)]).max(),
            "nonfinite": (~good).sum(),
        }
        return -blank(weight * advantage * logprobs, good).sum() / terms.denominator, stats
