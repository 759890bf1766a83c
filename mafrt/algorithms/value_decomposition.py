"""`vdn`, `qmix`: counterfactual credit. Team Q with this turn, minus team Q with the agent's alternative turns.

    A_i = Q_tot(s, a) - mean over the group's alternatives a_i' of Q_tot(s, (a_-i, a_i'))  +  residual_weight * D
    D   = sum_k (gamma lambda)^k (r_team + gamma Q_tot' - Q_tot) over this joint step and those after it

`turn.values` hold the agent's own Q_i(turn), the same on every token. With VDN, Q_tot is the sum of the Q_i, the
teammates' Q cancel, and the first term is Q_i - mean of the group's Q_i. With QMIX, `joint(turn, qs)` evaluates Q_tot
in the turn's state, with the teammates' actual turns, for each candidate value of Q_i in `qs`. A joint step is one step
of the environment: all turns spoken at the same time (`mafrt.training.mixer_critic`). The alternatives are the same
agent's n-th turns in all samples of the problem, this turn included. A group of one has no first term and is counted.
All tokens of a turn carry its advantage.

D is the team's reward beyond its Q_tot, generalised over later joint steps as in `mafrt.algorithms.gae`. With weight 1,
Q_tot(s, a) cancels: a turn is credited with the observed return minus the counterfactual baseline.

`returns` are the turn's own reward, the input of the mixer's temporal differences (`mafrt.training.mixer_critic`), not
a regression target of a value head.

Source: VDN, Sunehag 2017 (1706.05296); QMIX, Rashid 2018 (1803.11485); the baseline is the counterfactual one of COMA,
Foerster 2018 (1705.08926), eq. 4, with the samples of the group in place of an expectation under the policy.

Deviations: both papers act greedily on Q, which needs Q of every possible text; here Q credits a policy. A policy
trained on Q alone (weight 0) quickly exploits the errors of Q and collapses before Q is corrected, hence D. After the
first turn the samples' contexts differ, so alternatives come from similar states, not from the same one. A turn of
unknown reward makes its joint step's reward unknown: the whole step leaves the loss, and the step before it bootstraps
from its Q_tot.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from mafrt.algorithms.base import Algorithm, Trajectories
from mafrt.algorithms.group_relative import GroupStats
from mafrt.algorithms.rewards import CreditContext, Joint, Row, moved_pay
from mafrt.algorithms.stats import mean, total
from mafrt.config.algorithm_groups import MixerSettings
from mafrt.config.schema import Share
from mafrt.core.errors import ConfigError


@dataclass(frozen=True)
class Mixed(Algorithm, MixerSettings):
    """Counterfactual credit from a mixture of the agents' Q."""

    gamma: Share = 1.0
    """discount per step: a joint step, here and in the mixer's temporal differences"""
    gae_lambda: Share = 0.95
    """weight of later residuals, here and in the mixer's temporal differences: 0 trusts Q_tot, 1 the rewards"""
    residual_weight: Share = 1.0
    """weight of the team's reward beyond its Q, in [0, 1]; 0 credits by Q alone"""
    normalize_advantages: Literal["none", "batch", "agent"] = "agent"

    critic_input: ClassVar[Literal["context", "transcript"] | None] = "context"
    needs_groups: ClassVar[bool] = True
    needs_several_agents: ClassVar[bool] = True
    critic_class: ClassVar[str] = "mafrt.training.mixer_critic:MixerCritic"
    one_base: ClassVar[str] = (
        "reads hidden states of one base with its mixer, and those of different bases have neither size nor meaning "
        "in common"
    )
    metrics: ClassVar[Mapping[str, tuple[str, str]]] = {
        "q_tot": ("mean value of the batch's joint steps after the update", "reward"),
        "replay_steps": ("joint steps in the replay buffer of the mixer", "steps"),
    }

    @property
    def adds_agents(self) -> bool:
        return True

    def credit(self, trajectories: Trajectories, context: CreditContext) -> dict[str, float]:
        return mixed(trajectories, self, context.joint if self.mixer == "qmix" else None)


