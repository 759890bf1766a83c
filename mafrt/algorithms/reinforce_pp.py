"""`reinforce_pp` and `reinforce_pp_baseline`: per-token rewards, no critic, one normalisation per agent.

    r_s = -kl_coef * (log pi - log pi_ref)_s, and the turn's reward, clipped to +-reward_clip, on its last token
    A_t = sum_{s >= t} gamma^(s - t) r_s within the turn
    A  <- (A - mean) / (std + eps) over all action tokens of the agent in the global batch

Source: REINFORCE++ (2501.03262), OpenRLHF; MARTI and multiagent-coaching train with it. The baseline variant first
subtracts the mean reward of the problem's trajectories (before the clip, as OpenRLHF does), one number a trajectory,
the mean over its turns; its normalisation counts trajectories too, so talkative ones do not weigh more. A group of one
gets 0.

The normalisation of `reinforce_pp` weighs every token alike and divides by the population's deviation, as OpenRLHF
does. Deviation: it is per agent, since agents' rewards differ in scale; the caller passes the batch of all processes.
`returns` holds A before the normalisation. `log pi` is `old_logprobs`, or the sampler's where that is None.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from mafrt.algorithms.base import Algorithm, Trajectories, structural
from mafrt.algorithms.group_relative import GroupStats
from mafrt.algorithms.normalize import NOISE
from mafrt.algorithms.rewards import CreditContext, Row
from mafrt.algorithms.stats import mean, no_spread, std, total
from mafrt.config.schema import at_least, check_bool, check_choice, within


@dataclass(frozen=True)
class Reinforce(Algorithm):
    """REINFORCE++: per-token returns within a turn."""

    outcome_to: Literal["last", "end", "each", "all"] = "all"
    kl_in: Literal["loss", "reward"] = "reward"
    gamma: float = 1.0
    """discount per step: a token within a turn"""
    reward_clip: float = 10.0
    """bound of a turn's reward, the KL penalty left out"""
    baseline: bool = structural(False)
    """subtract the group's mean reward first"""
    group: Literal["problem", "agent", "turn"] = structural("problem")
    """the group of the baseline: all turns of the problem, the same agent's, or the same agent's at the same turn"""
    eps: float = structural(1e-8)
    """added to the standard deviation"""

    def __post_init__(self) -> None:
        super().__post_init__()
        within(self, 0, 1, "gamma")
        at_least(self, 0, "reward_clip", "eps")
        check_bool("baseline", self.baseline)
        check_choice("group", self.group, ("problem", "agent", "turn"))

    def credit(self, trajectories: Trajectories, context: CreditContext) -> dict[str, float]:
        return reinforce_pp(trajectories, self)


def reinforce_pp(trajectories: Trajectories, settings: Reinforce) -> dict[str, float]:
    """Fill advantages and returns of all rows in the loss."""
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
        for row, scaled in zip(own, _normalised(own, settings), strict=True):
            row.turn.advantages = scaled
    return metrics


def _normalised(rows: Sequence[Row], settings: Reinforce) -> list[list[float]]:
    """The returns of one agent's rows, centred and scaled.

    Statistics run over tokens, or with a baseline over trajectories, one number each: the mean over the agent's turns
    of the return at the first token. A spread that only the KL penalty makes is not scaled up to 1.
    """
    returns = [row.turn.returns or [] for row in rows]
    if settings.baseline:
        numbers_of: dict[int, list[float]] = {}
        for row, values in zip(rows, returns, strict=True):
            if values:
                numbers_of.setdefault(row.episode, []).append(values[0])
        numbers = [mean(some) for some in numbers_of.values()]
    else:
        numbers = [value for values in returns for value in values]
    if not numbers or no_spread(numbers):
        return [[0.0] * len(values) for values in returns]
    floor = 0.0
    if any(row.kl_rewards for row in rows):
        rewards = [total(row.token_rewards.values()) for row in rows]
        floor = 1.0 if no_spread(rewards) else NOISE * std(rewards, unbiased=False)
    centre, scale = mean(numbers), max(std(numbers, unbiased=False), floor) + settings.eps
    return [[(value - centre) / scale if scale else 0.0 for value in values] for values in returns]


def _subtract_mean(rows: Sequence[Row], settings: Reinforce) -> dict[str, float]:
    """Subtract the group's mean reward, one number a trajectory, from every row's reward."""
    groups: dict[tuple[object, ...], dict[int, list[Row]]] = {}
    for row in rows:
        own = {"problem": (), "agent": (row.turn.agent,), "turn": (row.turn.agent, row.own_turn)}[settings.group]
        groups.setdefault((row.group, *own), {}).setdefault(row.episode, []).append(row)
    group_stats = GroupStats()
    for trajectories in groups.values():
        rewards = [mean([total(row.token_rewards.values()) for row in some]) for some in trajectories.values()]
        members = [row for some in trajectories.values() for row in some]
        group_stats.add(rewards, (row.turn.agent for row in members))
        centre = mean(rewards)
        for row in members:
            # Spread over the tokens where the turn is paid, so that spans lose the mean once and not once each.
            share = centre / len(row.token_rewards)
            row.token_rewards = {token: reward - share for token, reward in row.token_rewards.items()}
    return group_stats.metrics()


def _returns(row: Row, settings: Reinforce) -> list[float]:
    """Discounted sums of the turn's token rewards, `[action tokens]`."""
    tokens = len(row.turn.action_ids)
    out = [0.0] * tokens
    running = 0.0
    # The turn's reward is clipped as a whole, wherever its spans are paid.
    reward = total(row.token_rewards.values())
    # Scaling instead of cutting keeps the proportions of the spans.
    kept = settings.reward_clip / abs(reward) if abs(reward) > settings.reward_clip else 1.0
    for token in reversed(range(tokens)):
        penalty = row.kl_rewards[token] if row.kl_rewards else 0.0
        running = kept * row.token_rewards.get(token, 0.0) + penalty + settings.gamma * running
        out[token] = running
    return out
