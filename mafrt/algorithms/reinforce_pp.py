"""`reinforce_pp` and `reinforce_pp_baseline`: per-token rewards and one normalisation per agent; a critic if asked for.

    r_s = -kl_coef * (log pi - log pi_ref)_s, and the turn's reward, clipped to +-reward_clip, on its last token
    A_t = sum_{s >= t} gamma^(s - t) r_s within the turn
    A  <- (A - mean) / (std + eps) over all action tokens of the agent in the global batch

With a critic (`--critic`), A_t is the sum of r_s less its prediction, in the general form of GAE within the turn:

    delta_t = r_t + gamma V_{t+1} - V_t ;  A_t = delta_t + gamma gae_lambda A_{t+1}     V = 0 after the turn

which is sum_{s >= t} gamma^(s - t) r_s - V_t at gae_lambda 1. The critic is fitted to A_t + V_t from before the
normalisation. At `level="action"` the turn is one step: A = r - V_0 on all its tokens.

Source: REINFORCE++ (2501.03262), OpenRLHF; MARTI and multiagent-coaching train with it. The baseline variant first
subtracts the mean reward of the problem's trajectories (before the clip, as OpenRLHF does), one number a trajectory,
the mean over its turns; its normalisation counts trajectories too, so talkative ones do not weigh more. The turns of a
trajectory that is alone in its group get 0.

Where turns are paid as they come (`turn_credit="to_go"`), the turn's reward is all pay from its step on, each
turn's pay clipped by itself. The mean, of the batch or of the problem, is then one for each index of a turn of the
agent, over the turns that reached it, one number each: a mean in which long trajectories or long turns count more would
pay for being short. All turns of the agent share one deviation.

The normalisation of `reinforce_pp` weighs every token alike and divides by the population's deviation, as OpenRLHF
does. Deviation: it is per agent, since agents' rewards differ in scale; the caller passes the batch of all processes.
`returns` holds A before the normalisation, with a critic A + V. `log pi` is `old_logprobs`, or the sampler's where that
is None.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from mafrt.algorithms.base import Algorithm, Trajectories, structural
from mafrt.algorithms.credit import NOISE
from mafrt.algorithms.gae import explained, step_values
from mafrt.algorithms.group_relative import GroupStats
from mafrt.algorithms.rewards import CreditContext, Row, fill_later
from mafrt.algorithms.stats import mean, no_spread, std, total
from mafrt.config.schema import NotNegative, Share
from mafrt.core.errors import ConfigError


@dataclass(frozen=True)
class Reinforce(Algorithm):
    """REINFORCE++: per-token returns within a turn."""

    outcome_to: Literal["last", "end", "each", "all"] = "all"
    kl_in: Literal["loss", "reward"] = "reward"
    gamma: Share = 1.0
    """discount per step: a token within a turn"""
    reward_clip: NotNegative = 10.0
    """bound of a turn's reward, the KL penalty left out"""
    baseline: bool = structural(False)
    """subtract the group's mean reward first"""
    group: Literal["problem", "agent", "turn"] = structural("problem")
    """the group of the baseline: all turns of the problem, the same agent's, or the same agent's at the same turn"""
    eps: NotNegative = structural(1e-8)
    """added to the standard deviation"""
    turn_credit: Literal["to_go", "own"] = "to_go"
    """where turns are paid as they come, credit all that follows from a turn, or its own pay only (the papers' form)"""

    def __post_init__(self) -> None:
        if self.truncation == "bootstrap":
            raise ConfigError(
                f"truncation is bootstrap, and every turn of algorithm {self.name!r} ends its own return; choose mask "
                "or terminate."
            )
        super().__post_init__()

    def credit(self, trajectories: Trajectories, context: CreditContext) -> dict[str, float]:
        return reinforce_pp(trajectories, self, context)

    @property
    def trace_decay(self) -> float:
        """Lambda of the advantages within a turn; 1 without a critic."""
        return 1.0


