"""What happens to finished advantages: the metrics everybody reads, and an optional normalisation."""

from __future__ import annotations

import math
from collections.abc import Sequence

from mafrt.algorithms.rewards import Row
from mafrt.algorithms.stats import mean, standardise, std, total
from mafrt.core.types import Turn


def normalize(rows: Sequence[Row], how: str, *, by_turn: bool, eps: float = 1e-8) -> None:
    """Centre and scale the advantages of the rows in the loss; returns stay as they are.

    `how`: "none", "batch" (all agents together) or "agent" (each on its own, so that one agent's reward scale does
    not set another's step size; Dr. MAS's argument). Every action token counts alike, or every turn (`by_turn`, for
    action-level rules whose tokens share one advantage). Population deviation + eps; no spread gives zeros.
    """
    if how == "none":
        return
    groups: dict[str, list[Row]] = {}
    for row in rows:
        if row.turn.advantages:
            groups.setdefault(row.turn.agent if how == "agent" else "", []).append(row)
    for members in groups.values():
        lists = [(row.turn.advantages or [])[: 1 if by_turn else None] for row in members]
        flat = standardise([a for one in lists for a in one], eps=eps)
        start = 0
        for row, one in zip(members, lists, strict=True):
            own = flat[start : start + len(one)]
            start += len(one)
            row.turn.advantages = own * len(row.turn.action_ids) if by_turn else own


def credit_metrics(rows: Sequence[Row]) -> dict[str, float]:
    """Per agent: mean reward of its turns, mean and deviation of its advantages over tokens, mean divergence from the
    reference per token (k3) where that is filled. Of all turns: how many there are, and how many of them are out of
    the loss and why."""
    rewards: dict[str, list[float]] = {}
    advantages: dict[str, list[float]] = {}
    divergence: dict[str, list[float]] = {}
    for row in rows:
        if row.dropped is None:
            rewards.setdefault(row.turn.agent, []).append(row.reward)
            advantages.setdefault(row.turn.agent, []).extend(row.turn.advantages or ())
            divergence.setdefault(row.turn.agent, []).extend(_k3(row.turn))
    out: dict[str, float] = {}
    for agent in sorted(rewards):
        out[f"reward/{agent}"] = mean(rewards[agent])
        if advantages[agent]:
            out[f"advantage_mean/{agent}"] = mean(advantages[agent])
            out[f"advantage_std/{agent}"] = std(advantages[agent], unbiased=False)
        if divergence[agent]:
            out[f"ref_kl/{agent}"] = mean(divergence[agent])
    out["turns"] = float(len(rows))
    for why in ("unjudged", "nonfinite"):
        out[f"turns_{why}"] = float(total(row.dropped == why for row in rows))
    return out


def _k3(turn: Turn) -> list[float]:
    """exp(d) - d - 1 with d = log pi_ref - log pi per action token, finite ones only; empty without a reference."""
    old = turn.logprobs if turn.old_logprobs is None else turn.old_logprobs
    gaps = [ref - own for own, ref in zip(old, turn.ref_logprobs or (), strict=False)]
    return [math.exp(min(gap, 20.0)) - gap - 1.0 for gap in gaps if math.isfinite(gap)]
