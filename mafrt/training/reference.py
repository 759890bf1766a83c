"""Frozen copies of adapters: the reference policy of a KL penalty or of a preference loss.

A copy is one more adapter on the shared base, so that turns of several agents are scored in one mixed batch. Copies
change only when `renew` is called, are part of the checkpoint, and are never trained or handed to an engine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from mafrt.core.types import Turn
from mafrt.training.several import AnyLearner

if TYPE_CHECKING:
    from mafrt.models.several_bases import Bases

_SUFFIX = "@reference"
"""Ends the name of a copy; no adapter of a team may be called so."""


class FrozenAdapters:
    """Copies of adapters as they were when `renew` was last called.

    Args:
        base: holds the adapters, and the copies.
        adapters: names of the adapters with a copy.
        own: agent -> its adapter, for turns that were spoken with an adapter that has no copy.
    """

    def __init__(self, base: Bases, adapters: Sequence[str], references: Mapping[str, str]) -> None:
        self.base, self.own = base, dict(references)
        self.copies = {name: f"{name}{_SUFFIX}" for name in adapters}
        for name, copy in self.copies.items():
            if copy not in base.adapters:
                base.copy_adapter(name, copy)
        self.renew()

    def renew(self) -> None:
        """Make the adapters as they are the reference."""
        for name, copy in self.copies.items():
            self.base.load_adapter_state(copy, self.base.adapter_state(name))

    @torch.no_grad()
    def logprobs(
        self, learner: AnyLearner, turns: Sequence[Turn], adapter_of: Mapping[str, str] | None = None
    ) -> list[list[float]]:
        """Log-probabilities of the action tokens under the copies, one list per turn.

        Args:
            learner: computes them.
            turns: any turns; one without action tokens gets an empty list.
            adapter_of: agent -> the adapter that it spoke with; None: its own.
        """
        copy_of = {
            agent: self.copies.get(adapter, self.copies[self.own[agent]])
            for agent, adapter in (self.own if adapter_of is None else adapter_of).items()
        }
        return learner.logprobs(turns, copy_of)

    def state(self) -> dict[str, Any]:
        """The copies' weights, by the name of the adapter."""
        return {name: self.base.adapter_state(copy) for name, copy in self.copies.items()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Take over the result of `state`."""
        for name, copy in self.copies.items():
            self.base.load_adapter_state(copy, state[name])
