"""The rows of a packed batch as the kernel of `mafrt.kernels.learn_attention` takes them, all of them in one call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from mafrt.kernels.learn_attention import Rows, rows_attention
from mafrt.kernels.learn_attention import serves as has_kernel
from mafrt.models.packing import Family, Packing

__all__ = ["PackedRows", "one_family", "packed_rows", "rows_attention", "serves"]

_Family = tuple[int, int, bool, Sequence[tuple[int, int]]]


def serves(t: Tensor) -> bool:
    """Whether the kernel computes the attention of such queries, keys and values."""
    return t.device.type == "cpu" and has_kernel(t.dtype)


class PackedRows(NamedTuple):
    """All rows of a packed batch."""

    rows: Rows
    past: Tensor | None
    """the tokens of the pass before this one in which families begin, those of one family after those of another"""


def packed_rows(packing: Packing) -> PackedRows:
    """The rows of a batch; a row without a family is one of its own without a beginning."""
    families, pasts, first, behind = list[_Family](), list[Tensor](), 0, 0
    for block in packing.blocks:
        family = block.family
        if family is None:
            families += [(0, 0, False, [(first + n * block.length, block.length)]) for n in range(block.rows)]
        elif family.past is None:
            families.append(_family(family, first, first + family.shared, False))
        else:
            families.append(_family(family, behind, first, True))
            pasts.append(family.past)
            behind += family.shared
        first += block.rows * block.length
    return PackedRows(Rows.of(families), torch.cat(pasts) if pasts else None)


def one_family(family: Family, past: bool) -> Rows:
    """The rows of one family, whose beginning is part of the pass or is given."""
    return Rows.of([_family(family, 0, 0 if past else family.shared, past)])


def _family(family: Family, beginning: int, rests: int, past: bool) -> _Family:
    """From the first token of its beginning, and of its rests, which follow one another."""
    sizes = family.real.sum(1).tolist()
    starts = [rests]
    for size in sizes[:-1]:
        starts.append(starts[-1] + size)
    return beginning, family.shared, past, list(zip(starts, sizes, strict=True))
