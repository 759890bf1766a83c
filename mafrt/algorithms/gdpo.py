"""GDPO: every kind of reward is normalised within its group before they are added.

    A_k = (r_k - mean) / (std + eps)             for each kind k of reward, over the group
    S   = sum over k of |w_k| A_k                w_k: the agent's reward_weight, outcome_weight, process_weight
    A   = (S - mean) / (std + eps)               over all samples of the batch

Kinds: the task's outcome, the coach's score, and the rest (the environment's own rewards, such as a format bonus, and
the overlong penalty). One sum of raw rewards lets the kind with the largest spread drown the others, and gives the same
advantage to different combinations with equal sums. A kind without spread in a group gives 0 there.

The KL penalty in the reward is no kind: normalised by itself, its coefficient would drop out. Its distance from the
group's mean is divided by the deviation of the group's rewards, penalty included as in `grpo` (1 where those without it
have none), and added to S; where no kind has spread in the whole batch, S is not scaled up.

Where turns are paid as they come, a turn's coach score and own reward are those of its step and all later ones, and it
is compared with the same agent's turns of the same index (`mafrt.algorithms.group_relative`).

Source: 2601.05242. Deviation: groups are the same agent's turns on a problem (as `dr_mas`), since turns are what a team
is paid for. Sums that differ by less than 1e-3 over the whole batch are what is left of kinds that cancel, and give 0.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import ClassVar, Literal

from mafrt.algorithms.base import Trajectories, structural
from mafrt.algorithms.group_relative import GroupRelative, GroupStats, relative
from mafrt.algorithms.rewards import CreditContext, Row, fill_later
from mafrt.algorithms.stats import mean, no_spread, std, total
from mafrt.config.algorithm_groups import RewardSettings

_REST = 1e-3


@dataclass(frozen=True)
class Gdpo(GroupRelative):
    """Outcome, coach and own rewards each normalised within the group, added with weights, and normalised again."""

    outcome_to: Literal["last", "end", "each", "all"] = "all"
    unit: Literal["trajectory", "row"] = structural("row")
    group: Literal["problem", "agent", "turn"] = structural("agent")

    paper: ClassVar[str] = "GDPO (2601.05242)"

    def credit(self, trajectories: Trajectories, context: CreditContext) -> dict[str, float]:
        to_go = bool(context.by_turn) and self.turn_credit == "to_go"
        if to_go:
            fill_later(trajectories, own=bool(context.opponents))
        rows = [row for some in trajectories for row in some if row.dropped is None]
        groups: dict[Hashable, list[Row]] = {}
        for row in rows:
            groups.setdefault((row.group, row.turn.agent, row.own_turn if to_go else None), []).append(row)
        group_stats = GroupStats()
        terms: dict[tuple[int, int], dict[str, float]] = {}
        spread = False
        for group in groups.values():
            group_stats.add([row.bare + row.later for row in group], (row.turn.agent for row in group))
            weights = (context.agent_rewards or {}).get(group[0].turn.agent, self)
            parts = [_relative(group, number, weights, self.eps) for number in range(3)]
            spread = spread or any(any(part) for part in parts)
            parts.append(_penalties(group, self.eps))
            for place, row in enumerate(group):
                named = zip(("outcome", "coach", "reward", "penalties"), parts, strict=True)
                terms[row.key] = {name: part[place] for name, part in named}
        summed = [total(terms[row.key].values()) for row in rows]
        advantages = _over_the_batch(summed, self.eps, spread=spread)
        for row, advantage in zip(rows, advantages, strict=True):
            tokens = len(row.turn.action_ids)
            row.fill([advantage] * tokens, [row.reward + row.later] * tokens)
            row.turn.terms = terms[row.key]
        return group_stats.metrics()


def _relative(rows: list[Row], number: int, weights: RewardSettings, eps: float) -> list[float]:
    """One kind of reward of a group, normalised and weighted."""
    weight = abs((weights.outcome_weight, weights.process_weight, weights.reward_weight)[number])
    values = [_kinds(row)[number] for row in rows]
    # The third kind is what the others leave, so its rounding is in proportion to the whole.
    size = max(max(abs(row.bare), abs(row.later)) for row in rows)
    return [weight * advantage for advantage in relative(values, scale=True, eps=eps, size=size)]


def _kinds(row: Row) -> tuple[float, float, float]:
    """Outcome, coach's scores, and the rest, without the KL penalty."""
    rest = row.bare - row.outcome_reward - row.process_reward
    return row.outcome_reward, row.process_reward + row.later_process, rest + (row.later - row.later_process)


def _penalties(rows: list[Row], eps: float) -> list[float]:
    """The KL penalty of each row of a group, less the mean, in deviations of the group's rewards."""
    penalties = [total(row.kl_rewards) for row in rows]
    if len(rows) < 2 or no_spread(penalties):
        return [0.0] * len(rows)
    bare = [row.bare + row.later for row in rows]
    flat = no_spread(bare, max(abs(row.bare) for row in rows))
    # Without the penalties, a format bonus that hardly differs would make them outweigh all other groups of the batch.
    spread = 1.0 if flat else std([b + p for b, p in zip(bare, penalties, strict=True)], unbiased=True)
    centre = mean(penalties)
    return [(penalty - centre) / (spread + eps) for penalty in penalties]


def _over_the_batch(sums: list[float], eps: float, *, spread: bool) -> list[float]:
    """Mean 0 and deviation 1 over the batch; zeros without spread. Without `spread` of a kind, only centred."""
    if len(sums) < 2:
        return [0.0] * len(sums)
    centre = mean(sums)
    if not spread:
        return [0.0] * len(sums) if no_spread(sums) else [value - centre for value in sums]
    # The kinds have deviation 1 each, so a smaller rest is rounding, which must not be scaled up to 1.
    if max(sums) - min(sums) < _REST:
        return [0.0] * len(sums)
    deviation = std(sums, unbiased=True) + eps
    return [(value - centre) / deviation for value in sums]
