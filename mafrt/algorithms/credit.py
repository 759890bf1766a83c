"""Credit: rewards to advantages, the metrics of them, and their optional normalisation."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from mafrt.algorithms.base import Algorithm, Trajectories, algorithm
from mafrt.algorithms.rewards import (
    CreditContext,
    Dropped,
    Row,
    are_opponents,
    fill_later,
    reward_rows,
)
from mafrt.algorithms.stats import mean, no_spread, standardise, std, total
from mafrt.config.resolve import user_line
from mafrt.core.errors import ConfigError, MafrtError
from mafrt.core.types import Episode

EPS = 1e-8
"""Added to the deviation."""
NOISE = 0.1
"""Advantages whose deviation is below this share of the returns' own are not scaled up any further."""


def assign(
    episodes: Sequence[Episode],
    rule: str | Algorithm = "ppo",
    context: CreditContext | None = None,
    **settings: Any,
) -> dict[str, float]:
    """Fill the advantages and returns of every turn.

    Args:
        episodes: the global batch. `turn.values` must be filled for rules with a critic.
        rule: an algorithm, or the name of one.
        context: facts about the batch that are no settings.
        settings: of the algorithm, in place of its own; or of the context.

    Returns the metrics of the credit (docs/runs.md).

    Raises:
        ConfigError: an unknown rule or setting, a value out of range, a missing critic or reference, or an error in a
            user's `credit`, with file and line.

    >>> def sample(outcome):
    ...     turn = mafrt.Turn("solver", [1], [2, 3], [-0.1, -0.1], "eos", "7", turn=0, env_step=0, adapter_version=0)
    ...     return mafrt.Episode(f"{outcome}", group="a problem", turns=[turn], outcome=outcome)
    >>> episodes = [sample(1.0), sample(0.0)]
    >>> metrics = mafrt.assign(episodes, "dr_grpo")
    >>> [episode.turns[0].advantages for episode in episodes]
    [[0.5, 0.5], [-0.5, -0.5]]
    """
    chosen, trajectories, about, spans_lost = _rows(episodes, rule, context, settings, penalise=True)
    observed = observed_returns(trajectories)
    try:
        metrics = dict(chosen.credit(trajectories, about))
    except MafrtError:
        raise
    except Exception as error:
        if not (where := user_line(error)):
            raise
        raise ConfigError(f"algorithm {chosen.name}: credit() raised {type(error).__name__}: {error}{where}") from error
    rows = [row for trajectory in trajectories for row in trajectory]
    for row in rows:
        if not all(map(math.isfinite, (*(row.turn.advantages or ()), *(row.turn.returns or ())))):
            row.drop("nonfinite")
        row.turn.paid = None if row.dropped else row.reward
        row.turn.parts = None if row.dropped else row.parts()
    metrics |= credit_metrics(rows, observed) | {"spans_unlocated": float(spans_lost)}
    if about.by_turn:
        metrics["paid_by_turn"] = 1.0
    # All tokens of a turn share one advantage here, so statistics weigh turns equally instead of tokens.
    shared = chosen.level == "action" or getattr(chosen, "joint_advantage", False)
    by_turn = shared and chosen.critic_reads is not None and chosen.mixer is None
    # After the metrics: a normalised deviation is 1 and carries no information.
    if chosen.normalize_advantages != "none":
        how, critic = chosen.normalize_advantages, chosen.critic_reads is not None
        normalize(rows, how, by_turn=by_turn, observed=observed, critic=critic)
    return metrics


