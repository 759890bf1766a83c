"""Learners and critics of a team on several bases: one of each for every base, with the interface of one.

A turn belongs to the base of its agent, which sampled it; another base has other tokens. So every base learns from its
own turns: log-probabilities, reference and values are its own, and its mini-batches hold its own turns. Rewards,
advantages and HAPPO's factors are numbers per turn and go from base to base as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from mafrt.core.atomic_files import load_tensors, save_tensors
from mafrt.core.errors import CheckpointError
from mafrt.core.types import Episode, Turn
from mafrt.models.several_bases import base_by_base, by_adapter
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

    def of_adapter(self, adapter: str) -> Learner:
        """The learner that moves an adapter."""
        return next(learner for learner in self.parts.values() if adapter in learner.rates)

    def logprobs(self, turns: Sequence[Turn], adapter_of: Mapping[str, str] | None = None) -> list[list[float]]:
        """See `Learner.logprobs`."""
        bases = [self.part_of(turn.agent) for turn in turns]
        return base_by_base(self.parts, bases, turns, lambda learner, own: learner.logprobs(own, adapter_of))

    def update(
        self,
        turns: Sequence[Turn],
        agents: Sequence[str],
        iteration: int,
        weights: Sequence[float] | None = None,
        **how: Any,
    ) -> dict[str, float]:
        """See `Learner.update`. Counts are summed over the bases; `epochs` is the largest."""
        part_metrics = [
            learner.update(turns, [agent for agent in agents if self.part_of(agent) == name], iteration, weights, **how)
            for name, learner in self.parts.items()
        ]
        joint = {name: sum(metrics[name] for metrics in part_metrics) for name in COUNTS}
        joint["epochs"] = max(metrics["epochs"] for metrics in part_metrics)
        return {name: value for metrics in part_metrics for name, value in metrics.items()} | joint

    rate = by_adapter(Learner.rate)
    forget = by_adapter(Learner.forget)

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
        self, episodes: Sequence[Episode], temperatures: Mapping[str, float], **which: bool
    ) -> dict[str, Features]:
        """See `Critic.annotate`; every base fills the turns of its own agents."""
        return {name: critic.annotate(episodes, temperatures, **which) for name, critic in self.parts.items()}

    def update(self, features: Mapping[str, Features], iteration: int) -> dict[str, float]:
        """Fit every head. Returns the means over the heads that had turns."""
        part_metrics = [critic.update(features[name], iteration) for name, critic in self.parts.items()]
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
        for critic, critic_state in zip(self.parts.values(), state["parts"], strict=True):
            critic.load_state(critic_state)
