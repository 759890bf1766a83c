"""Tensors from plain numbers, and many small tensors moved, read and looked at together.

`torch.tensor` looks at every number of a list, and takes seven times as long. On a GPU each tensor that is moved or
read makes the host wait, so several go in one transfer.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor


def integers(values: Iterable[int]) -> Tensor:
    """`[n]` int64, on the CPU."""
    return _tensor(array("q", values), torch.int64)


def floats(values: Iterable[float]) -> Tensor:
    """`[n]` float32, on the CPU."""
    return _tensor(array("f", values), torch.float32)


def _tensor(numbers: array[int] | array[float], dtype: torch.dtype) -> Tensor:
    # An empty buffer is refused.
    return torch.frombuffer(numbers, dtype=dtype) if numbers else torch.empty(0, dtype=dtype)


def moved(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Tensors of the CPU, all of one type of number, on `device`."""
    if device.type == "cpu":
        return list(tensors)
    flat = torch.cat([t.reshape(-1) for t in tensors]).to(device)
    parts = flat.split([t.numel() for t in tensors])
    return [part.view(t.shape) for part, t in zip(parts, tensors, strict=True)]


def largest(tensors: Sequence[Tensor]) -> Tensor:
    """0-d: the largest absolute number; not finite if any is not. A sum of squares is infinite for large numbers."""
    if all(t.is_cpu for t in tensors):  # in one row: one norm after the other takes longer there
        return torch.cat([t.detach().flatten() for t in tensors]).abs().amax()
    return torch.stack(torch._foreach_norm([t.detach() for t in tensors], float("inf"))).amax()


@torch.no_grad()
def copies(tensors: Sequence[Tensor]) -> list[Tensor]:
    """A copy of each, without gradient."""
    return list(torch._foreach_mul(list(tensors), 1.0))  # one call, and the same numbers
