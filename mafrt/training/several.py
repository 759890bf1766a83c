"""Learners and critics of a team on several bases: one of each for every base, with the interface of one.

A turn belongs to the base of its agent, which sampled it; another base has other tokens. So every base learns from its
own turns: log-probabilities, reference and values are its own, and its mini-batches hold its own turns. Rewards,
advantages and HAPPO's factors are numbers per turn and go from base to base as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from mafrt.core.atomic_files import load_tensors, save_tensors
from mafrt.core.errors import CheckpointError
from mafrt.core.types import Episode, Turn
from mafrt.models.value_head import critic_content, critic_from
from mafrt.training.critic import Critic, Features
from mafrt.training.learner import Learner
from mafrt.training.policy_objective import COUNTS


class SeveralLearners:
    """The learners of a team on several bases.

    Args:
        parts: name of the base -> its learner.
        part_of: agent -> name of its base.
    """

    def __init__(self, parts: Mapping[str, Learner], part_of: Callable[[str], str]) -> None:
        self.parts, self.part_of = dict(parts), part_of

    def _own(self, turns: Sequence[Turn], name: str) -> list[int]:
        return [place for place, turn in enumerate(turns) if self.part_of(turn.agent) == name]

    def logprobs(self, turns: Sequence[Turn], adapter_of: Mapping[str, str] | None = None) -> list[list[float]]:
        """See `Learner.logprobs`."""
        values_at: dict[int, list[float]] = {}
        for name, learner in self.parts.items():
            own = self._own(turns, name)
            own_adapters = self._own_adapters(adapter_of, name)
            values_at |= zip(own, learner.logprobs([turns[place] for place in own], own_adapters), strict=True)
        return [values_at[place] for place in range(len(turns))]

    def recompute_logprobs(self, turns: Sequence[Turn], adapter_of: Mapping[str, str] | None = None) -> None:
        """See `Learner.recompute_logprobs`."""
        for turn, values in zip(turns, self.logprobs(turns, adapter_of), strict=True):
            turn.old_logprobs = values

    def update(
        self,
        turns: Sequence[Turn],
        agents: Sequence[str],
        iteration: int,
        weights: Sequence[float] | None = None,
        *,
        adapter_of: Mapping[str, str] | None = None,
        kl_coef: float | None = None,
    ) -> dict[str, float]:
        """See `Learner.update`. Counts are summed over the bases; `epochs` is the largest."""
        metrics: dict[str, float] = {"epochs": 0.0, **dict.fromkeys(COUNTS, 0.0)}
        for name, learner in self.parts.items():
            learning = [agent for agent in agents if self.part_of(agent) == name]
            own = self._own(turns, name)
            part_metrics = learner.update(
                [turns[place] for place in own],
                learning,
                iteration,
                None if weights is None else [weights[place] for place in own],
                adapter_of=self._own_adapters(adapter_of, name),
                kl_coef=kl_coef,
            )
            for key, value in part_metrics.items():
                if key in COUNTS:
                    metrics[key] += value
                elif key == "epochs":
                    metrics[key] = max(metrics[key], value)
                else:
                    metrics[key] = value
        return metrics

    def _own_adapters(self, adapter_of: Mapping[str, str] | None, name: str) -> dict[str, str] | None:
        """The part of agent -> adapter that is on this base."""
        if adapter_of is None:
            return None
        return {agent: adapter for agent, adapter in adapter_of.items() if self.part_of(agent) == name}

    def rate(self, adapter: str, iteration: int) -> float:
        """See `Learner.rate`."""
        return self._holding(adapter).rate(adapter, iteration)

    def forget(self, adapter: str) -> None:
        """Reset the moments of an adapter's optimizer."""
        self._holding(adapter).forget(adapter)

    def _holding(self, adapter: str) -> Learner:
        return next(learner for learner in self.parts.values() if adapter in learner.rates)

    @property
    def slowdown(self) -> float:
        """Factor on all learning rates."""
        return next(iter(self.parts.values())).slowdown

    @slowdown.setter
    def slowdown(self, factor: float) -> None:
        for learner in self.parts.values():
            learner.slowdown = factor

    def state(self) -> dict[str, Any]:
        """Optimizer state by adapter. Collective."""
        return {adapter: state for learner in self.parts.values() for adapter, state in learner.state().items()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        for learner in self.parts.values():
            learner.load_state(state)


AnyLearner: TypeAlias = Learner | SeveralLearners


@dataclass(frozen=True)
class SeveralFeatures:
    """Inputs of all critics for one batch."""

    parts: dict[str, Features]
    credit: dict[str, Any] = field(default_factory=dict)
    """inputs of the credit rule computed by this stage; empty for value heads"""


class SeveralCritics:
    """A value head for each base, which reads the hidden states of that base and values the turns of its agents.

    Args:
        parts: name of the base -> its critic.
    """

    def __init__(self, parts: Mapping[str, Critic]) -> None:
        self.parts = dict(parts)

    @property
    def present(self) -> bool:
        """Whether there are value heads; without them only the reference is read."""
        return all(critic.present for critic in self.parts.values())

    def annotate(
        self, episodes: Sequence[Episode], temperatures: Mapping[str, float], *, values: bool, reference: bool
    ) -> SeveralFeatures:
        """See `Critic.annotate`; every base fills the turns of its own agents."""
        return SeveralFeatures(
            {
                name: critic.annotate(episodes, temperatures, values=values, reference=reference)
                for name, critic in self.parts.items()
            }
        )

    def update(self, features: SeveralFeatures, iteration: int) -> dict[str, float]:
        """Fit every head. Returns the means over the heads that had turns."""
        part_metrics = [critic.update(features.parts[name], iteration) for name, critic in self.parts.items()]
        names = sorted({name for metrics in part_metrics for name in metrics})
        values = {name: [metrics[name] for metrics in part_metrics if name in metrics] for name in names}
        return {name: sum(some) / len(some) for name, some in values.items()}

    def save(self, path: Path) -> None:
        """Write all heads into one file, in the order of the bases."""
        save_tensors(path, {"heads": [critic_content(critic.head) for critic in self.parts.values()]})

    def load(self, path: Path) -> None:
        """Load the heads as written by `save`, with fresh optimizers. Raises CheckpointError."""
        content = load_tensors(path)
        try:
            heads = [critic_from(head) for head in content["heads"]]
            sizes = [head.hidden_size for head in heads]
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            raise CheckpointError(
                f"{path} does not hold the critics of several bases ({type(error).__name__}); take another checkpoint, "
                "or leave the critic out to start with fresh ones"
            ) from None
        if sizes != [critic.base.hidden_size for critic in self.parts.values()]:
            raise CheckpointError(
                f"{path} holds critics for hidden states of {sizes}; give the team that it was trained with"
            )
        for critic, head in zip(self.parts.values(), heads, strict=True):
            critic.replace_head(head.to(critic.base.device))

    def state(self) -> dict[str, Any]:
        """The optimizers' states."""
        return {"parts": [critic.state() for critic in self.parts.values()]}

    def load_state(self, state: dict[str, Any]) -> None:
        for critic, own in zip(self.parts.values(), state["parts"], strict=True):
            critic.load_state(own)
