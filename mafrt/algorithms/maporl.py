"""`maporl`: a debate in rounds, where a turn is worth what it and all later rounds score.

    R_{t,a} = [V_{t,a} + sum_{t'>t} g^{t'-t} mean_j V_{t',j}] / sum_{t'>=t} g^{t'-t}        g = round_gamma
            + own_t * (V_{t,a} - V_{t-1,a}) + peers_t * mean_{j != a}(V_{t+1,j} - V_{t,j})

    own_t   = alpha0 where most peers were right in round t-1, alpha1 where they were not
    peers_t = alpha2 where most peers were right in round t,   alpha3 where they were not

V_{t,a} is the reward of agent a's turn in round t, R the reward that `gae` then works with, turn by turn
(`bootstrap="none"`). Peers are "right" where their mean V exceeds `right_above`. With positive alphas all bonuses
favour help: correcting oneself and peers who get better next earn, spoiling an answer and peers who get worse cost.
alpha0 pays for taking over what right peers said, alpha1 for standing against wrong ones, alpha2 costs whoever leads
right peers astray, alpha3 pays for setting wrong ones right.

Source: MAPoRL (2502.18439), section on the multi-turn reward and its incentives. A round is a joint step as HAPPO
sees it (`mafrt.algorithms.happo`): agents that speak at the same time, or each once in turn.

Deviations: the paper's bonuses are for changes between wrong and right; here they are in proportion to the change, the
same for scores of 0 and 1, and defined for those in between. An agent that was silent in the round before or after
has no change there. An episode with a turn of unknown reward leaves the loss as a whole, since no reward that runs
over that turn is known. A task's outcome is added to every V (`outcome_to="all"` in the preset), so to every R, and
changes no bonus but through `right_above`. All alphas are 0 by default: `credit.assign` takes them as settings. Which
of a pair of alphas applies is read from this project's rules, not checked against the paper's own table.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from mafrt.algorithms.base import Trajectories
from mafrt.algorithms.gae import Gae, gae
from mafrt.algorithms.group_relative import drop_incomplete
from mafrt.algorithms.happo import joint_steps_of
from mafrt.algorithms.rewards import CreditContext
from mafrt.algorithms.stats import mean, total
from mafrt.config.schema import within

Round = dict[str, float]
"""Agent -> score of its turn in the round."""


@dataclass(frozen=True)
class MaporlBase(Gae):
    """MAPoRL's reward over rounds, in front of `gae`."""

    outcome_to: Literal["last", "end", "each", "all"] = "all"
    bootstrap: Literal["none", "agent", "team"] = "none"
    round_gamma: float = 1.0
    """discount per round, in [0, 1]"""
    alpha0: float = 0.0
    """weight of an agent's own change where most peers were right the round before"""
    alpha1: float = 0.0
    """weight of an agent's own change where most peers were wrong"""
    alpha2: float = 0.0
    """weight of the peers' next change where most of them are right now"""
    alpha3: float = 0.0
    """weight of the peers' next change where most of them are wrong now"""
    right_above: float = 0.5
    """mean score of the peers from which they count as right"""

    def __post_init__(self) -> None:
        super().__post_init__()
        within(self, 0, 1, "round_gamma")

    def credit(self, trajectories: Trajectories, context: CreditContext) -> dict[str, float]:
        return maporl(trajectories, self)


def maporl(trajectories: Trajectories, settings: MaporlBase) -> dict[str, float]:
    """Reshape all rewards, then fill advantages and returns as `gae` does."""
    drop_incomplete(trajectories)
    bonuses: list[float] = []
    for rows in trajectories:
        if not rows or rows[0].dropped:
            continue
        at = joint_steps_of([row.turn.agent for row in rows])
        rounds: list[Round] = [{} for _ in range(at[-1] + 1)]
        for row, t in zip(rows, at, strict=True):
            rounds[t][row.turn.agent] = row.reward - total(row.kl_rewards)
        for row, t in zip(rows, at, strict=True):
            bonus = _bonus(rounds, t, row.turn.agent, settings)
            bonuses.append(bonus)
            score = _ahead(rounds, t, row.turn.agent, settings.round_gamma) + bonus
            # A divergence from the reference is the turn's own: no other round is paid for it.
            row.reward = score + total(row.kl_rewards)
            row.token_rewards = {max(len(row.turn.action_ids) - 1, 0): score}
    return gae(trajectories, settings) | ({"round_bonus": mean(bonuses)} if bonuses else {})


def _ahead(rounds: Sequence[Round], t: int, agent: str, gamma: float) -> float:
    """The weighted mean of the agent's own score now and the team's mean scores from now on."""
    weights = [gamma**k for k in range(len(rounds) - t)]
    scores = [rounds[t][agent], *(mean(list(later.values())) for later in rounds[t + 1 :])]
    return total(w * score for w, score in zip(weights, scores, strict=True)) / total(weights)


def _bonus(rounds: Sequence[Round], t: int, agent: str, settings: MaporlBase) -> float:
    """What the agent earns for how its own answer changed and how its peers' answers change next."""
    bonus = 0.0
    if t > 0 and agent in rounds[t - 1] and (peers := _others(rounds[t - 1], agent)):
        right = mean(list(peers.values())) > settings.right_above
        bonus += (settings.alpha0 if right else settings.alpha1) * (rounds[t][agent] - rounds[t - 1][agent])
    if t + 1 < len(rounds) and (peers := _others(rounds[t], agent)):
        right = mean(list(peers.values())) > settings.right_above
        changes = [rounds[t + 1][name] - score for name, score in peers.items() if name in rounds[t + 1]]
        if changes:
            bonus += (settings.alpha2 if right else settings.alpha3) * mean(changes)
    return bonus


def _others(scores: Round, agent: str) -> Round:
    """The round without the agent itself."""
    return {name: score for name, score in scores.items() if name != agent}
