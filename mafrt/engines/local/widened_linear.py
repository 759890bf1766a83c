"""A frozen linear layer and all its adapters as one packed product, for small batches on a CPU.

`y = [x, m * (x A)] [W, B]^T`: A holds the adapters side by side, the mask m keeps a row's own columns, and B (scaled)
stands beside the frozen weight. A small product of its own costs more for its launch than for its arithmetic, most of
all in bfloat16, so B's is made a part of the frozen one; the sums then run in the kernel's precision. The arithmetic
grows with rows x K, and the weights are packed once more whenever an adapter changes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from mafrt.engines.local.decoder_block import Linear
from mafrt.kernels.panels import Panels
from mafrt.models.onednn import pack, product

Pairs = Mapping[str, tuple[Tensor, Tensor, float]]
"""One adapter: path of a linear layer -> (A `[r, in]`, B `[out, r]`, scaling)."""

_FLOP_PER_S = {torch.float32: 1.5e11, torch.bfloat16: 4e11}
_SAVED_S = {torch.float32: (2e-5, 0.0), torch.bfloat16: (2e-5, 5e-6)}
"""Rough, of one core of 2025: rate of the products, and the time that a layer saves by not having products apart: in
any case, and for each adapter."""
_LAYER_S, _WEIGHT_S = 1e-4, 1e-9
"""Rough time to widen a layer: for each, and for each of its weights."""


class NonFiniteAdapterError(ValueError):
    """Weights of an adapter are NaN or infinite: in a product with all adapters they would spoil the others' rows."""


class WidenedLinear(NamedTuple):
    """One layer: `down` `[in, columns]`, packed in bfloat16; `whole` the packed `[W, B]` `[out, in + columns]`."""

    down: Tensor | Panels
    whole: Tensor | Panels
    bias: Tensor | None
    ranks: tuple[int, ...]
    """columns of each adapter, in their order"""


def pays(adapters: Sequence[Pairs], linears: Sequence[Linear], rows: int) -> bool:
    """Whether one product for all adapters is expected to take less time than products of their own.

    `linears` are those of one decoder layer.
    """
    if any(linear.packed is None for linear in linears):
        return False
    dtype = linears[0].weights[0].dtype
    wasted = 0
    for linear in linears:
        ranks = _ranks(adapters, linear)
        # A row needs the columns of one adapter, and is given those of all.
        wasted += (sum(ranks) - max(ranks)) * (linear.weights[0].shape[1] + sum(linear.widths))
    return 2.0 * rows * wasted / _FLOP_PER_S[dtype] <= _saved(len(adapters), linears)


def pays_back(adapters: Sequence[Pairs], linears: Sequence[Linear], steps: int) -> bool:
    """Whether so many decode steps save the time that widening these layers takes."""
    weights = sum(weight.numel() for linear in linears for weight in linear.weights)
    return len(linears) * _LAYER_S + weights * _WEIGHT_S <= steps * _saved(len(adapters), linears)


def _saved(adapters: int, linears: Sequence[Linear]) -> float:
    """Seconds that a step of these layers saves, whatever the arithmetic costs."""
    always, each = _SAVED_S[linears[0].weights[0].dtype]
    return len(linears) * (always + adapters * each)


def widen(adapters: Sequence[Pairs], linear: Linear) -> WidenedLinear | None:
    """The layer with adapters 0, 1, ...; None if none of them targets it. Raises NonFiniteAdapterError."""
    ranks = _ranks(adapters, linear)
    if not sum(ranks):
        return None
    weight = linear.weights[0] if len(linear.weights) == 1 else torch.cat(linear.weights)
    out, size = weight.shape
    down = weight.new_empty(sum(ranks), size)
    whole = weight.new_zeros(out, size + sum(ranks))
    whole[:, :size] = weight
    column = 0
    for pairs in adapters:
        first = 0
        for path, width in zip(linear.paths, linear.widths, strict=True):
            if path in pairs:
                a, b, scaling = pairs[path]
                r = len(a)
                down[column : column + r] = a.detach()
                whole[first : first + width, size + column : size + column + r] = b.detach() * scaling
                column += r
            first += width
    # Checked by a sum, as one number that is not finite makes it so.
    if not bool((down.sum() + whole[:, size:].sum()).isfinite()):
        raise NonFiniteAdapterError
    # In float32 a plain product starts faster than a packed one. Over a transposed view, since the plain product of a
    # row with few contiguous columns would depend on the row's place in the batch by its last bits.
    packed = down.t() if down.dtype == torch.float32 else pack(down)
    return WidenedLinear(packed, pack(whole), linear.bias, ranks)


def _ranks(adapters: Sequence[Pairs], linear: Linear) -> tuple[int, ...]:
    return tuple(sum(len(pairs[path][0]) for path in linear.paths if path in pairs) for pairs in adapters)


class ColumnMasks:
    """Which columns of widened layers each row of a batch uses.

    Args:
        index: `[rows]`, the adapter of each row, -1 for none.
    """

    def __init__(self, index: Tensor) -> None:
        self._index = index
        self._masks: dict[tuple[int, ...], Tensor | None] = {}

    def keep(self, rows: Tensor) -> None:
        """Leave only the given rows `[kept]`, in order."""
        self._index = self._index[rows]
        self._masks.clear()

    def apply(self, layer: WidenedLinear, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """`[rows, in]` -> `[rows, out]`, plus `residual`."""
        if isinstance(layer.down, Tensor) and x.dtype == torch.float32:
            inner = torch.mm(x, layer.down)
        else:
            inner = product(x, layer.down)
        mask = self._mask(layer.ranks, x)
        if mask is not None:
            inner.mul_(mask)
        return product(torch.cat((x, inner), 1), layer.whole, layer.bias, residual)

    def _mask(self, ranks: tuple[int, ...], like: Tensor) -> Tensor | None:
        """`[rows, columns]`; None where every row uses every column."""
        if ranks not in self._masks:
            owners = torch.arange(len(ranks)).repeat_interleave(torch.tensor(ranks))
            mask = self._index.unsqueeze(1) == owners
            self._masks[ranks] = None if bool(mask.all()) else mask.to(like.dtype)
        return self._masks[ranks]
