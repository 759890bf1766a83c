"""GSPO: GRPO with one probability ratio for a whole answer.

    s = exp(mean over the answer's tokens of log pi - log pi_old)
    L = - mean over the answers of min(s A, clip(s, 1 - clip_param, 1 + clip_high) A)

The clip keeps or leaves an answer as a whole. The outcome belongs to the whole answer, and ratios of single tokens, one
sample each, correct nothing and add noise that grows with the length. A mean of log-ratios is much nearer to 0 than one
token's, so the clip is three orders of magnitude narrower than PPO's: 3e-4 and 4e-4 in the paper.

The loss is `mafrt.algorithms.losses.policy_loss` at `level="action"` with `normalization_mode="token"`; the advantage
is that of `grpo`. An answer is a turn.

Source: 2507.18071, equations 5 to 7 and section 5.1. GSPO-token has the same value and gradient where all tokens of an
answer share one advantage, as they do here, and is not offered.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from mafrt.algorithms.group_relative import GroupRelative


@dataclass(frozen=True)
class Gspo(GroupRelative):
    """GRPO with one probability ratio a turn, the mean of its tokens' log-ratios, and a narrow clip."""

    level: Literal["token", "action"] = "action"
    clip_param: float = 3e-4
    clip_high: float | None = 4e-4

    paper: ClassVar[str] = "GSPO (2507.18071)"
    compared: ClassVar[str] = "no better than grpo on a task of ours"
    unused: ClassVar[frozenset[str]] = frozenset({"level", "normalization_mode"})
