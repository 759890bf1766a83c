"""Metrics of finished advantages, and their optional normalisation."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mafrt.algorithms.rewards import Dropped, Row
from mafrt.algorithms.stats import mean, no_spread, standardise, std, total
from mafrt.core.types import Turn

EPS = 1e-8
"""Added to the deviation."""
NOISE = 0.1
"""Advantages whose deviation is below this share of the returns' own are not scaled up any further."""


@dataclass(frozen=True)
class ObservedReturns:
    """Rewards seen from each turn of an agent to the end of its episode, without the critic and the KL penalty."""

    flat: bool
    """returns and rewards are equal at every position, so they cannot distinguish turns"""
    spread: float
    """population deviation over all turns"""


def observed_returns(trajectories: Sequence[Sequence[Row]]) -> dict[str, ObservedReturns]:
    """Per agent, over its turns of known reward. Read before credit, which may reshape rewards."""
    seen: dict[str, dict[int, list[tuple[float, float]]]] = {}
    for rows in trajectories:
        rest: list[float] = []
        for row in reversed(rows):
            if row.dropped is None:
                # The KL penalty always differs between turns; it would hide that the rewards themselves are flat.
                own = row.bare
                rest.append(own)
                seen.setdefault(row.turn.agent, {}).setdefault(row.own_turn, []).append((own, total(rest)))
    observed = {}
    for agent, positions in seen.items():
        pairs = [pair for some in positions.values() for pair in some]
        alike = list(positions.values())
        if max(map(len, alike)) < 2:
            alike = [pairs]  # one turn at each position: they are all that can be compared
        flat = all(no_spread([own for own, _ in some]) and no_spread([to_end for _, to_end in some]) for some in alike)
        every = [to_end for _, to_end in pairs]
        observed[agent] = ObservedReturns(flat, std(every, unbiased=False))
    return observed


def normalize(rows: Sequence[Row], how: str, *, by_turn: bool, observed: Mapping[str, ObservedReturns]) -> None:
    """Centre and scale the advantages of the rows in the loss; returns stay as they are.

    Every action token counts alike, or every turn (`by_turn`, for rules whose tokens share one advantage). Population
    deviation + eps; no spread gives zeros. Where the observed returns of all agents of a group are flat, the spread of
    advantages is the critic's noise, and they become 0 (with a KL penalty in the reward they are only centred and never
    scaled up). Elsewhere the divisor is at least `NOISE` times the deviation of the observed returns.

    Args:
        rows: of the batch.
        how: "none", "batch" (all agents together) or "agent" (each on its own, so that one agent's reward scale does
            not set another's step size; Dr. MAS's argument).
        by_turn: count turns instead of tokens.
        observed: of each agent.
    """
    if how == "none":
        return
    groups: dict[str, list[Row]] = {}
    for row in rows:
        if row.turn.advantages:
            groups.setdefault(row.turn.agent if how == "agent" else "", []).append(row)
    for members in groups.values():
        # All tokens of a turn are equal here; counting them all would weigh long turns more.
        lists = [(row.turn.advantages or [])[: 1 if by_turn else None] for row in members]
        flat = [advantage for own in lists for advantage in own]
        returns = [observed[agent] for agent in {row.turn.agent for row in members} if agent in observed]
        if all(agent_returns.flat for agent_returns in returns) and returns:
            penalised = any(row.kl_rewards for row in members)
            scaled = standardise(flat, eps=EPS, floor=1.0) if penalised else [0.0] * len(flat)
        else:
            scaled = standardise(
                flat, eps=EPS, floor=NOISE * max((agent_returns.spread for agent_returns in returns), default=0.0)
            )
        start = 0
        for row, own in zip(members, lists, strict=True):
            advantages = scaled[start : start + len(own)]
            start += len(own)
            row.turn.advantages = advantages * len(row.turn.action_ids) if by_turn else advantages


def credit_metrics(rows: Sequence[Row], observed: Mapping[str, ObservedReturns]) -> dict[str, float]:
    """Metrics of the finished credit.

    Per agent: mean reward of its turns, mean and deviation of its advantages over tokens, whether its returns are
    flat, mean KL(policy || base) per token (k3) where the reference is filled. Of all turns: how many there are, and
    how many of them are out of the loss and why.
    """
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
        if agent in observed:
            out[f"flat_returns/{agent}"] = float(observed[agent].flat)
        if advantages[agent]:
            out[f"advantage_mean/{agent}"] = mean(advantages[agent])
            out[f"advantage_std/{agent}"] = std(advantages[agent], unbiased=False)
        if divergence[agent]:
            out[f"ref_kl/{agent}"] = mean(divergence[agent])
    out["turns"] = float(len(rows))
    reasons: tuple[Dropped, ...] = ("unjudged", "nonfinite", "truncated", "no_outcome", "cut_by_length")
    for why in reasons:
        out[f"turns_{why}"] = float(total(row.dropped == why for row in rows))
    return out


def _k3(turn: Turn) -> list[float]:
    """exp(d) - d - 1 with d = log pi_ref - log pi per action token, finite ones only; empty without a reference."""
    old = turn.logprobs if turn.old_logprobs is None else turn.old_logprobs
    gaps = [ref - own for own, ref in zip(old, turn.ref_logprobs or (), strict=False)]
    # Bounded as in the losses: one far-off token must not make the mean infinite.
    return [math.exp(min(gap, 20.0)) - gap - 1.0 for gap in gaps if math.isfinite(gap)]
