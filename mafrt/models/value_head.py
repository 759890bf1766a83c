"""The critic: a value head on the hidden states of the pass without adapters.

The reference policy uses the same pass, so values add only a small matrix product. Since the base is frozen, its hidden
states ("features") are computed once and reused while the head trains on them for several epochs.
"""

from __future__ import annotations

import math
import os
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from mafrt.core.errors import CheckpointError


class ValueHead(nn.Module):
    """Linear -> tanh -> Linear, from hidden states to one value per token, in float32.

    Orthogonal weights with gain sqrt(2), and .01 for the output, so that the first values are close to 0 and the
    first advantages are the returns (Andrychowicz et al. 2021, arXiv:2006.05990, C.2). Hidden states of a
    language model have a few channels far larger than the rest, so they are normalised first (no parameters).
    """

    def __init__(self, hidden_size: int, hidden: int = 256) -> None:
        super().__init__()
        self.hidden_size, self.hidden = hidden_size, hidden
        self.inner = nn.Linear(hidden_size, hidden)
        self.out = nn.Linear(hidden, 1)
        # A small last gain lets values begin near 0, so that the first advantages are the returns and not the noise of
        # a random critic.
        for layer, gain in ((self.inner, math.sqrt(2)), (self.out, 0.01)):
            nn.init.orthogonal_(layer.weight, gain)
            nn.init.zeros_(layer.bias)
        self.centre: Tensor
        self.scale: Tensor
        self.batches: Tensor
        self.register_buffer("centre", torch.zeros(()))
        self.register_buffer("scale", torch.ones(()))
        self.register_buffer("batches", torch.zeros(()))

    def forward(self, features: Tensor) -> Tensor:
        """`features` `[..., d]` of any float type -> values `[...]` float32, in the unit of the rewards."""
        return self.normalised(features) * self.scale + self.centre

    def normalised(self, features: Tensor) -> Tensor:
        """Values in normalised units: (value - centre) / scale of the running returns."""
        # Hidden states of some models have channels a thousand times larger than the others, and tanh would see only
        # these.
        features = nn.functional.layer_norm(features.float(), (self.hidden_size,))
        return cast(Tensor, self.out(torch.tanh(self.inner(features))).squeeze(-1))

    @torch.no_grad()
    def follow(self, returns: Tensor, decay: float = 0.9) -> None:
        """Update the running mean and deviation from returns `[n]`. Effective at once on the values.

        ValueNorm (Yu 2022, 2103.01955) with debiased averages, so that the first batch counts in full. The last layer
        is not corrected for it (PopArt): values then start at 0 again, far from returns of 10. The deviation is kept
        above a thousandth of the mean's size and .01, so that equal returns do not blow errors up.
        """
        # An iteration may have no known return, for example when a judge was down.
        if not len(returns):
            return
        # Corrected for the start as Adam does it, or the first batches would be mixed with the initial 0 and 1.
        weight = (1.0 - decay) / (1.0 - decay ** (float(self.batches) + 1.0))
        square = (1.0 - weight) * (self.scale**2 + self.centre**2) + weight * (returns.float() ** 2).mean()
        centre = (1.0 - weight) * self.centre + weight * returns.float().mean()
        # Without a floor, equal returns give a deviation of 0, and division by it makes any error infinite.
        floor = torch.clamp(1e-3 * centre.abs(), min=1e-2)
        scale = torch.maximum((square - centre**2).clamp(min=0.0).sqrt(), floor)
        self.centre.copy_(centre)
        self.scale.copy_(scale)
        self.batches += 1.0


def critic_content(head: ValueHead) -> dict[str, Any]:
    """Sizes and weights of a head, for a file."""
    return {"hidden_size": head.hidden_size, "hidden": head.hidden, "state": head.state_dict()}


def critic_from(content: Mapping[str, Any]) -> ValueHead:
    """The head of a `critic_content`. Raises KeyError, TypeError, ValueError or RuntimeError for another content."""
    head = ValueHead(int(content["hidden_size"]), int(content["hidden"]))
    known = {name: value for name, value in head.state_dict().items() if name in ("centre", "scale", "batches")}
    head.load_state_dict({**known, **content["state"]})  # heads without value normalisation have none of these
    return head


def save_critic(head: ValueHead, path: str | Path) -> None:
    """Write sizes and weights; the file appears by one rename."""
    path = Path(path)
    content = critic_content(head)
    temporary = path.with_name(path.name + ".tmp")
    with open(temporary, "wb") as file:
        torch.save(content, file)
        file.flush()
        os.fsync(file.fileno())
    # A reader sees the old file or the whole new one, even if the machine stops in between.
    os.replace(temporary, path)


def load_critic(path: str | Path, *, hidden_size: int | None = None, device: str | torch.device = "cpu") -> ValueHead:
    """Read a head written by `save_critic`; `hidden_size` is the base's, None to skip the check.

    Raises CheckpointError if the file is missing, corrupt, or made for a base of another width.
    """
    path = Path(path)
    if not path.is_file():
        raise CheckpointError(f"found no critic at {path}, expected a file that save_critic wrote; check the path")
    try:
        head = critic_from(torch.load(path, map_location="cpu", weights_only=True))
    except (OSError, EOFError, RuntimeError, KeyError, TypeError, ValueError, pickle.UnpicklingError) as error:
        raise CheckpointError(
            f"{path}: found something that is no critic ({type(error).__name__}), expected a file that save_critic "
            "wrote; take the checkpoint before it, or leave the critic out to start with a fresh one"
        ) from None
    if hidden_size is not None and head.hidden_size != hidden_size:
        raise CheckpointError(
            f"{path}: found a critic for hidden states of {head.hidden_size}, expected {hidden_size}; "
            "load it with the base it was trained on"
        )
    return head.to(device)
