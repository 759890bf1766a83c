"""MaxRL: problems are weighted by how rarely they are solved, so that the log of the share of successes is learnt.

    A = (R - mean) / (mean + eps)        over the trajectories of a problem

With outcomes of 0 and 1 the mean is the share p of successes. Reinforcement learning maximises the mean of p over the
problems; the likelihood principle asks for that of log p, whose gradient weighs a problem by 1 / p. Dividing by the
deviation, as `grpo` does, gives 1 / sqrt(p (1 - p)), which favours easy problems as much as hard ones. With N samples
the expected gradient is that of the sum over k < N of pass@k / k, the first terms of log p; N = 2 gives p itself.

R is without the KL penalty, whose distance from the group's mean is added undivided: divided by a share of successes
near 0, it would count more than any success.

Source: 2602.02710, and the authors' `compute_maxrl_outcome_advantage`. Deviations: the formula is meant for rewards
that are not negative; where one of a problem is, A is not divided, since the mean may be 0 up to a rounding, or
negative, which would turn A around. A trajectory that is alone gets 0, there its raw reward.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from mafrt.algorithms.base import Trajectories, structural
from mafrt.algorithms.group_relative import GroupRelative, relative, trajectory_reward
from mafrt.algorithms.rewards import CreditContext, Row
from mafrt.algorithms.stats import mean


@dataclass(frozen=True)
class MaxRl(GroupRelative):
    """A trajectory against the others of its problem, divided by their mean: rarely solved problems weigh more."""

    scale: bool = structural(False)

    paper: ClassVar[str] = "MaxRL (2602.02710)"
    compared: ClassVar[str] = "no better than dr_grpo on a task of ours"

    def credit(self, trajectories: Trajectories, context: CreditContext) -> dict[str, float]:
        metrics = super().credit(trajectories, context)
        to_go = bool(context.by_turn) and self.turn_credit == "to_go"
        problems: dict[str, list[tuple[list[Row], float]]] = {}
        for rows in trajectories:
            if known := [row for row in rows if row.dropped is None]:
                reward = trajectory_reward(rows, self, to_go=to_go, kl=False)
                problems.setdefault(known[0].group, []).append((known, reward))
        for members in problems.values():
            rewards = [reward for _, reward in members]
            centre = mean(rewards)
            if min(rewards) < 0.0 or not centre > 0.0:
                continue
            gaps = relative(rewards, scale=False, size=max(abs(row.bare) for known, _ in members for row in known))
            for (known, _), gap in zip(members, gaps, strict=True):
                divided = gap / (centre + self.eps)
                for row in known:
                    row.turn.advantages = [value - gap + divided for value in row.turn.advantages or ()]
        return metrics
