"""MaxRL: problems are weighted by how rarely they are solved, so that the log of the share of successes is learnt.

    A = (R - mean) / (mean + eps)        over the trajectories of a problem

With outcomes of 0 and 1 the mean is the share p of successes. Reinforcement learning maximises the mean of p over the
problems; the likelihood principle asks for that of log p, whose gradient weighs a problem by 1 / p. Dividing by the
deviation, as `grpo` does, gives 1 / sqrt(p (1 - p)), which favours easy problems as much as hard ones. With N samples
the expected gradient is that of the sum over k < N of pass@k / k, the first terms of log p; N = 2 gives p itself.

Source: 2602.02710, and the authors' `compute_maxrl_outcome_advantage`. Deviations: the formula is meant for rewards
that are not negative; where the mean of a problem is not above 0, A is not divided, since a division by a negative
number would turn it around. A trajectory that is alone gets 0, there its raw reward.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from mafrt.algorithms.base import Trajectories, structural
from mafrt.algorithms.group_relative import GroupRelative
from mafrt.algorithms.rewards import CreditContext


@dataclass(frozen=True)
class MaxRl(GroupRelative):
    """A trajectory against the others of its problem, divided by their mean: rarely solved problems weigh more."""

    scale: bool = structural(False)

    paper: ClassVar[str] = "MaxRL (2602.02710)"
    compared: ClassVar[str] = "no better than dr_grpo on a task of ours"

    def credit(self, trajectories: Trajectories, context: CreditContext) -> dict[str, float]:
        metrics = super().credit(trajectories, context)
        for row in (row for rows in trajectories for row in rows if row.dropped is None):
            mean = row.turn.baseline
            if mean is not None and mean > 0.0:
                row.turn.advantages = [advantage / (mean + self.eps) for advantage in row.turn.advantages or ()]
        return metrics
