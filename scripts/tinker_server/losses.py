"""The loss functions of the Tinker API, by their published definitions, summed over tokens.

https://tinker-docs.thinkingmachines.ai/losses. Each takes the log-probabilities of an adapter's targets and the inputs
of the request, all `[N]`, and returns the loss of each token, `[N]`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mafrt.scripts.tinker_server.limits import refused

if TYPE_CHECKING:
    from torch import Tensor

Inputs = Mapping[str, "Tensor"]
Settings = Mapping[str, float]


@dataclass(frozen=True)
class Loss:
    """A loss function and what a request gives to it."""

    name: str
    of: Callable[[Tensor, Inputs, Settings], Tensor]
    takes: tuple[str, ...]
    """inputs that each example must have beside `target_tokens`"""
    may_take: tuple[str, ...] = ()
    settings: Settings = field(default_factory=dict)
    """settings and their defaults"""

    def check(self, where: str, inputs: Mapping[str, object]) -> None:
        """Refuse an example with too few or too many inputs."""
        for name in self.takes:
            if name not in inputs:
                raise refused(f"{where} has no {name}, which {self.name} needs")
        for name in inputs:
            if name not in (*self.takes, *self.may_take):
                known = ", ".join(("target_tokens", *self.takes, *self.may_take))
                raise refused(f"{where} has {name[:80]!r}, which {self.name} does not take; it takes {known}")


def cross_entropy(logprobs: Tensor, inputs: Inputs, settings: Settings) -> Tensor:
    return -logprobs * inputs["weights"]


def _ratio(logprobs: Tensor, inputs: Inputs) -> Tensor:
    return (logprobs - inputs["logprobs"]).exp()


def _clipped(ratio: Tensor, inputs: Inputs, settings: Settings) -> Tensor:
    low, high = (inputs.get(name, ratio.new_tensor(settings[name])) for name in CLIP)
    return ratio.clamp(low, high)


def importance_sampling(logprobs: Tensor, inputs: Inputs, settings: Settings) -> Tensor:
    return -_ratio(logprobs, inputs) * inputs["advantages"]


def ppo(logprobs: Tensor, inputs: Inputs, settings: Settings) -> Tensor:
    """The clipped objective (Schulman 2017), equation 7."""
    import torch

    ratio, advantages = _ratio(logprobs, inputs), inputs["advantages"]
    return -torch.minimum(ratio * advantages, _clipped(ratio, inputs, settings) * advantages)


def cispo(logprobs: Tensor, inputs: Inputs, settings: Settings) -> Tensor:
    """Clipped weights of the log-probabilities (MiniMax 2025, arXiv:2506.13585), equation 4."""
    return -_clipped(_ratio(logprobs, inputs), inputs, settings).detach() * logprobs * inputs["advantages"]


def dro(logprobs: Tensor, inputs: Inputs, settings: Settings) -> Tensor:
    """Direct reward optimization (Richemond 2024, arXiv:2405.19107)."""
    apart = (logprobs - inputs["logprobs"]).square()
    return 0.5 * settings["beta"] * apart - logprobs * inputs["advantages"]


CLIP = ("clip_low_threshold", "clip_high_threshold")
_CLIP = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
_SAMPLED = ("logprobs", "advantages")
LOSSES = {
    loss.name: loss
    for loss in (
        Loss("cross_entropy", cross_entropy, ("weights",)),
        Loss("importance_sampling", importance_sampling, _SAMPLED),
        Loss("ppo", ppo, _SAMPLED, CLIP, _CLIP),
        Loss("cispo", cispo, _SAMPLED, CLIP, _CLIP),
        Loss("dro", dro, _SAMPLED, (), {"beta": 0.05}),
    )
}