def reinforce_pp(trajectories: Trajectories, settings: Reinforce, context: CreditContext) -> dict[str, float]:
    """Fill advantages and returns of all rows in the loss."""
    to_go = bool(context.by_turn) and settings.turn_credit == "to_go"
    if to_go:
        bound = settings.reward_clip
        fill_later(trajectories, own=bool(context.opponents), clip=lambda pay: max(-bound, min(bound, pay)))
    rows = [row for trajectory in trajectories for row in trajectory if row.dropped is None]
    if to_go:
        _clip(rows, settings)  # as their later pay is, and before a mean is taken: a sum may well be above the bound
    metrics, alone = _subtract_mean(rows, settings, to_go=to_go) if settings.baseline else ({}, [])
    if not to_go:
        _clip(rows, settings)
    agents: dict[str, list[Row]] = {}
    for row in rows:
        advantages, returns = _advantages(row, settings)
        if all(map(math.isfinite, returns)):
            row.fill(advantages, returns)
            row.turn.terms = {"the group": advantages[0]} if settings.baseline and advantages else None
            agents.setdefault(row.turn.agent, []).append(row)
        else:
            row.drop("nonfinite")
    for of_agent in agents.values():
        normalised = _by_index(of_agent, settings) if to_go else _normalised(of_agent, settings)
        for row, scaled in zip(of_agent, normalised, strict=True):
            row.turn.advantages = scaled
    for row in alone:
        if row.turn.advantages:  # nothing to compare it with, and the batch's mean is no comparison
            row.turn.advantages = [0.0] * len(row.turn.advantages)
    return metrics | (explained(trajectories, settings.level) if settings.critic_reads else {})


def _normalised(rows: Sequence[Row], settings: Reinforce) -> list[list[float]]:
    """The advantages of one agent's rows, centred and scaled.

    Statistics run over tokens, or with a baseline over trajectories, one number each: the mean over the agent's turns
    of the return at the first token. A spread that only the KL penalty or the critic makes is not scaled up to 1; one
    that is the critic's alone is its error, and the advantages are 0.
    """
    returns = [row.turn.advantages or [] for row in rows]
    if settings.baseline:
        numbers_of: dict[int, list[float]] = {}
        for row, values in zip(rows, returns, strict=True):
            if values:
                numbers_of.setdefault(row.episode, []).append(values[0])
        numbers = [mean(some) for some in numbers_of.values()]
    else:
        numbers = [value for values in returns for value in values]
    if not numbers or no_spread(numbers, _size(rows)):
        return [[0.0] * len(values) for values in returns]
    floor, penalised = 0.0, any(row.kl_rewards for row in rows)
    if penalised or settings.critic_reads:
        rewards = [total(row.token_rewards.values()) for row in rows]
        flat = no_spread(rewards, _size(rows))
        if not penalised and flat:
            return [[0.0] * len(values) for values in returns]
        floor = 1.0 if flat else NOISE * std(rewards, unbiased=False)
    centre, scale = mean(numbers), max(std(numbers, unbiased=False), floor) + settings.eps
    for row in rows:
        row.turn.baseline = None if settings.baseline else centre
    return [[(value - centre) / scale if scale else 0.0 for value in values] for values in returns]


def _by_index(rows: Sequence[Row], settings: Reinforce) -> list[list[float]]:
    """The same where turns are paid as they come: centred over the agent's turns of one index, scaled by one deviation.

    Statistics run over turns, one number each, the return at the first token. Turns without tokens enter none.
    """
    returns = [row.turn.advantages or [] for row in rows]
    indices: dict[int, list[int]] = {}
    for place, row in enumerate(rows):
        if returns[place]:
            indices.setdefault(row.own_turn, []).append(place)
    size = _size(rows)
    centres, gaps, reward_gaps = [0.0] * len(rows), list[float](), list[float]()
    for places in indices.values():
        first = [returns[place][0] for place in places]
        rewards = [_whole(rows[place]) for place in places]
        # With a baseline the problem's mean is subtracted already.
        centre = 0.0 if settings.baseline else mean(first)
        same = no_spread(first, size)
        for place, number in zip(places, first, strict=True):
            # The mean of equal numbers may be off by a rounding.
            centres[place] = number if same else centre
        gaps += [0.0 if same else number - centre for number in first]
        reward_gaps += [0.0] * len(rewards) if no_spread(rewards, size) else [r - mean(rewards) for r in rewards]
    flat, penalised = not any(reward_gaps), any(row.kl_rewards for row in rows)
    if not gaps or (flat and not penalised) or not any(gaps):
        return [[0.0] * len(values) for values in returns]
    floor = 1.0 if flat else NOISE * std(reward_gaps, unbiased=False)
    scale = max(std(gaps, unbiased=False), floor) + settings.eps
    for row, centre in zip(rows, centres, strict=True):
        row.turn.baseline = None if settings.baseline else centre
    return [
        [(value - centre) / scale if scale else 0.0 for value in values]
        for values, centre in zip(returns, centres, strict=True)
    ]