def mixed(trajectories: Trajectories, settings: Mixed, joint: Joint | None) -> dict[str, float]:
    """Fill advantages and returns of all rows from `turn.values`.

    Args:
        trajectories: rows of each episode.
        settings: gamma, lambda and the residual's weight.
        joint: Q_tot for other values of one Q_i; None: Q_tot is the sum of the Q_i.

    Raises:
        ConfigError: a turn has no values, or `joint` is missing.
    """
    if settings.mixer == "qmix" and joint is None:
        raise ConfigError("rule 'qmix' needs `joint`, the mixer's Q_tot; give it, or take 'vdn'.")
    groups: dict[tuple[str, str, int], list[tuple[Row, float]]] = {}
    for rows in trajectories:
        moved = moved_pay(rows)
        beyond = _residuals(rows, settings, joint, moved)
        # What a step pays follows from all its turns, and the mixer adds up what they were paid.
        paid: dict[int, list[float]] = {}
        for row in rows:
            if row.dropped is None:
                paid.setdefault(row.step, []).extend([row.reward, moved.get(row.key, 0.0)])
        speakers = Counter(row.step for row in rows if row.dropped is None and row.turn.action_ids)
        spoken: dict[str, int] = {}
        for row in rows:
            time = spoken[row.turn.agent] = spoken.get(row.turn.agent, 0) + 1
            tokens = len(row.turn.action_ids)
            if row.dropped is not None:
                continue
            row.fill([0.0] * tokens, [total(paid[row.step]) / max(speakers[row.step], 1)] * tokens)
            if tokens:
                pair = row, settings.residual_weight * beyond[row.turn.env_step]
                groups.setdefault((row.group, row.turn.agent, time), []).append(pair)
    group_stats = GroupStats()
    for members in groups.values():
        # Sorted, so that the order of the episodes cannot change the rounding of the mixer's sums.
        alternatives = sorted(_own(row) for row, _ in members)
        terms = [
            {"the agent's others": _against(row, alternatives, joint), "the critic": residual}
            for row, residual in members
        ]
        advantages = [sum(each.values()) for each in terms]
        group_stats.add(advantages, (row.turn.agent for row, _ in members))
        for (row, _), advantage, each in zip(members, advantages, terms, strict=True):
            row.turn.advantages, row.turn.terms = [advantage] * len(row.turn.action_ids), each
    return group_stats.metrics()


def _against(row: Row, alternatives: Sequence[float], joint: Joint | None) -> float:
    """The counterfactual term of a row's advantage."""
    value = _own(row)
    # Equal alternatives (sorted) have no counterfactual signal; the mixer's rounding must not make one.
    if alternatives[0] == alternatives[-1]:
        return 0.0
    if joint is None:
        return value - mean(alternatives)
    q_tot = list(joint(row, alternatives))
    return q_tot[alternatives.index(value)] - mean(q_tot)


def _residuals(
    rows: Sequence[Row], settings: Mixed, joint: Joint | None, moved: Mapping[tuple[int, int], float]
) -> dict[int, float]:
    """D of every joint step of one episode; drops the rows of a step whose reward is unknown."""
    steps: dict[int, list[Row]] = {}
    for row in rows:
        if row.turn.action_ids and not math.isfinite(_own(row)):
            row.drop("nonfinite")
        steps.setdefault(row.turn.env_step, []).append(row)
    residuals: dict[int, float] = {}
    ahead: float | None = 0.0
    residual = 0.0
    for step, members in reversed(steps.items()):
        gone = next((row.dropped for row in members if row.dropped), None)
        # Without a residual the step's reward is not used, so an unknown one does not exclude the turns.
        if settings.residual_weight and (gone or ahead is None):
            for row in members:
                row.drop(gone or "nonfinite")
        speakers = [row for row in members if row.turn.action_ids]
        now = _q_tot(speakers, joint) if all(math.isfinite(_own(row)) for row in speakers) else None
        if gone and not speakers:
            now = None  # a step without words has no value that could stand for its unknown reward
        if gone or ahead is None or now is None:
            residual, residuals[step], ahead = 0.0, 0.0, now
            continue
        earned = total([row.reward for row in members] + [moved.get(row.key, 0.0) for row in members])
        residual = earned + settings.gamma * ahead - now + settings.gamma * settings.gae_lambda * residual
        residuals[step], ahead = residual, now
    return residuals


def _q_tot(speakers: Sequence[Row], joint: Joint | None) -> float:
    """Q_tot of a joint step with its actual turns; 0 if the step has no turn."""
    if joint is not None and speakers:
        return next(iter(joint(speakers[0], [_own(speakers[0])])))
    return total(_own(row) for row in speakers)


def _own(row: Row) -> float:
    """The turn's Q_i."""
    if not row.turn.values:
        raise ConfigError(
            f"rules 'vdn' and 'qmix' need a mixer: turn {row.turn.turn} of agent {row.turn.agent!r} has no values; "
            "fill turn.values with its Q, or take a rule without a critic such as 'grpo'."
        )
    return row.turn.values[0]
