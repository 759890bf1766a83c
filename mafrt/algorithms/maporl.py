"""`maporl`: debate in rounds; the reward of a turn is its own score averaged with those of all later rounds.

    R_{t,a} = [V_{t,a} + sum_{t'>t} g^{t'-t} mean_j V_{t',j}] / sum_{t'>=t} g^{t'-t}        g = round_gamma
            + own_{t,a} + influence_{t,a}

V_{t,a} is the reward of agent a's turn in round t; R is the reward passed to `gae`, turn by turn (`bootstrap="none"`).
An answer is right if its score exceeds `right_above`; the others are right if their mean does. The bonuses of the
authors (`bonus_rule`) are:

| own answer, a round before and now | others were right before | others were wrong |
|---|---|---|
| right -> wrong | -alpha1 | -alpha0 |
| wrong -> right | +alpha0 | +alpha1 |

| the others, now and in the next round | the agent is right now | the agent is wrong now |
|---|---|---|
| wrong -> right | +alpha3 | +alpha2 (wrong but useful) |
| right -> wrong | -alpha2 | -alpha3 |

`bonus_rule="proportional"` is this project's own: weight times the change of the score, alpha0 or alpha1 (own) and
alpha2 or alpha3 (influence) by whether most peers were right or wrong.

Source: MAPoRL (2502.18439), section on the multi-turn reward and its incentives. A round is a joint step as HAPPO
sees it (`mafrt.algorithms.happo`): agents that speak at the same time, or each once in turn.

Deviations: the sign of the influence terms in the published code is inverted, and its first round pays none; here
helping is positive, from the first round on. An agent that was silent in the round before or after has no change there.
An episode with a turn of unknown reward leaves the loss as a whole, since no reward that runs over that turn is known.
A task's outcome is added to every V (`outcome_to="all"` in the preset), so to every R, and changes no bonus. All alphas
are 0 by default.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from mafrt.algorithms.base import Trajectories
from mafrt.algorithms.gae import Gae, gae
from mafrt.algorithms.group_relative import drop_incomplete
from mafrt.algorithms.happo import joint_steps
from mafrt.algorithms.rewards import CreditContext
from mafrt.algorithms.stats import mean, total
from mafrt.config.schema import Share

Round = dict[str, float]
"""Agent -> score of its turn in the round."""


@dataclass(frozen=True)
class MaporlBase(Gae):
    """MAPoRL's reward over rounds, in front of `gae`."""

    outcome_to: Literal["last", "end", "each", "all"] = "all"
    bootstrap: Literal["none", "agent", "team"] = "none"
    round_gamma: Share = 1.0
    """discount per round, in [0, 1]"""
    bonus_rule: Literal["authors", "proportional"] = "authors"
    """the authors' table of right and wrong, or bonuses in proportion to the change of the score"""
    alpha0: float = 0.0
    """own change that agrees with the peers: right -> wrong if they were wrong, wrong -> right if they were right"""
    alpha1: float = 0.0
    """own change against the peers: right -> wrong if they were right, wrong -> right if they were wrong"""
    alpha2: float = 0.0
    """influence on the others' next answer: wrong but useful, or right and yet harmful"""
    alpha3: float = 0.0
    """influence on the others' next answer: right and useful, or wrong and harmful"""
    right_above: float = 0.5
    """threshold: an answer, or the mean of several, counts as right above this score"""

    metrics: ClassVar[Mapping[str, tuple[str, str]]] = {
        "round_bonus": ("mean bonus of a turn for corrections, its own and its peers'", "reward"),
    }

    @property
    def adds_agents(self) -> bool:
        return True

    def blind_to(self, tree: bool) -> str | None:
        return "as in its paper, a turn is credited with a mean over the rounds that are left, not with their sum"

    def credit(self, trajectories: Trajectories, context: CreditContext) -> dict[str, float]:
        return maporl(trajectories, self)


