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

Where turns are paid as they come (`turn_credit="to_go"`), a mean over a trajectory's turns pays for being short, and a
turn's own pay is blind to the pay that the turn makes possible. Then a trajectory is worth the sum of its turns' pay,
the outcome counted once, and a row all pay from its step on. A row's baseline is the mean over the rows of the same
agent and turn index, which every sample that reached this turn enters once; `group` says over which rows the deviation
runs. Both estimate the gradient of E[sum r + R]. With outcomes only, the two forms are the same but for the baseline
of `dr_mas`, which is then its paper's.

Deviations: `eps` is 1e-6 as in verl and Dr. MAS (TRL: 1e-4). The leave-one-out baseline is written as
(x - mean) * n / (n - 1), which equals x minus the mean of the others.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from mafrt.algorithms.base import Algorithm, Trajectories, structural
from mafrt.algorithms.rewards import CreditContext, Row, fill_later
from mafrt.algorithms.stats import mean, no_spread, total
from mafrt.config.schema import NotNegative


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
    eps: NotNegative = structural(1e-6)
    """added to the standard deviation"""
    turn_credit: Literal["to_go", "own"] = "to_go"
    """where turns are paid as they come, credit all that follows from a turn, or its own pay only (the papers' form)"""

    needs_groups: ClassVar[bool] = True

    @property
    def adds_agents(self) -> bool:
        return super().adds_agents or self.unit == "trajectory"

    def credit(self, trajectories: Trajectories, context: CreditContext) -> dict[str, float]:
        """Fill advantages and returns (the sample's unnormalised reward) of all rows in the loss."""
        to_go = bool(context.by_turn) and self.turn_credit == "to_go"
        if self.unit == "trajectory" and self.reduce == "sum":
            drop_incomplete(trajectories)
        if to_go and self.unit == "row":
            fill_later(trajectories, own=bool(context.opponents))
        members: dict[Hashable, list[Sample]] = {}
        # Dict order follows the episodes; statistics are exact sums, so the order changes no bit.
        for rows in trajectories:
            for sample in _samples(rows, self, to_go=to_go):
                members.setdefault(_key(sample.rows[0], self.group), []).append(sample)
        group_stats = GroupStats()
        for samples in members.values():
            rewards = [sample.reward for sample in samples]
            # Those of one turn index are compared; all of a group together are one deviation.
            alike = [sample.turn for sample in samples] if to_go and self.unit == "row" else None
            advantages = relative(
                rewards,
                scale=self.scale,
                baseline=self.baseline,
                eps=self.eps,
                bare=[sample.bare for sample in samples],
                size=max(sample.size for sample in samples),
                alike=alike,
            )
            group_stats.add([s.bare for s in samples], (row.turn.agent for s in samples for row in s.rows), alike)
            for places in _alike(len(samples), alike):
                baseline = mean([rewards[place] for place in places])
                for place in places:
                    for row in samples[place].rows:
                        tokens = len(row.turn.action_ids)
                        row.fill([advantages[place]] * tokens, [rewards[place]] * tokens, baseline)
        return group_stats.metrics()


@dataclass
class Sample:
    """A trajectory or a row as its group sees it."""

    rows: list[Row]
    reward: float
    bare: float
    """`reward` without the KL penalty"""
    size: float
    """the largest number that `bare` was computed from"""

    @property
    def turn(self) -> tuple[str, int]:
        """Agent and turn index of a sample that is one row."""
        return self.rows[0].turn.agent, self.rows[0].own_turn


def _alike(count: int, keys: Sequence[Hashable] | None) -> list[list[int]]:
    """The places of the samples that are compared with each other: those of equal keys; None: all `count`."""
    places: dict[Hashable, list[int]] = {}
    for place in range(count):
        places.setdefault(None if keys is None else keys[place], []).append(place)
    return list(places.values())


def _samples(rows: Sequence[Row], settings: GroupRelative, *, to_go: bool) -> list[Sample]:
    """The samples of one episode, of rows in the loss."""
    known = [row for row in rows if row.dropped is None]
    if settings.unit == "row":
        return [
            Sample([row], row.reward + row.later, row.bare + row.later, max(abs(row.bare), abs(row.later)))
            for row in known
        ]
    if to_go and settings.reduce == "mean" and (gone := next((r.dropped for r in rows if not r.pay_known), None)):
        for row in known:
            row.drop(gone)  # what the trajectory was paid is unknown
        return []
    parts: dict[Hashable, list[Row]] = {}
    for row in known:
        parts.setdefault(_key(row, settings.group), []).append(row)
    samples = []
    for part in parts.values():
        # What a team is paid by turn is paid for the whole trajectory.
        paid = rows if to_go else part
        reward, bare = (trajectory_reward(paid, settings, to_go=to_go, kl=kl) for kl in (True, False))
        samples.append(Sample(part, reward, bare, max(abs(row.bare) for row in part)))
    return samples


