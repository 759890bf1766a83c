"""The base class of all algorithms: its settings are its fields, its estimator and its loss are its methods."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mafrt.algorithms.rewards import CreditContext, Row
from mafrt.config.algorithm import AlgorithmSettings, make_algorithm
from mafrt.core.errors import ConfigError

if TYPE_CHECKING:  # torch; flags are made from these classes before it is loaded
    from torch import Tensor

    from mafrt.algorithms.losses import PolicyTerms, Stats

Trajectories = Sequence[Sequence[Row]]
"""The rows of each episode, in speaking order."""


def structural(default: Any) -> Any:
    """A field that tells two algorithms apart: settable in Python, and no flag."""
    return field(default=default, metadata={"flag": False})


@dataclass(frozen=True)
class Algorithm(AlgorithmSettings):
    """One's own algorithm inherits from this and says how credit is computed; its fields become flags.

    A subclass is a frozen dataclass with a docstring, whose first line is its summary. `credit` has to be there,
    `policy_loss` may be.
    """

    def credit(self, trajectories: Trajectories, context: CreditContext) -> dict[str, float]:
        """Fill the advantages and returns of every row whose `dropped` is None (`row.fill`).

        Args:
            trajectories: the rows of the global batch: a turn and its reward each.
            context: facts about the batch that are no settings.

        Returns:
            Metrics by name.
        """
        raise NotImplementedError(f"{type(self).__name__} has no credit(); say how its advantages are computed")

    def policy_loss(self, terms: PolicyTerms) -> tuple[Tensor, Stats]:
        """The loss of one adapter in one micro-batch, and sums as statistics: by default the clipped ratio's."""
        from mafrt.algorithms.losses import policy_loss

        return policy_loss(terms, self)


def algorithm(rule: str | Algorithm, **settings: Any) -> Algorithm:
    """The algorithm of a name or `package.module:Class`, or a given one, with `settings` in place of its own.

    Raises:
        ConfigError: there is none (names the nearest), a setting that it does not use, or a bad value.
    """
    chosen = make_algorithm(rule, settings)
    if not isinstance(chosen, Algorithm):
        raise ConfigError(f"algorithm {rule}: {type(chosen).__name__} has no credit(); inherit from Algorithm.")
    return chosen
