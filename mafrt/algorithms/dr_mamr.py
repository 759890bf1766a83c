"""Dr. MAMR: a team's outcome, not divided by the number of turns, plus the influence of a turn on the next one.

    A = (R - mean) / (std + eps) + influence_weight * (C - mean) / (max(std, .01) + eps)

R: everything that the episode earned, among the episodes of its problem. C: influence of the turn
(`mafrt.rollout.influence`), averaged over similar turns of the same agent on the problem, among that agent's turns
there. Similar: the words agree to the share `influence_similarity`. A turn that no later turn shows has no C, and its
second term is 0; so has a problem on which the agent's turns all have one C. With the KL penalty in the reward R holds
those of all turns, so that an episode of which one is unknown leaves the loss whole (`drop_incomplete` says why).

Multi-turn GRPO divides the loss of an episode by its number of turns T. Of two episodes with equal rewards, each turn
of the shorter one then moves the weights more, so turns that end the work early are learnt faster: "lazy" agents. Here
the loss is the mean over all turns of the batch, and every turn counts alike, whatever the length of its episode. R is
a sum over the episode with the outcome counted once, since a mean over turns would bring the division back.

Source: 2511.02303; level, ratio of a turn (as in ReMA) and influence_weight .1 are the paper's. Deviations: influence
leaves the turn's text out of the prompt in place of suppressing the attention to it; similarity is of words, the
paper's of embeddings (.9); the deviation of C has a floor of .01 nats, below which differences are rounding. The
restart action, a token with which an agent discards its earlier turns, and its reward are not here: the action needs an
environment and a warm start of its own.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from mafrt.algorithms.base import Trajectories, structural
from mafrt.algorithms.gigpo import clusters
from mafrt.algorithms.group_relative import GroupRelative
from mafrt.algorithms.rewards import CreditContext, Row
from mafrt.algorithms.stats import mean, std
from mafrt.config.schema import NotNegative, Share

_LEAST_STD = 0.01
"""Least deviation of the influence, in nats per token."""


@dataclass(frozen=True)
class DrMamr(GroupRelative):
    """GRPO without the division by the number of turns, plus the influence of a turn on the next one."""

    level: Literal["token", "action"] = "action"
    outcome_to: Literal["last", "end", "each", "all"] = "last"
    reduce: Literal["mean", "sum"] = structural("sum")
    influence_weight: NotNegative = 0.1
    """weight of a turn's influence on the next one (the paper's alpha), on a task of ours not shown to help; 0 switches
    its pass off"""
    influence_similarity: Share = 0.9
    """share of the words that must agree for two turns to share their influence; 1 asks for identity"""

    paper: ClassVar[str] = "Dr. MAMR (2511.02303)"
    metrics: ClassVar[Mapping[str, tuple[str, str]]] = {
        "influence_nats/AGENT": (
            "how much likelier the next turn is because it was shown the agent's turn",
            "nats per token",
        ),
        "influence_measured": ("share of the turns that a later turn shows, so that their influence is known", ""),
    }
    needs_several_agents: ClassVar[bool] = True

    @property
    def needs_influence(self) -> bool:
        return self.influence_weight > 0

    def credit(self, trajectories: Trajectories, context: CreditContext) -> dict[str, float]:
        metrics = super().credit(trajectories, context)
        rows = [row for some in trajectories for row in some if row.dropped is None]
        measured = [row for row in rows if row.turn.influence is not None and math.isfinite(row.turn.influence)]
        if self.influence_weight == 0 or not measured:
            return metrics
        shared = _cluster_means(measured, self.influence_similarity)
        groups: dict[Hashable, list[Row]] = {}
        for row in measured:
            groups.setdefault((row.group, row.turn.agent), []).append(row)
        for group in groups.values():
            _add_influence(group, [shared[row.key] for row in group], self.influence_weight, self.eps)
        return metrics | _metrics(measured, len(rows))


def _cluster_means(rows: list[Row], similarity: float) -> dict[tuple[int, int], float]:
    """The mean influence of each row's cluster of similar turns."""
    names = clusters(rows, lambda turn: tuple(turn.text.split()), similarity)
    members: dict[Hashable, list[float]] = {}
    for row in rows:
        members.setdefault(names[row.key], []).append(row.turn.influence or 0.0)
    return {row.key: mean(members[names[row.key]]) for row in rows}


def _add_influence(rows: list[Row], influence: list[float], weight: float, eps: float) -> None:
    """Add the standardised influence to the advantages of one agent's turns on one problem."""
    if len(rows) < 2 or max(influence) == min(influence):
        return
    centre, spread = mean(influence), max(std(influence, unbiased=True), _LEAST_STD) + eps
    for row, number in zip(rows, influence, strict=True):
        bonus = weight * (number - centre) / spread
        row.turn.advantages = [value + bonus for value in row.turn.advantages or ()]


def _metrics(measured: list[Row], turns: int) -> dict[str, float]:
    """`influence_nats/AGENT`, the mean in nats per token, and the share of the turns that have one."""
    agents: dict[str, list[float]] = {}
    for row in measured:
        agents.setdefault(row.turn.agent, []).append(row.turn.influence or 0.0)
    nats = {f"influence_nats/{agent}": mean(numbers) for agent, numbers in sorted(agents.items())}
    return nats | {"influence_measured": len(measured) / turns}
