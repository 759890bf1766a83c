"""Frozen linear layers that share their input, taken as one matrix."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Frozen(NamedTuple):
    """A frozen linear layer."""

    weight: Tensor
    bias: Tensor | None


def widths_of(layers: Sequence[Frozen]) -> list[int]:
    """The layers' numbers of outputs."""
    return [len(layer.weight) for layer in layers]


def bias_of(x: Tensor, layers: Sequence[Frozen]) -> Tensor | None:
    """Of all layers, with zeros for those without one; None: none has one."""
    if all(layer.bias is None for layer in layers):
        return None
    return torch.cat([x.new_zeros(len(w)) if b is None else b for w, b in layers])


def side_by_side(parts: Sequence[Tensor]) -> Tensor:
    """Matrices as one, `[tokens, sum of widths]`: a view where they are parts of one matrix, otherwise a copy."""
    if len(parts) == 1:
        return parts[0]
    first, width, at = parts[0], sum(part.shape[1] for part in parts), parts[0].storage_offset()
    for part in parts:
        own = part.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        if not own or part.stride() != (width, 1) or part.storage_offset() != at:
            return torch.cat(list(parts), 1)
        at += part.shape[1]
    return first.as_strided((len(first), width), (width, 1))