def groups_without_spread(
    episodes: Sequence[Episode], rule: str | Algorithm, context: CreditContext | None = None, **settings: Any
) -> list[str]:
    """Names of the groups without a learning signal, sorted: all rewards equal, or fewer than two known.

    A sample's reward is the mean over its turns, and pay by turn is added up, both without the
    overlong and KL penalties: DAPO (2503.14476, eq. 11) filters on correctness, and wrong answers of unequal length
    are equally wrong. Arguments as of `assign`; advantages and returns are not written.
    """
    chosen, trajectories, about, _ = _rows(episodes, rule, context, settings, overlong_buffer=0.0)
    by_turn = about.by_turn and getattr(chosen, "turn_credit", "to_go") == "to_go"
    rewards: dict[str, list[float]] = {episode.group: [] for episode in episodes}
    for episode, rows in zip(episodes, trajectories, strict=True):
        known = [row for row in rows if row.dropped is None]
        if known:
            # Pay by turn is added up, since a mean would call a long episode equal to a short one.
            paid = total(row.pay for row in known) if by_turn else 0.0
            rewards[episode.group].append(mean([r.reward - (r.pay if by_turn else 0.0) for r in known]) + paid)
    return sorted(group for group, numbers in rewards.items() if len(numbers) < 2 or no_spread(numbers))


def turn_rewards(
    episodes: Sequence[Episode], rule: str | Algorithm, context: CreditContext | None = None, **settings: Any
) -> list[list[float | None]]:
    """Worth of each turn of each episode, without the KL penalty; None where unknown.

    It is the turn's reward as `assign` computes it, and where turns are paid as they come, later pay (`Row.later`).
    Arguments as of `assign`; advantages and returns are not written.
    """
    chosen, trajectories, about, _ = _rows(episodes, rule, context, settings)
    if about.by_turn and chosen.share == "own" and getattr(chosen, "turn_credit", "to_go") == "to_go":
        fill_later(trajectories, own=bool(about.opponents))
    return [[None if row.dropped else row.reward + row.later for row in rows] for rows in trajectories]


def _rows(
    episodes: Sequence[Episode],
    rule: str | Algorithm,
    context: CreditContext | None,
    settings: Mapping[str, Any],
    *,
    penalise: bool = False,
    **changes: Any,
) -> tuple[Algorithm, Trajectories, CreditContext, int]:
    """The algorithm, the batch's rows (with the KL: `penalise`), the context completed, and the spans not located."""
    about = context or CreditContext()
    if settings or isinstance(rule, str):
        names = {item.name for item in dataclasses.fields(CreditContext)} - {"kl_coef"}
        about = dataclasses.replace(about, **{name: value for name, value in settings.items() if name in names})
        rule = algorithm(rule, **{name: value for name, value in settings.items() if name not in names})
    paying = dataclasses.replace(rule, **changes) if changes else rule
    kl_coef = rule.kl_coef if about.kl_coef is None else about.kl_coef
    in_reward = penalise and rule.kl_in == "reward"
    trajectories, lost = reward_rows(episodes, paying, about, kl_coef=kl_coef if in_reward else 0.0)
    by_turn = about.by_turn
    if by_turn is None:  # whether some turn of an episode of several is paid by itself
        by_turn = any(row.pay != 0.0 or row.late for rows in trajectories if len(rows) > 1 for row in rows)
    opponents = are_opponents(trajectories) if about.opponents is None else about.opponents
    return rule, trajectories, dataclasses.replace(about, by_turn=by_turn, opponents=opponents), lost


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
                pay = row.bare
                rest.append(pay)
                seen.setdefault(row.turn.agent, {}).setdefault(row.own_turn, []).append((pay, total(rest)))
    observed = {}
    for agent, positions in seen.items():
        pairs = [pair for some in positions.values() for pair in some]
        alike = list(positions.values())
        if max(map(len, alike)) < 2:
            alike = [pairs]  # one turn at each position: they are all that can be compared
        flat = all(no_spread([pay for pay, _ in some]) and no_spread([to_end for _, to_end in some]) for some in alike)
        every = [to_end for _, to_end in pairs]
        observed[agent] = ObservedReturns(flat, std(every, unbiased=False))
    return observed


