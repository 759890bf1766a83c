"""Attention of packed rows by the kernel of `mafrt.cpu.learn_attention`, all of them in one call."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mafrt.cpu.learn_attention import Rows, rows_attention
from mafrt.models.packed_attention import PackedRows
from mafrt.models.packing import Family, Packing

_Family = tuple[int, int, bool, Sequence[tuple[int, int]]]


def attend(query: Tensor, key: Tensor, value: Tensor, rows: PackedRows) -> Tensor:
    """As `PackedRows.attend`, for plain attention without a window that hides anything."""
    table, tokens = rows.packing.once(_table)
    past = None if rows.past is None or tokens is None else (rows.past[0][:, tokens], rows.past[1][:, tokens])
    return rows_attention(query, key, value, table, rows.scale, past)


def _table(packing: Packing) -> tuple[Rows, Tensor | None]:
    """All rows of a batch, a row without a family as one of its own without a beginning; and the tokens of the pass
    before this one in which families begin, those of one family after those of another."""
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
    return Rows.of(families), torch.cat(pasts) if pasts else None


def _family(family: Family, beginning: int, rests: int, past: bool) -> _Family:
    """From the first token of its beginning, and of its rests, which follow one another."""
    sizes = family.real.sum(1).tolist()
    starts = [rests]
    for size in sizes[:-1]:
        starts.append(starts[-1] + size)
    return beginning, family.shared, past, list(zip(starts, sizes, strict=True))
