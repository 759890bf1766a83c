"""RAE: a turn's return less a running mean of what its role earns in its game.

    A = G - b[game, role]
    b <- decay^n b + (1 - decay^n) mean of the batch's n episodes        after the batch; b = 0 before the first

For self-play, where one policy has both seats. A group's mean, or the batch's, mixes the seats: what one wins the other
loses, so it is about 0 whatever the policy does, and a seat that wins more often because it moves first is praised for
that. With a baseline of its own each seat learns by how much it did better than this seat does.

The baseline is made of earlier batches, so it depends on no choice of this one, and A is an unbiased estimate of the
gradient without groups or a critic. G is all that the turn's agent (in environments without `opponents`: the team)
is paid from the turn on, and the outcome; the mean is of G at the role's first turn in an episode. A role is an agent's
name. A game is the environment, or in a mixture the one that `info["set"]` names.

Source: SPIRAL (2506.24119), section 3.3 and algorithm 1; decay .95. Deviation: the authors move b after every episode,
in the order in which episodes end. Here all episodes of a batch are compared with one b, which then moves as far as n
moves by their mean would move it, so that the order of episodes changes nothing. With one episode a batch the two are
the same.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from mafrt.algorithms.base import Algorithm, Trajectories
from mafrt.algorithms.rewards import CreditContext, Row, fill_later
from mafrt.algorithms.stats import mean
from mafrt.config.schema import Share

Role = tuple[str, str]
"""Game and agent."""


@dataclass(frozen=True)
class Rae(Algorithm):
    """A turn against a running mean of its role's return in its game, for self-play."""

    outcome_to: Literal["last", "end", "each", "all"] = "all"
    baseline_decay: Share = 0.95
    """share of a role's running mean that stays after one more episode"""

    paper: ClassVar[str] = "SPIRAL (2506.24119)"
    compared: ClassVar[str] = "no better than without the mean on a task of ours"
    metrics: ClassVar[Mapping[str, tuple[str, str]]] = {
        "role_baseline/AGENT": ("running mean of the role's return that its turns were compared with", "reward"),
    }

    def credit(self, trajectories: Trajectories, context: CreditContext) -> dict[str, float]:
        if context.by_turn:
            fill_later(trajectories, own=bool(context.opponents))
        returns: dict[Role, list[float]] = {}
        compared: dict[str, list[float]] = {}
        for rows in trajectories:
            known = [row for row in rows if row.dropped is None]
            first: dict[str, Row] = {}
            for row in known:
                if not row.own_turn:  # a later one has lost the pay before it
                    first[row.turn.agent] = row
                worth = row.reward + row.later
                baseline = context.memory.get(_key((row.game, row.turn.agent)), 0.0)
                tokens = len(row.turn.action_ids)
                row.fill([worth - baseline] * tokens, [worth] * tokens, baseline)
            for agent, row in first.items():
                role = (row.game, agent)
                # Without the KL penalty, whose weight may be steered.
                returns.setdefault(role, []).append(row.bare + row.later)
                compared.setdefault(agent, []).append(context.memory.get(_key(role), 0.0))
        for role, numbers in returns.items():
            weight = self.baseline_decay ** len(numbers)
            moved = weight * context.memory.get(_key(role), 0.0) + (1.0 - weight) * mean(numbers)
            if math.isfinite(moved):  # a sum of huge rewards may overflow, and would never leave the mean again
                context.memory[_key(role)] = moved
        return {f"role_baseline/{agent}": mean(numbers) for agent, numbers in sorted(compared.items())}


def _key(role: Role) -> str:
    """A role's key in `CreditContext.memory`."""
    game, agent = role
    return f"rae/{game}/{agent}"