def normalize(
    rows: Sequence[Row], how: str, *, by_turn: bool, observed: Mapping[str, ObservedReturns], critic: bool = False
) -> None:
    """Centre and scale the advantages of the rows in the loss; returns stay as they are.

    Every action token counts alike, or every turn (`by_turn`, for rules whose tokens share one advantage). Population
    deviation + eps; no spread gives zeros. Where the observed returns of all agents of a group are flat, the spread of
    advantages is the critic's noise, and they become 0. With a KL penalty in the reward, what is left there is the
    penalty: critics' advantages become the penalties from each token to its turn's end, centred and never scaled up.
    Elsewhere the divisor is at least `NOISE` times the deviation of the observed returns.

    Args:
        rows: of the batch.
        how: "batch" (all agents together) or "agent" (each on its own, so that one agent's reward scale does
            not set another's step size; Dr. MAS's argument).
        by_turn: count turns instead of tokens.
        observed: of each agent.
        critic: whether the advantages are a critic's.
    """
    groups: dict[str, list[Row]] = {}
    for row in rows:
        if row.turn.advantages:
            groups.setdefault(row.turn.agent if how == "agent" else "", []).append(row)
    for members in groups.values():
        # All tokens of a turn are equal here; counting them all would weigh long turns more.
        lists = [(row.turn.advantages or [])[: 1 if by_turn else None] for row in members]
        returns = [observed[agent] for agent in {row.turn.agent for row in members} if agent in observed]
        floor = NOISE * max((agent_returns.spread for agent_returns in returns), default=0.0)
        if all(agent_returns.flat for agent_returns in returns) and returns:
            floor = 1.0
            if not any(row.kl_rewards for row in members):
                lists = [[0.0] * len(values) for values in lists]
            elif critic:
                lists = [_penalties_to_go(row)[: len(values)] for row, values in zip(members, lists, strict=True)]
        scaled = standardise([advantage for values in lists for advantage in values], eps=EPS, floor=floor)
        start = 0
        for row, values in zip(members, lists, strict=True):
            advantages = scaled[start : start + len(values)]
            start += len(values)
            row.turn.advantages = advantages * len(row.turn.action_ids) if by_turn else advantages


def _penalties_to_go(row: Row) -> list[float]:
    """The KL penalty from each action token to the end of its turn; zeros for a turn without one."""
    backwards = list(itertools.accumulate(reversed(row.kl_rewards or [0.0] * len(row.turn.action_ids))))
    return backwards[::-1]


def credit_metrics(rows: Sequence[Row], observed: Mapping[str, ObservedReturns]) -> dict[str, float]:
    """Metrics of the finished credit per agent, over turns in the loss; and how many turns are out of it, by reason."""
    out = {"turns": float(len(rows))}
    known = [row for row in rows if row.dropped is None]
    for agent in sorted({row.turn.agent for row in known}):
        of_agent = [row for row in known if row.turn.agent == agent]
        turns = [row.turn for row in of_agent]
        out[f"reward/{agent}"] = mean([row.reward for row in of_agent])
        if agent in observed:
            out[f"flat_returns/{agent}"] = float(observed[agent].flat)
        if advantages := [advantage for turn in turns for advantage in turn.advantages or ()]:
            out[f"advantage_mean/{agent}"] = mean(advantages)
            out[f"advantage_std/{agent}"] = std(advantages, unbiased=False)
        olds = [turn.logprobs if turn.old_logprobs is None else turn.old_logprobs for turn in turns]
        refs = [turn.ref_logprobs or () for turn in turns]
        gaps = [ref - old for both in zip(olds, refs, strict=True) for old, ref in zip(*both, strict=False)]
        # k3, bounded as in the losses: one far-off token must not make the mean infinite.
        if k3 := [math.exp(min(gap, 20.0)) - gap - 1.0 for gap in gaps if math.isfinite(gap)]:
            out[f"ref_kl/{agent}"] = mean(k3)
    return out | {f"turns_{why}": float(sum(row.dropped == why for row in rows)) for why in get_args(Dropped)}
