"""Tensors from plain numbers: `torch.tensor` looks at every number of a list, and takes seven times as long."""

from __future__ import annotations

from array import array
from collections.abc import Iterable

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
