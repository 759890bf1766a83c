"""AdamW on all numbers of an adapter in one row: a few operations, whatever the number of its layers.

Nothing is overwritten: the caller looks at the new weights, and keeps the old ones and the old moments if they are
absurd.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim.adamw import adamw as _adamw

from mafrt.models.tensors import floats
from mafrt.scripts.tinker_server.limits import refused
from mafrt.scripts.tinker_server.messages import AdamStep

NAMES = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class Moments:
    """What AdamW remembers of `P` numbers."""

    mean: Tensor
    """`[P]`"""
    square: Tensor
    """`[P]`"""
    steps: int


@torch.no_grad()
def joined(tensors: Iterable[Tensor]) -> Tensor:
    """`[P]`: a copy of their numbers, one tensor after the other."""
    return torch.cat([tensor.flatten() for tensor in tensors])


@torch.no_grad()
def write(tensors: Sequence[Tensor], numbers: Tensor) -> None:
    """Overwrite the tensors with a row of numbers, `[P]`."""
    torch._foreach_copy_(list(tensors), _parts(numbers, tensors))


@torch.no_grad()
def adamw(weights: Tensor, gradient: Tensor, moments: Moments | None, how: AdamStep) -> Moments:
    """One step by torch's AdamW, which moves the weights `[P]`; returns the moments behind it."""
    if moments is None:
        moments = Moments(torch.zeros_like(weights), torch.zeros_like(weights), 0)
    mean, square = moments.mean.clone(), moments.square.clone()
    _adamw(
        *([weights], [gradient], [mean], [square], [], [torch.tensor(float(moments.steps), device=weights.device)]),
        fused=weights.device.type in ("cpu", "cuda"),
        foreach=False,
        lr=how.lr,
        beta1=how.betas[0],
        beta2=how.betas[1],
        eps=how.eps,
        weight_decay=how.weight_decay,
        amsgrad=False,
        maximize=False,
    )
    return Moments(mean, square, moments.steps + 1)


def stored(moments: Moments | None, parameters: Sequence[Tensor]) -> dict[str, Tensor]:
    """Moments as tensors by name, for a file; empty before the first step."""
    if moments is None:
        return {}
    rows = zip(NAMES, (moments.mean, moments.square), strict=True)
    found = {f"{name}.{n}": part for name, row in rows for n, part in enumerate(_parts(row.cpu(), parameters))}
    # A file holds each tensor's own memory.
    return {name: part.clone() for name, part in found.items()} | {"step": floats([moments.steps])}


def read(tensors: Mapping[str, Tensor], parameters: Sequence[Tensor]) -> Moments | None:
    """Moments that `stored` has made. Raises RefusedError for those of another adapter."""
    if not tensors:
        return None
    wanted = {f"{name}.{n}": p.shape for n, p in enumerate(parameters) for name in NAMES}
    if "step" not in tensors or wanted != {name: part.shape for name, part in tensors.items() if name != "step"}:
        raise refused("the checkpoint's optimizer state does not fit its adapter")
    device, dtype = parameters[0].device, parameters[0].dtype
    mean, square = (joined(tensors[f"{name}.{n}"] for n in range(len(parameters))).to(device, dtype) for name in NAMES)
    return Moments(mean, square, int(tensors["step"]))


def _parts(numbers: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    parts = numbers.split([tensor.numel() for tensor in like])
    return [part.view(tensor.shape) for part, tensor in zip(parts, like, strict=True)]
