"""GDPO: every kind of reward is normalised within its group before they are added.

    A_k = (r_k - mean) / (std + eps)             for each kind k of reward, over the group
    S   = sum over k of |w_k| A_k                w_k: reward_weight, outcome_weight, process_weight
    A   = (S - mean) / (std + eps)               over all samples of the batch

Kinds: the task's outcome, the coach's score, and the rest (the environment's own rewards, such as a format bonus, and
the overlong and KL penalties). One sum of raw rewards lets the kind with the largest spread drown the others, and gives
the same advantage to different combinations with equal sums. A kind without spread in a group gives 0 there.

Source: 2601.05242. Deviation: groups are the same agent's turns on a problem (as `dr_mas`), since turns are what a team
is paid for. Sums that differ by less than 1e-3 over the whole batch are what is left of kinds that cancel, and give 0.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import ClassVar, Literal

from mafrt.algorithms.base import Trajectories, structural
from mafrt.algorithms.group_relative import GroupRelative, GroupStats, relative
from mafrt.algorithms.rewards import CreditContext, Row
from mafrt.algorithms.stats import mean, std, total

_REST = 1e-3


@dataclass(frozen=True)
class Gdpo(GroupRelative):
    """Outcome, coach and own rewards each normalised within the group, added with weights, and normalised again."""

    outcome_to: Literal["last", "end", "each", "all"] = "all"
    unit: Literal["trajectory", "row"] = structural("row")
    group: Literal["problem", "agent", "turn"] = structural("agent")

    paper: ClassVar[str] = "GDPO (2601.05242)"

    def credit(self, trajectories: Trajectories, context: CreditContext) -> dict[str, float]:
        rows = [row for some in trajectories for row in some if row.dropped is None]
        groups: dict[Hashable, list[Row]] = {}
        for row in rows:
            groups.setdefault((row.group, row.turn.agent), []).append(row)
        group_stats = GroupStats()
        summed: dict[tuple[int, int], float] = {}
        for own in groups.values():
            group_stats.add([row.reward for row in own], (row.turn.agent for row in own))
            parts = [self._relative(own, number) for number in range(3)]
            for place, row in enumerate(own):
                summed[row.key] = total(part[place] for part in parts)
        advantages = _over_the_batch([summed[row.key] for row in rows], self.eps)
        for row, advantage in zip(rows, advantages, strict=True):
            tokens = len(row.turn.action_ids)
            row.fill([advantage] * tokens, [row.reward] * tokens)
        return group_stats.metrics()

    def _relative(self, rows: list[Row], number: int) -> list[float]:
        """One kind of reward of a group, normalised and weighted."""
        kinds = [(row.outcome_reward, row.process_reward, _rest(row)) for row in rows]
        weight = abs((self.outcome_weight, self.process_weight, self.reward_weight)[number])
        values = [kind[number] for kind in kinds]
        # Rounding may leave a spread of 1e-17 where a kind is constant, which must not be scaled up to 1.
        if max(values) - min(values) < 1e-9:
            return [0.0] * len(rows)
        return [weight * advantage for advantage in relative(values, scale=True, eps=self.eps)]


def _rest(row: Row) -> float:
    return row.reward - row.outcome_reward - row.process_reward


def _over_the_batch(sums: list[float], eps: float) -> list[float]:
    """Mean 0 and deviation 1 over the batch; zeros without spread."""
    # The kinds have deviation 1 each, so a smaller rest is rounding, which must not be scaled up to 1.
    if len(sums) < 2 or max(sums) - min(sums) < _REST:
        return [0.0] * len(sums)
    centre, spread = mean(sums), std(sums, unbiased=True) + eps
    return [(value - centre) / spread for value in sums]