def trajectory_reward(rows: Sequence[Row], settings: GroupRelative, *, to_go: bool, kl: bool) -> float:
    """Mean or sum (`reduce`) over rows in the loss; with `to_go` the mean of outcome and penalties, and all pay."""
    known = [row for row in rows if row.dropped is None]
    rewards = [row.reward if kl else row.bare for row in known]
    if settings.reduce == "sum":
        return total(rewards)
    if not to_go:
        return mean(rewards)
    rest = mean([reward - row.pay for reward, row in zip(rewards, known, strict=True)])
    return rest + total(row.pay for row in rows)


def relative(
    rewards: Sequence[float],
    *,
    scale: bool,
    baseline: str = "mean",
    eps: float = 1e-6,
    bare: Sequence[float] | None = None,
    size: float = 0.0,
    alike: Sequence[Hashable] | None = None,
) -> list[float]:
    """Advantages of one group's samples, in their order; zeros for a group of one or without spread.

    Args:
        rewards: of the samples.
        scale: divide by the unbiased standard deviation + `eps`.
        baseline: "mean", or "leave_one_out".
        bare: the rewards without the KL penalty; where they have no spread, the KL's is not scaled up to 1.
        size: the largest number that the rewards were computed from; see `no_spread`.
        alike: samples of equal keys are compared with each other, those of all keys divided by one deviation; None: all
            are compared.
    """
    bare = rewards if bare is None else bare
    compared = [places for places in _alike(len(rewards), alike) if len(places) > 1]
    flat = all(no_spread([bare[place] for place in places], size) for places in compared)
    gaps = [0.0] * len(rewards)
    factors = [1.0] * len(rewards)
    for places in compared:
        if no_spread([rewards[place] for place in places], size):
            continue  # the mean of equal numbers may be off by a rounding
        centre = mean([rewards[place] for place in places])
        n = len(places)
        for place in places:
            gaps[place] = rewards[place] - centre
            factors[place] = n / (n - 1) if baseline == "leave_one_out" else 1.0
    if not scale:
        return [gap * factor for gap, factor in zip(gaps, factors, strict=True)]
    degrees = max(sum(len(places) - 1 for places in compared), 1)
    deviation = math.sqrt(total(gap * gap for gap in gaps) / degrees)
    spread = max(deviation, 1.0 if flat else 0.0) + eps
    # Squares of numbers below 1e-160 vanish: with eps=0 there is nothing to divide by.
    return [gap * (factor / spread if spread else 0.0) for gap, factor in zip(gaps, factors, strict=True)]


@dataclass
class GroupStats:
    """Counts of groups with and without a learning signal, overall and per agent."""

    groups: int = 0
    alone: int = 0
    flat: int = 0
    of_agent: dict[str, list[bool]] = field(default_factory=dict)
    """Agent -> for each of its groups of two or more: True if the group has no spread."""

    def add(self, rewards: Sequence[float], agents: Iterable[str], alike: Sequence[Hashable] | None = None) -> None:
        """Count one group, in which `agents` have turns; `alike` as of `relative`."""
        self.groups += 1
        compared = [[rewards[place] for place in places] for places in _alike(len(rewards), alike) if len(places) > 1]
        if not compared:
            self.alone += 1
            return
        flat = all(map(no_spread, compared))
        self.flat += flat
        for agent in set(agents):
            self.of_agent.setdefault(agent, []).append(flat)

    def metrics(self, name: str = "groups") -> dict[str, float]:
        """Counts of groups and of those of one, and the share without spread of the others, of each agent too."""
        fraction = self.flat / max(self.groups - self.alone, 1)
        overall = {name: float(self.groups), f"{name}_of_one": float(self.alone), f"{name}_no_spread": fraction}
        each = {f"{name}_no_spread/{agent}": sum(flat) / len(flat) for agent, flat in sorted(self.of_agent.items())}
        return overall | each


def drop_incomplete(trajectories: Trajectories, *, kl: bool = True) -> list[Sequence[Row]]:
    """Drop every trajectory whose total is unknown because one of its turns has an unknown reward; returns the others.

    `kl`: the total holds the KL penalties. Without them, a turn whose own is unknown leaves alone. A total over the
    known ones would be a substitute for what is not known: it would pay the episode as if that turn had stayed at the
    reference, and a penalty is not finite where a turn went too far from it.
    """
    complete: list[Sequence[Row]] = []
    for rows in trajectories:
        unknown = (
            row for row in rows if row.dropped and (kl or row.dropped != "nonfinite" or not math.isfinite(row.bare))
        )
        if (first := next(unknown, None)) is None:
            complete.append(rows)
            continue
        for row in rows:
            row.drop(first.dropped)  # type: ignore[arg-type]  # only dropped rows are unknown
    return complete


def _key(row: Row, group: str) -> tuple[Hashable, ...]:
    """Identity of the row's group."""
    parts = {"problem": (), "agent": (row.turn.agent,), "turn": (row.turn.agent, row.own_turn)}
    return (row.group, *parts[group])