def _whole(row: Row) -> float:
    """The turn's reward and later pay, KL penalty left out."""
    return total([*row.token_rewards.values(), row.later])


def _size(rows: Sequence[Row]) -> float:
    """The largest reward that the numbers were computed from; their rounding is in proportion to it."""
    return max((max(abs(row.bare), abs(row.later)) for row in rows), default=0.0)


def _subtract_mean(rows: Sequence[Row], settings: Reinforce, *, to_go: bool) -> tuple[dict[str, float], list[Row]]:
    """Subtract the group's mean reward, one number a trajectory, from every row's reward.

    Returns the counts of groups, and the rows of trajectories that are alone in theirs. With `to_go` groups are the
    same agent's turns of one index.
    """
    groups: dict[tuple[object, ...], dict[int, list[Row]]] = {}
    group = "turn" if to_go else settings.group
    for row in rows:
        parts = {"problem": (), "agent": (row.turn.agent,), "turn": (row.turn.agent, row.own_turn)}[group]
        groups.setdefault((row.group, *parts), {}).setdefault(row.episode, []).append(row)
    group_stats = GroupStats()
    alone: list[Row] = []
    for trajectories in groups.values():
        rewards = [mean([_whole(row) for row in some]) for some in trajectories.values()]
        members = [row for some in trajectories.values() for row in some]
        group_stats.add(rewards, (row.turn.agent for row in members))
        if len(trajectories) == 1:
            alone += members
        # The mean of equal numbers may be off by a rounding.
        centre = rewards[0] if no_spread(rewards, _size(members)) else mean(rewards)
        for row in members:
            # Spread over the tokens where the turn is paid, so that spans lose the mean once and not once each.
            share = centre / len(row.token_rewards)
            row.token_rewards = {token: reward - share for token, reward in row.token_rewards.items()}
    return group_stats.metrics(), alone


def _advantages(row: Row, settings: Reinforce) -> tuple[list[float], list[float]]:
    """Advantages before the normalisation and returns, `[action tokens]` each; they are the same without a critic.

    Raises:
        ConfigError: there is a critic, and the turn has no values.
    """
    tokens = len(row.turn.action_ids)
    if not tokens:
        return [], []
    whole_turn = settings.critic_reads is not None and settings.level == "action"
    # The reward of each token, `[action tokens]`: the turn's reward where it is paid, later pay, and the penalty.
    penalties = row.kl_rewards or [0.0] * len(row.turn.action_ids)
    rewards = [row.token_rewards.get(token, 0.0) + penalty for token, penalty in enumerate(penalties)]
    rewards[-1] += row.later
    if whole_turn:
        rewards = [total(rewards)]
    values = step_values(row, settings.level) if settings.critic_reads else [0.0] * len(rewards)
    advantages = [0.0] * len(rewards)
    advantage = following = 0.0
    for step in reversed(range(len(rewards))):
        error = rewards[step] + settings.gamma * following - values[step]
        advantage = error + settings.gamma * settings.trace_decay * advantage
        advantages[step], following = advantage, values[step]
    returns = [a + v for a, v in zip(advantages, values, strict=True)]
    return (advantages * tokens, returns * tokens) if whole_turn else (advantages, returns)


def _clip(rows: Sequence[Row], settings: Reinforce) -> None:
    """Clip the rewards of turns as a whole, wherever their spans are paid."""
    for row in rows:
        reward = total(row.token_rewards.values())
        if abs(reward) > settings.reward_clip:
            # Scaling instead of cutting keeps the proportions of the spans.
            scale = settings.reward_clip / abs(reward)
            row.token_rewards = {token: scale * paid for token, paid in row.token_rewards.items()}
