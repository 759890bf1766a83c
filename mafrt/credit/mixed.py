"""`vdn`, `qmix`: how much better the team does with this turn than with the others that the agent said in its place.

    A_i = Q_tot(s, a) - mean over the group's alternatives a_i' of Q_tot(s, (a_-i, a_i'))

`turn.values` hold the agent's own Q_i(turn), the same on every token. With `mixer="sum"` (VDN) Q_tot is the sum of the
Q_i, everybody else's cancel, and A_i = Q_i - mean of the group's Q_i. With `mixer="given"` (QMIX) `joint(turn, qs)`
says what Q_tot would be, in the turn's own state and with the others' own turns, for each number in `qs` in the place
of Q_i. The alternatives are what the same agent said at the same joint step in all samples of the problem, its own
turn included, so that advantages of a group are centred with VDN. A group of one gets 0 and is counted. All tokens of
a turn carry its advantage.

`returns` are the turn's own reward: they are what the mixer's temporal differences are made of (`mafrt.mixing`), not
what a value head is fitted to.

Source: VDN, Sunehag 2017 (1706.05296); QMIX, Rashid 2018 (1803.11485); the baseline is the counterfactual one of COMA,
Foerster 2018 (1705.08926), eq. 4, with the samples of the group in place of an expectation under the policy.

Deviation: after the first joint step, samples differ in what they answer to, so alternatives are what was said in
similar states, not in the same one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from mafrt.credit.group import GroupTally
from mafrt.credit.happo import joint_steps_of
from mafrt.credit.rewards import Row
from mafrt.credit.settings import choice, number
from mafrt.credit.stats import mean
from mafrt.errors import ConfigError
from mafrt.types import Turn

Joint = Callable[[Turn, Sequence[float]], Sequence[float]]


@dataclass(frozen=True)
class MixedSettings:
    """Settings of `vdn` and `qmix`."""

    mixer: Literal["sum", "given"] = "sum"
    """Q_tot is the sum of the Q_i, or what `joint` says."""
    gamma: float = 1.0
    """Discount per joint step of the mixer's temporal differences; the credit itself looks at one step."""
    joint: Joint | None = None
    """(turn, values in the place of its Q_i) -> Q_tot for each; a runner with a mixer fills it in."""

    def __post_init__(self) -> None:
        choice("mixer", self.mixer, ("sum", "given"))
        number("gamma", self.gamma, 0.0, 1.0)


def mixed(trajectories: Sequence[Sequence[Row]], settings: MixedSettings) -> dict[str, float]:
    """Fill advantages and returns of all rows from `turn.values`.

    Raises:
        ConfigError: a turn has no values, or nobody says what Q_tot would be.
    """
    if settings.mixer == "given" and settings.joint is None:
        raise ConfigError("rule 'qmix' needs `joint`, which says what Q_tot would be; give it, or take 'vdn'.")
    groups: dict[tuple[str, str, int], list[Row]] = {}
    for rows in trajectories:
        for row, step in zip(rows, joint_steps_of([row.turn.agent for row in rows]), strict=True):
            tokens = len(row.turn.action_ids)
            if not tokens and row.dropped is None:
                row.fill([], [])
            elif tokens and not math.isfinite(_own(row)):
                row.drop("nonfinite")
            elif tokens and row.dropped is None:
                row.fill([0.0] * tokens, [row.reward] * tokens)
                groups.setdefault((row.group, row.turn.agent, step), []).append(row)
    tally = GroupTally()
    for members in groups.values():
        # Sorted, so that the order of the episodes does not even change a rounding of the mixer's.
        alternatives = sorted(_own(row) for row in members)
        tally.add(alternatives)
        if alternatives[0] == alternatives[-1]:
            continue
        for row in members:
            own = _own(row)
            if settings.mixer == "sum" or settings.joint is None:
                advantage = own - mean(alternatives)
            else:
                worth = list(settings.joint(row.turn, alternatives))
                advantage = worth[alternatives.index(own)] - mean(worth)
            row.turn.advantages = [advantage] * len(row.turn.action_ids)
    return tally.metrics()


def _own(row: Row) -> float:
    """The turn's Q_i."""
    if not row.turn.values:
        raise ConfigError(
            f"rules 'vdn' and 'qmix' need a mixer: turn {row.turn.turn} of agent {row.turn.agent!r} has no values; "
            "fill turn.values with its Q, or take a rule without a critic such as 'grpo'."
        )
    return row.turn.values[0]