def maporl(trajectories: Trajectories, settings: MaporlBase) -> dict[str, float]:
    """Reshape all rewards, then fill advantages and returns as `gae` does."""
    bonuses: list[float] = []
    for rows in filter(None, drop_incomplete(trajectories, kl=False)):
        at = joint_steps([row.turn for row in rows])
        rounds: list[Round] = [{} for _ in range(at[-1] + 1)]
        scores: list[Round] = [{} for _ in range(at[-1] + 1)]
        for row, t in zip(rows, at, strict=True):
            rounds[t][row.turn.agent] = row.bare
            scores[t][row.turn.agent] = rounds[t][row.turn.agent] - row.outcome_reward
        for row, t in zip(rows, at, strict=True):
            bonus = _bonus(scores, t, row.turn.agent, settings)
            bonuses.append(bonus)
            score = _ahead(rounds, t, row.turn.agent, settings.round_gamma) + bonus
            # The KL penalty belongs to the turn that diverged, so other rounds do not share it.
            row.reward = score + total(row.kl_rewards)
            row.token_rewards = {max(len(row.turn.action_ids) - 1, 0): score}
    return gae(trajectories, settings, silent="nothing") | ({"round_bonus": mean(bonuses)} if bonuses else {})


def _ahead(rounds: Sequence[Round], t: int, agent: str, gamma: float) -> float:
    """Discounted mean of the agent's own score in round t and the team's mean scores in the rounds after it."""
    weights = [gamma**k for k in range(len(rounds) - t)]
    scores = [rounds[t][agent], *(mean(list(later.values())) for later in rounds[t + 1 :])]
    return total(w * score for w, score in zip(weights, scores, strict=True)) / total(weights)


def _bonus(rounds: Sequence[Round], t: int, agent: str, settings: MaporlBase) -> float:
    """The agent's bonus for its own change, and for how its peers' answers change next.

    The scores exclude the outcome and the KL penalty, which do not rate a single answer.
    """
    proportional = settings.bonus_rule == "proportional"
    bonus = 0.0
    if t > 0 and agent in rounds[t - 1] and (peers := _others(rounds[t - 1], agent)):
        peers_right = mean(list(peers.values())) > settings.right_above
        before, now = rounds[t - 1][agent], rounds[t][agent]
        if proportional:
            bonus += (settings.alpha0 if peers_right else settings.alpha1) * (now - before)
        else:
            bonus += _own_change(before > settings.right_above, now > settings.right_above, peers_right, settings)
    if t + 1 < len(rounds) and (peers := _others(rounds[t], agent)):
        peers_right = mean(list(peers.values())) > settings.right_above
        stayed = [name for name in peers if name in rounds[t + 1]]
        if stayed and proportional:
            change = mean([rounds[t + 1][name] - peers[name] for name in stayed])
            bonus += (settings.alpha2 if peers_right else settings.alpha3) * change
        elif stayed:
            now_right = mean([peers[name] for name in stayed]) > settings.right_above
            next_right = mean([rounds[t + 1][name] for name in stayed]) > settings.right_above
            bonus += _influence(now_right, next_right, rounds[t][agent] > settings.right_above, settings)
    return bonus


def _own_change(before: bool, now: bool, peers_right: bool, settings: MaporlBase) -> float:
    """The authors' bonus for a change of the agent's own answer, given its peers' answers one round before."""
    if before and not now:
        return -settings.alpha1 if peers_right else -settings.alpha0
    if now and not before:
        return settings.alpha0 if peers_right else settings.alpha1
    return 0.0


def _influence(peers_now: bool, peers_next: bool, right: bool, settings: MaporlBase) -> float:
    """The authors' bonus for a change of the peers' answers in the next round, given the agent's answer now."""
    if peers_next and not peers_now:
        return settings.alpha3 if right else settings.alpha2
    if peers_now and not peers_next:
        return -settings.alpha2 if right else -settings.alpha3
    return 0.0


def _others(scores: Round, agent: str) -> Round:
    """The round without the agent itself."""
    return {name: score for name, score in scores.items() if name != agent}
