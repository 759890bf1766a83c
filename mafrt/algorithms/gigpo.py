"""`gigpo`: trajectory-level group advantage plus step-level advantage among turns from the same state.

    A = A_E + step_weight * A_S
    A_E: the trajectory's total reward among the trajectories of its problem
    A_S: the turn's discounted return sum_k gamma^k r_{t+k} among the turns of its problem with the same anchor state.
         k counts environment steps, and r is all that one pays: agents that speak at the same time share it

Source: GiGPO (2505.10978) and its code, verl-agent. Each part is (x - mean) (`norm="mean"`, the paper's F_norm = 1)
or (x - mean) / (std + eps) (`norm="mean_std"`). A group of one contributes 0 and is counted.

The anchor state is the agent's prompt (`prompt_ids`) together with its name; `anchor` may be any function of an
episode and a turn instead. With `similarity` below 1, an anchor joins a cluster when its `difflib` ratio to the
cluster's first member is at least `similarity`.

Deviations: agents never share an anchor. Anchors are sorted before they are clustered, so that the order of the
episodes changes nothing (verl-agent clusters in arrival order). A trajectory with a turn of unknown reward leaves the
loss as a whole, because the trajectory's total is unknown, and with it A_E of all its turns (`drop_incomplete`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from itertools import accumulate
from typing import Any, ClassVar, Literal

from mafrt.algorithms.base import Algorithm, Trajectories, structural
from mafrt.algorithms.group_relative import GroupStats, drop_incomplete, relative
from mafrt.algorithms.rewards import CreditContext, Row, step_rewards
from mafrt.algorithms.stats import mean, total
from mafrt.config.schema import NotNegative, Share
from mafrt.core.types import Turn

Anchor = Callable[[Turn], Any]
MOST_STEPS = 1_000_000
"""Pairs of equal elements that a comparison of two anchors looks at."""


@dataclass(frozen=True)
class GigpoBase(Algorithm):
    """Group-in-group advantages."""

    gamma: Share = 0.95
    """discount per step: a turn of the step returns"""
    step_weight: float = 1.0
    """weight of the step part (the paper's omega); on two tasks of ours it was not shown to help"""
    norm: Literal["mean", "mean_std"] = structural("mean_std")
    """subtract the group's mean, or also divide by its standard deviation"""
    similarity: Share = 1.0
    """share of an anchor that must agree to count as the same; 1 asks for identity"""
    anchor: Anchor | None = field(default=None, metadata={"flag": False})
    """a turn's anchor state, a string or a tuple; None: its `prompt_ids`"""
    eps: NotNegative = structural(1e-6)
    """added to the standard deviation"""

    needs_groups: ClassVar[bool] = True
    metrics: ClassVar[Mapping[str, tuple[str, str]]] = {
        "anchors": ("groups of steps that share a state", "groups"),
        "anchors_of_one": ("states visited once", "groups"),
        "anchors_no_spread": ("share of the larger groups of steps that all had the same return", "0..1"),
        "anchors_no_spread/AGENT": ("the same for the agent's steps", "0..1"),
    }

    @property
    def adds_agents(self) -> bool:
        return True

    def credit(self, trajectories: Trajectories, context: CreditContext) -> dict[str, float]:
        return gigpo(trajectories, self)


def gigpo(trajectories: Trajectories, settings: GigpoBase) -> dict[str, float]:
    """Fill advantages and returns (the discounted step return) of all rows in the loss."""
    complete = [rows for rows in drop_incomplete(trajectories) if rows]
    scale = settings.norm == "mean_std"

    problems: dict[str, list[Sequence[Row]]] = {}
    for rows in complete:
        problems.setdefault(rows[0].group, []).append(rows)
    episode_part: dict[int, float] = {}
    group_stats = GroupStats()
    for members in problems.values():
        totals, bare = ([total(step_rewards(rows, kl=kl)) for rows in members] for kl in (True, False))
        size = max(abs(row.bare) for rows in members for row in rows)
        group_stats.add(bare, (row.turn.agent for rows in members for row in rows))
        parts = relative(totals, scale=scale, eps=settings.eps, bare=bare, size=size)
        for rows, advantage in zip(members, parts, strict=True):
            episode_part[rows[0].episode] = advantage

    step_groups: dict[tuple[Hashable, ...], list[tuple[Row, float, float]]] = {}
    read = settings.anchor or (lambda turn: tuple(turn.prompt_ids))
    names = clusters([row for rows in complete for row in rows], read, settings.similarity)
    for rows in complete:
        to_go, bare_to_go = (_discounted(step_rewards(rows, kl=kl), settings.gamma) for kl in (True, False))
        for row in reversed(rows):
            step_groups.setdefault(names[row.key], []).append((row, to_go[row.step], bare_to_go[row.step]))
    steps = GroupStats()
    for alike in step_groups.values():
        returns, bare = [value for _, value, _ in alike], [value for _, _, value in alike]
        steps.add(bare, (row.turn.agent for row, _, _ in alike))
        size = max(abs(row.bare) for row, _, _ in alike)
        parts = relative(returns, scale=scale, eps=settings.eps, bare=bare, size=size)
        for (row, value, _), part in zip(alike, parts, strict=True):
            tokens = len(row.turn.action_ids)
            terms = {"the task": episode_part[row.episode], "the state": settings.step_weight * part}
            row.fill([sum(terms.values())] * tokens, [value] * tokens, mean(returns))
            row.turn.terms = terms
    return group_stats.metrics() | steps.metrics("anchors")


def _discounted(rewards: Sequence[float], gamma: float) -> list[float]:
    """The discounted sum of each step's reward and those after it."""
    sums, running = [0.0] * len(rewards), 0.0
    for step in reversed(range(len(rewards))):
        sums[step] = running = rewards[step] + gamma * running
    return sums


def clusters(rows: Sequence[Row], read: Anchor, similarity: float) -> dict[tuple[int, int], tuple[Hashable, ...]]:
    """Identity of each row's cluster: problem, agent and the first member of those that `read` gives.

    Args:
        rows: turns with their keys.
        read: a turn -> a string or a tuple.
        similarity: share of matching elements from which on two are alike, in [0, 1]; 1 asks for identity.
    """
    keys = {row.key: (row.group, row.turn.agent, read(row.turn)) for row in rows}
    if similarity >= 1.0:
        return dict(keys)
    heads: dict[tuple[Hashable, ...], list[Any]] = {}
    cluster: dict[tuple[Hashable, ...], tuple[Hashable, ...]] = {}
    for key in sorted(set(keys.values())):
        known = heads.setdefault(key[:2], [])
        head = next((k for k in known if _alike(k, key[2], similarity)), None)
        if head is None:
            head = key[2]
            known.append(head)
        cluster[key] = (*key[:2], head)
    return {row: cluster[key] for row, key in keys.items()}


def _alike(a: Any, b: Any, similarity: float) -> bool:
    """Whether difflib's ratio, without its junk heuristic, is at least `similarity`.

    difflib takes time with the cube of the length where few different elements repeat, as an agent can write them: two
    anchors that take more than `MOST_STEPS` are different.
    """
    matcher, size = SequenceMatcher(None, a, b, autojunk=False), (len(a) + len(b)) / 2
    if not size or matcher.quick_ratio() < similarity:
        return not size
    places = [0, *accumulate(map(Counter(b).__getitem__, a))]
    waiting, found, steps = [(0, len(a), 0, len(b))], 0, 0
    # As `SequenceMatcher.get_matching_blocks`, up to the point where the answer is known.
    while found / size < similarity:
        if (found + sum(min(a1 - a0, b1 - b0) for a0, a1, b0, b1 in waiting)) / size < similarity:
            return False
        a0, a1, b0, b1 = waiting.pop()
        steps += places[a1] - places[a0]
        if steps > MOST_STEPS:
            return False
        match = matcher.find_longest_match(a0, a1, b0, b1)
        if match.size:
            found += match.size
            waiting += [(a0, match.a, b0, match.b), (match.a + match.size, a1, match.b + match.size, b1)]
    return True
