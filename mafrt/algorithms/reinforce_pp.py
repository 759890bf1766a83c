"""`reinforce_pp` and `reinforce_pp_baseline`: per-token rewards, no critic, one normalisation per agent.

    r_s = -beta * (log pi - log pi_ref)_s, and the turn's reward, clipped to +-reward_clip, on its last token
    A_t = sum_{s >= t} gamma^(s - t) r_s within the turn
    A  <- (A - mean) / (std + eps) over all action tokens of the agent in the global batch

Source: REINFORCE++ (2501.03262), OpenRLHF; what MARTI and multiagent-coaching train with. The baseline variant first
subtracts the mean reward of the problem's turns (before the clip, as OpenRLHF does); a group of one gets 0.

The normalisation weighs every token alike and divides by the population's deviation, as OpenRLHF does. Deviation: it
is per agent, since agents' rewards differ in scale; the caller passes the batch of all processes.
`returns` holds A before the normalisation. `log pi` is `old_logprobs`, or the sampler's where that is None.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from mafrt.algorithms.group_relative import GroupTally
from mafrt.algorithms.rewards import Row
from mafrt.algorithms.stats import mean, standardise, total
from mafrt.algorithms.validation import choice, flag, number
from mafrt.core.errors import ConfigError


@dataclass(frozen=True)
class ReinforceSettings:
    """Settings of `reinforce_pp` and `reinforce_pp_baseline`."""

    gamma: float = 1.0
    """Discount per token within a turn."""
    beta: float = 0.0
    """Weight of the per-token divergence from the reference in the reward; 0 needs no reference."""
    reward_clip: float = 10.0
    """Bound of a turn's reward (of each span's, where a verdict has spans)."""
    baseline: bool = False
    """Subtract the group's mean reward first."""
    group: Literal["problem", "agent", "turn"] = "problem"
    """Whose mean that is: all turns of the problem, the same agent's, or the same agent's at the same turn."""
    eps: float = 1e-8
    """Added to the standard deviation."""

    def __post_init__(self) -> None:
        number("gamma", self.gamma, 0.0, 1.0)
        number("beta", self.beta, 0.0)
        number("reward_clip", self.reward_clip, 0.0)
        number("eps", self.eps, 0.0)
        flag("baseline", self.baseline)
        choice("group", self.group, ("problem", "agent", "turn"))


def reinforce_pp(trajectories: Sequence[Sequence[Row]], settings: ReinforceSettings) -> dict[str, float]:
    """Fill advantages and returns of all rows in the loss.

    Raises:
        ConfigError: `beta` is not 0 and a turn has no `ref_logprobs`.
    """
    rows = [row for trajectory in trajectories for row in trajectory if row.dropped is None]
    metrics = _subtract_mean(rows, settings) if settings.baseline else {}
    agents: dict[str, list[Row]] = {}
    for row in rows:
        returns = _returns(row, settings)
        if all(map(math.isfinite, returns)):
            row.fill(returns, returns)
            agents.setdefault(row.turn.agent, []).append(row)
        else:
            row.drop("nonfinite")
    for own in agents.values():
        flat = standardise([a for row in own for a in row.turn.returns or ()], eps=settings.eps)
        start = 0
        for row in own:
            end = start + len(row.turn.action_ids)
            row.turn.advantages, start = flat[start:end], end
    return metrics


def _subtract_mean(rows: Sequence[Row], settings: ReinforceSettings) -> dict[str, float]:
    """Subtract the mean reward of the group from every row's reward."""
    groups: dict[tuple[object, ...], list[Row]] = {}
    for row in rows:
        own = {"problem": (), "agent": (row.turn.agent,), "turn": (row.turn.agent, row.turn.turn)}[settings.group]
        groups.setdefault((row.group, *own), []).append(row)
    tally = GroupTally()
    for members in groups.values():
        rewards = [total(row.token_rewards.values()) for row in members]
        tally.add(rewards, (row.turn.agent for row in members))
        centre = mean(rewards)
        for row in members:
            # Spread over the places where the turn is paid, so that spans lose the mean once and not once each.
            share = centre / len(row.token_rewards)
            row.token_rewards = {token: reward - share for token, reward in row.token_rewards.items()}
    return tally.metrics()


def _returns(row: Row, settings: ReinforceSettings) -> list[float]:
    """Discounted sums of the turn's token rewards, `[action tokens]`."""
    turn, tokens = row.turn, len(row.turn.action_ids)
    kl = [0.0] * tokens
    if settings.beta:
        if turn.ref_logprobs is None:
            raise ConfigError(
                f"rule 'reinforce_pp' with beta={settings.beta} needs a reference: turn {turn.turn} of agent "
                f"{turn.agent!r} has no ref_logprobs; fill them first, or set beta to 0."
            )
        old = turn.logprobs if turn.old_logprobs is None else turn.old_logprobs
        kl = [a - b for a, b in zip(old, turn.ref_logprobs, strict=True)]
    out = [0.0] * tokens
    running = 0.0
    for token in reversed(range(tokens)):
        reward = row.token_rewards.get(token, 0.0)
        clipped = max(-settings.reward_clip, min(settings.reward_clip, reward))
        running = clipped - settings.beta * kl[token] + settings.gamma * running
        out[token] = running
    return out
