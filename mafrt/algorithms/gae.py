"""`gae`: generalised advantage estimation over the turns of a team.

    delta_t = r_t + gamma * V_{t+1} - V_t ;  A_t = delta_t + gamma * lambda * A_{t+1} ;  return_t = A_t + V_t

Source: Schulman et al. 2016 (arXiv:1506.02438) eq. 16, PPO 2017; MARFT (2504.16129) for the team's order.

`level="token"`: each action token is a step; tokens between two turns (prompts, tool output, turns outside the chain)
are skipped. `level="action"`: each turn is one step with the value at its first position, and all its tokens carry its
advantage and return.

`bootstrap` selects the successor of a turn's last token: `"none"` no successor (IPPO, each turn its own episode),
`"agent"` the same agent's next turn, `"team"` the next turn of any agent in speaking order (MARFT, MAPPO).

Turns spoken at the same time are one step of the team's chain: each is paid all that the step pays, and has the next
step as its successor. What precedes them continues with the mean of their values and advantages, so that the order in
which they stand changes nothing. A reward that came after others spoke belongs to the step that it came with. `ippo`
adds its own agent's later pay to a turn's reward.

Deviations: a turn of unknown reward cuts the chain. Its predecessor bootstraps from that turn's value, since any
substitute reward, 0 included, would be learnt as if it had been observed. A turn without tokens is no step: its reward
is added to the step before it (with `bootstrap="none"`, its agent's turn before it), which leaves the loss where that
reward is unknown. Advantages are float64 and are not normalised here. A truncated episode bootstraps from
the critic's value at the last step of its last turn, the nearest value available.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from mafrt.algorithms.base import Algorithm, Trajectories, structural
from mafrt.algorithms.happo import joint_steps
from mafrt.algorithms.rewards import CreditContext, Row, moved_pay
from mafrt.algorithms.stats import explained_variance, mean, total
from mafrt.config.algorithm_groups import ValueHeadSettings
from mafrt.config.schema import Share
from mafrt.core.errors import ConfigError


@dataclass(frozen=True)
class Gae(Algorithm, ValueHeadSettings):
    """Generalised advantage estimation: the estimator of PPO and its relatives."""

    gamma: Share = 1.0
    """discount per step: a token or a turn, as level says"""
    gae_lambda: Share = 0.95
    """lambda of generalised advantage estimation: 0 trusts the critic, 1 the rewards"""
    bootstrap: Literal["none", "agent", "team"] = "team"
    """successor of a turn: none, the same agent's next turn, or the team's"""
    truncation: Literal["bootstrap", "mask", "terminate"] = "bootstrap"
    normalize_advantages: Literal["none", "batch", "agent"] = "agent"
    joint_advantage: bool = structural(False)
    """one advantage for all turns of a joint step (HAPPO)"""

    critic_input: ClassVar[Literal["context", "transcript"] | None] = "context"

    @property
    def adds_agents(self) -> bool:
        return super().adds_agents or self.bootstrap == "team" or self.joint_advantage

    def credit(self, trajectories: Trajectories, context: CreditContext) -> dict[str, float]:
        return gae(trajectories, self)


def gae(
    trajectories: Sequence[Sequence[Row]], settings: Gae, silent: Literal["pay", "outcome", "nothing"] = "pay"
) -> dict[str, float]:
    """Fill advantages and returns of all rows from their rewards and `turn.values`.

    Args:
        trajectories: the rows of each episode.
        settings: the rule's.
        silent: where each turn is its own chain, the part of the reward of a turn without tokens that goes to its
            agent's turn before: all, the outcome alone (its pay is counted already), or nothing (all of it is).

    Raises:
        ConfigError: a turn has no values (`gae` needs a critic), or not one per action token.
    """
    for rows in trajectories:
        alone = settings.bootstrap == "none"
        if alone and settings.share == "own" and silent != "nothing":
            moved = _pay_empty_turns(rows, pay=silent == "pay")
        else:
            moved = moved_pay(rows) if settings.bootstrap == "team" or settings.joint_advantage else {}
        if settings.joint_advantage:
            _walk_joint_steps(rows, settings, moved)
            continue
        for chain in _chains(rows, settings.bootstrap):
            _walk(chain, settings, moved, cut_off=any(row.cut_off for row in rows))
    return explained(trajectories, settings.level)


def _chains(rows: Sequence[Row], bootstrap: str) -> list[list[list[Row]]]:
    """Chains of successive steps in speaking order: the rows of each, several where agents spoke at the same time."""
    if bootstrap == "team":
        return [[list(members) for _, members in itertools.groupby(rows, lambda row: row.step)]]
    if bootstrap == "none":
        return [[[row]] for row in rows]
    chains: dict[str, list[list[Row]]] = {}
    for row in rows:
        chains.setdefault(row.turn.agent, []).append([row])
    return list(chains.values())


def step_values(row: Row, level: str) -> list[float]:
    """The critic's values of the row's steps: one per action token, or the first at `level="action"`.

    Raises:
        ConfigError: the turn has no values, or not one per action token.
    """
    values, tokens = row.turn.values, len(row.turn.action_ids)
    if values is None:
        raise ConfigError(
            f"the rule needs a critic: turn {row.turn.turn} of agent {row.turn.agent!r} has no values; "
            "fill turn.values first, or take a rule without a critic such as 'grpo'."
        )
    if level == "action" and values:
        return values[:1]
    if len(values) != tokens:
        raise ConfigError(
            f"turn {row.turn.turn} of agent {row.turn.agent!r} has {len(values)} values for {tokens} action tokens; "
            "expected one each."
        )
    return values


_END: tuple[float | None, float, float] = 0.0, 0.0, 0.0
"""value, advantage and carried reward behind an episode, where nothing follows"""


def _walk(chain: list[list[Row]], settings: Gae, moved: Mapping[tuple[int, int], float], *, cut_off: bool) -> None:
    """GAE backwards over one chain. `next_value` is None where the successor's value is unknown.

    `moved` is added to the rewards of turns, at their last step (`moved_pay`). With `cut_off` (truncated episode) the
    critic's last value replaces the missing future.
    """
    next_value, next_advantage, carried = _END
    for members in reversed(chain):
        spoken = [row for row in members if row.turn.action_ids]
        gone = next((row.dropped for row in members if row.dropped), None)
        earned = {row.key: total([row.reward, row.later, moved.get(row.key, 0.0)]) for row in members}
        if not spoken:
            # There is no step to pay, so the reward moves to the step before, which led to the empty turn.
            if gone:  # the step before it would be paid its reward, which is unknown
                next_value, next_advantage, carried = None, 0.0, 0.0
            else:
                carried = total([carried, *earned.values()])
                for row in members:
                    row.fill([], [])
            continue
        values = {row.key: step_values(row, settings.level) for row in spoken}
        first = mean([numbers[0] for numbers in values.values()])
        if gone or next_value is None or not all(math.isfinite(v) for numbers in values.values() for v in numbers):
            # The chain is cut here: the predecessor bootstraps from this value, as an invented reward would be learnt.
            for row in members:
                row.drop("nonfinite")
            next_value, next_advantage, carried = (first if math.isfinite(first) else None), 0.0, 0.0
            cut_off = False
            continue
        if cut_off:  # only the last step of a truncated episode lacks a future
            next_value, cut_off = mean([numbers[-1] for numbers in values.values()]), False
        advantages: list[float] = []
        for row in members:
            others = (amount for key, amount in earned.items() if key != row.key)
            late = total([row.later, moved.get(row.key, 0.0), carried, *others])
            numbers = _walk_turn(row, values.get(row.key, []), settings, late, next_value, next_advantage)
            advantages += numbers[:1]
        next_value, next_advantage, carried = first, mean(advantages), 0.0


def _walk_turn(
    row: Row, values: list[float], settings: Gae, late: float, next_value: float, next_advantage: float
) -> list[float]:
    """Fill one turn, `late` being paid at its last step; the advantages of its steps."""
    advantages = [0.0] * len(values)
    for step in reversed(range(len(values))):
        reward = row.paid(step) if settings.level == "token" else row.reward
        delta = reward + (late if step == len(values) - 1 else 0.0) + settings.gamma * next_value - values[step]
        next_advantage = delta + settings.gamma * settings.gae_lambda * next_advantage
        advantages[step], next_value = next_advantage, values[step]
    returns = [a + v for a, v in zip(advantages, values, strict=True)]
    # One step per turn: all of its tokens carry the same advantage, so that they enter the loss alike.
    tokens = len(row.turn.action_ids) if settings.level == "action" else 1
    row.fill(advantages * tokens, returns * tokens)
    return advantages


def _pay_empty_turns(rows: Sequence[Row], *, pay: bool) -> dict[tuple[int, int], float]:
    """Rewards that move from turns without tokens to the same agent's turn before, where every turn is its own chain.

    An outcome that the turn before has itself is not added again. A turn before one of unknown reward leaves the loss.
    """
    moved: dict[tuple[int, int], float] = {}
    before: dict[str, Row] = {}
    for row in rows:
        if row.turn.action_ids:
            before[row.turn.agent] = row
        elif (spoken := before.get(row.turn.agent)) is not None:
            if row.dropped is not None:
                spoken.drop(row.dropped)
            else:
                outcome = 0.0 if spoken.outcome_reward else row.outcome_reward
                moved[spoken.key] = moved.get(spoken.key, 0.0) + (row.pay if pay else 0.0) + outcome
    return moved


def _walk_joint_steps(rows: Sequence[Row], settings: Gae, moved: Mapping[tuple[int, int], float]) -> None:
    """GAE backwards over joint steps: one reward, one value (before the first turn), one advantage per joint step."""
    steps: dict[int, list[Row]] = {}
    for row, step in zip(rows, joint_steps([row.turn for row in rows]), strict=True):
        steps.setdefault(step, []).append(row)
    next_value: float | None = 0.0
    next_advantage = carried = 0.0
    for members in reversed(steps.values()):
        spoken = [row for row in members if row.turn.action_ids]
        reward = total([row.reward for row in members] + [moved.get(row.key, 0.0) for row in members]) + carried
        gone = next((row.dropped for row in members if row.dropped), None)
        if not spoken:
            carried = 0.0 if gone else reward
            if gone:  # the step before it would be paid its reward, which is unknown
                next_value, next_advantage = None, 0.0
            for row in members:
                if not row.dropped:
                    row.fill([], [])
            continue
        # The values before the first turns are the only ones that do not depend on the joint action itself.
        value = mean([step_values(row, "action")[0] for row in spoken if row.step == spoken[0].step])
        known = math.isfinite(value)
        if gone or not known or next_value is None:
            for row in members:
                row.drop(gone or "nonfinite")
            next_value, next_advantage, carried = (value if known else None), 0.0, 0.0
            continue
        if members[-1].cut_off:
            next_value = value
        delta = reward + settings.gamma * next_value - value
        next_advantage = delta + settings.gamma * settings.gae_lambda * next_advantage
        next_value, carried = value, 0.0
        for row in members:
            tokens = len(row.turn.action_ids)
            row.fill([next_advantage] * tokens, [next_advantage + value] * tokens)


def explained(trajectories: Sequence[Sequence[Row]], level: str) -> dict[str, float]:
    """`explained_variance/AGENT` over the agent's steps, where it is defined."""
    predicted: dict[str, list[float]] = {}
    actual: dict[str, list[float]] = {}
    for row in (row for rows in trajectories for row in rows):
        if row.turn.returns and row.turn.values:
            steps = 1 if level == "action" else len(row.turn.returns)
            predicted.setdefault(row.turn.agent, []).extend(row.turn.values[:steps])
            actual.setdefault(row.turn.agent, []).extend(row.turn.returns[:steps])
    variances = {agent: explained_variance(predicted[agent], actual[agent]) for agent in sorted(actual)}
    return {f"explained_variance/{agent}": value for agent, value in variances.items() if value is not None}
