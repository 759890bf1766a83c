"""Group-relative rules: each answer is compared with the other answers to the same problem. No critic.

    A = (x - baseline) / scale        for every sample x of a group

Three independent settings, and their values in published rules:

| rule | `unit` | `group` | `scale`, `baseline` | source |
|---|---|---|---|---|
| `grpo` | trajectory | problem | True, mean | DeepSeekMath, 2402.03300 |
| `dr_grpo` | trajectory | problem | False, mean (and the loss over a constant length) | Liu 2025, 2503.20783 |
| `rloo` | trajectory | problem | False, leave_one_out | Ahmadian 2024, 2402.14740 |
| `dr_mas` | row | agent | True, mean | Dr. MAS, 2602.08847 |
| `at_grpo` | row | turn | True, mean | AT-GRPO, 2510.11062 |

A sample is a trajectory (the mean over its rows' rewards, or their sum) or a row (one turn). A row carries the
advantage of its sample on all its tokens. A group of one, or without spread, carries no signal: advantage 0, and the
group is counted. Rows out of the loss enter no statistic. Statistics weigh samples, never tokens.

Deviations: `eps` is 1e-6 as in verl and Dr. MAS (TRL: 1e-4). The leave-one-out baseline is written as
(x - mean) * n / (n - 1), which equals x minus the mean of the others.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from mafrt.algorithms.base import Algorithm, Trajectories, structural
from mafrt.algorithms.rewards import CreditContext, Row
from mafrt.algorithms.stats import mean, no_spread, std, total
from mafrt.config.schema import at_least, check_bool, check_choice


@dataclass(frozen=True)
class GroupRelative(Algorithm):
    """Group-relative advantages: the estimator of GRPO and its relatives."""

    outcome_to: Literal["last", "end", "each", "all"] = "all"
    unit: Literal["trajectory", "row"] = structural("trajectory")
    """a sample: a trajectory, or one turn"""
    group: Literal["problem", "agent", "turn"] = structural("problem")
    """samples that are compared: of the problem, also of the same agent, also of the same turn"""
    scale: bool = structural(True)
    """divide by the unbiased standard deviation + `eps`"""
    baseline: Literal["mean", "leave_one_out"] = structural("mean")
    """subtract the group's mean, or the mean of the others"""
    reduce: Literal["mean", "sum"] = structural("mean")
    """a trajectory's reward from its rows'; with "sum", one row of unknown reward takes the trajectory out"""
    eps: float = structural(1e-6)
    """added to the standard deviation"""

    needs_groups: ClassVar[bool] = True

    @property
    def adds_agents(self) -> bool:
        return super().adds_agents or self.unit == "trajectory"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("unit", self.unit, ("trajectory", "row"))
        check_choice("group", self.group, ("problem", "agent", "turn"))
        check_choice("baseline", self.baseline, ("mean", "leave_one_out"))
        check_choice("reduce", self.reduce, ("mean", "sum"))
        check_bool("scale", self.scale)
        at_least(self, 0, "eps")

    def credit(self, trajectories: Trajectories, context: CreditContext) -> dict[str, float]:
        return group(trajectories, self)


def group(trajectories: Trajectories, settings: GroupRelative) -> dict[str, float]:
    """Fill advantages and returns (the sample's unnormalised reward) of all rows in the loss."""
    if settings.unit == "trajectory" and settings.reduce == "sum":
        drop_incomplete(trajectories)
    samples: dict[Hashable, list[Row]] = {}
    for row in (row for rows in trajectories for row in rows if row.dropped is None):
        member = (row.position,) if settings.unit == "row" else ()
        samples.setdefault((_key(row, settings.group), row.episode, *member), []).append(row)
    members: dict[Hashable, list[list[Row]]] = {}
    # Dict order follows the episodes; statistics are exact sums, so the order changes no bit.
    for rows in samples.values():
        members.setdefault(_key(rows[0], settings.group), []).append(rows)
    group_stats = GroupStats()
    fold = mean if settings.unit == "row" or settings.reduce == "mean" else total
    for group_rows in members.values():
        rewards = [fold([row.reward for row in rows]) for rows in group_rows]
        # Spread caused by the KL penalty alone is no signal about answers, so it is not scaled up to 1.
        bare = [fold([row.reward - total(row.kl_rewards) for row in rows]) for rows in group_rows]
        floor = 1.0 if no_spread(bare) else 0.0
        advantages = relative(rewards, scale=settings.scale, baseline=settings.baseline, eps=settings.eps, floor=floor)
        group_stats.add(rewards, (row.turn.agent for rows in group_rows for row in rows))
        for rows, reward, advantage in zip(group_rows, rewards, advantages, strict=True):
            for row in rows:
                tokens = len(row.turn.action_ids)
                row.fill([advantage] * tokens, [reward] * tokens)
    return group_stats.metrics()


def relative(
    rewards: Sequence[float], *, scale: bool, baseline: str = "mean", eps: float = 1e-6, floor: float = 0.0
) -> list[float]:
    """Advantages of one group's samples, in their order; zeros for a group of one or without spread."""
    n = len(rewards)
    if n < 2 or no_spread(rewards):
        return [0.0] * n
    centre = mean(rewards)
    factor = n / (n - 1) if baseline == "leave_one_out" else 1.0
    if scale:
        spread = max(std(rewards, unbiased=True), floor) + eps
        # Squares of numbers below 1e-160 vanish: with eps=0 there is nothing to divide by.
        factor = factor / spread if spread else 0.0
    return [(reward - centre) * factor for reward in rewards]


@dataclass
class GroupStats:
    """Counts of groups with and without a learning signal, overall and per agent."""

    groups: int = 0
    alone: int = 0
    flat: int = 0
    of_agent: dict[str, list[bool]] = field(default_factory=dict)
    """Agent -> for each of its groups of two or more: True if the group has no spread."""

    def add(self, rewards: Sequence[float], agents: Iterable[str]) -> None:
        """Count one group, in which `agents` have turns."""
        self.groups += 1
        if len(rewards) == 1:
            self.alone += 1
            return
        flat = no_spread(rewards)
        self.flat += flat
        for agent in set(agents):
            self.of_agent.setdefault(agent, []).append(flat)

    def metrics(self, name: str = "groups") -> dict[str, float]:
        """`groups` and `groups_of_one` (counts), `groups_no_spread` (fraction of the groups of two or more), and the
        same fraction over each agent's groups, `groups_no_spread/AGENT`."""
        fraction = self.flat / max(self.groups - self.alone, 1)
        overall = {name: float(self.groups), f"{name}_of_one": float(self.alone), f"{name}_no_spread": fraction}
        each = {f"{name}_no_spread/{agent}": sum(flat) / len(flat) for agent, flat in sorted(self.of_agent.items())}
        return overall | each


def drop_incomplete(trajectories: Trajectories) -> None:
    """Drop every trajectory whose total is unknown because one of its turns has an unknown reward."""
    for rows in trajectories:
        gone = next((row.dropped for row in rows if row.dropped), None)
        if gone:
            for row in rows:
                row.drop(gone)


def _key(row: Row, group: str) -> tuple[Hashable, ...]:
    """Identity of the row's group."""
    own = {"problem": (), "agent": (row.turn.agent,), "turn": (row.turn.agent, row.own_turn)}
    return (row.group, *own[group])
