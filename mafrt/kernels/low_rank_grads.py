"""Memory of the gradients of adapters in a backward pass (`LowRank.backward`), and each of them cut from it.

A pass has those of all adapters side by side: a place of its own for each would take longer to ask for than to fill.
Their places are the same in every pass of a batch of the same shape, and are kept.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache, lru_cache
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mafrt.kernels.library import library

Shape = tuple[tuple[int, ...], tuple[float, ...] | None]
"""An adapter's ranks by layer, and its scales; None: it gets no gradients."""


class Grads(NamedTuple):
    """Gradients of one adapter, float32; None for a layer that it does not target."""

    downs: list[Tensor | None]
    """of A, `[r, in]` of each layer"""
    ups: list[Tensor | None]
    """of B, `[out, r]` of each layer"""


class Sums(NamedTuple):
    """Memory of one pass."""

    kept: Tensor
    """gradients, as long as any of them is there"""
    turned_later: Tensor
    """those of B^T, zeros included; given back at once"""


class Plan:
    """Places of the gradients of a table's adapters, as the kernel takes them.

    Args:
        owners: of the segments.
        adapters: of each segment; None: it has none.
        widths: outputs of each layer.
        size: of the inputs.
    """

    def __init__(
        self, owners: tuple[int, ...], adapters: tuple[Shape | None, ...], widths: tuple[int, ...], size: int
    ) -> None:
        # Several segments of one adapter are summed into one place.
        learning = {
            owner: own[0] for owner, own in zip(owners, adapters, strict=True) if own is not None and own[1] is not None
        }
        self._owners, self._ranks, self._widths, self._inputs = tuple(learning), tuple(learning.values()), widths, size
        self.fresh = bytes(owner not in owners[:place] for place, owner in enumerate(owners))
        """by segment, whether it is its adapter's first"""
        none = (0.0,) * len(widths)
        self.factors = _floats([scale for own in adapters for scale in ((own and own[1]) or none)])
        """scales, by segment and layer"""
        each = [sum(ranks) for ranks in self._ranks]
        downs = list(accumulate((rank * size for rank in each), initial=0))
        ups = list(accumulate((rank * sum(widths) for rank in each), initial=0))
        self.downs = _places(owners, self._owners, downs)
        """by segment, where its adapter's `[R, in]` begins in `Sums.kept`; -1: no gradients are wanted"""
        self.ups = _places(owners, self._owners, ups)
        """the same of `[R, out of all]` in `Sums.turned_later`"""
        # B's gradients lie behind those of A, layer by layer, so that those of one shape are one matrix.
        sizes = [ranks[layer] * width for layer, width in enumerate(widths) for ranks in self._ranks]
        turned, count = list(accumulate(sizes, initial=downs[-1])), len(learning)
        self._kept, self._turned_later = turned[-1], ups[-1]
        self._layer_starts = turned[:-1:count] if count else []
        self._turn = (
            count,
            len(widths),
            _integers([r for ranks in self._ranks for r in (0, *accumulate(ranks))]),
            _integers([0, *accumulate(widths)]),
            _integers(ups[:-1]),
            _integers([turned[layer * count + k] for k in range(count) for layer in range(len(widths))]),
        )

    def sums(self) -> Sums:
        """Memory for one pass, not filled."""
        return Sums(torch.empty(self._kept), torch.empty(self._turned_later))

    def cut(self, sums: Sums) -> dict[int, Grads]:
        """The gradients by owner, from the filled memory; those of B lie as B does, so autograd need not copy them."""
        if not self._owners:
            return {}
        kept, layers = sums.kept, len(self._widths)
        _turn()(*self._turn, sums.turned_later.data_ptr(), kept.data_ptr())
        downs = _matrices(kept, 0, [(rank, self._inputs) for ranks in self._ranks for rank in ranks])
        ups = [
            _matrices(kept, start, [(width, ranks[layer]) for ranks in self._ranks])
            for layer, (start, width) in enumerate(zip(self._layer_starts, self._widths, strict=True))
        ]
        return {
            owner: Grads(
                [downs[k * layers + layer] if rank else None for layer, rank in enumerate(ranks)],
                [ups[layer][k] if rank else None for layer, rank in enumerate(ranks)],
            )
            for k, (owner, ranks) in enumerate(zip(self._owners, self._ranks, strict=True))
        }


@lru_cache(maxsize=1024)
def plan_of(owners: tuple[int, ...], adapters: tuple[Shape | None, ...], widths: tuple[int, ...], size: int) -> Plan:
    """The plan of these arguments, made once."""
    return Plan(owners, adapters, widths, size)


def _places(owners: Sequence[int], learning: Sequence[int], starts: Sequence[int]) -> Any:
    found = dict(zip(learning, starts, strict=False))
    return _integers([found.get(owner, -1) for owner in owners])


def _matrices(memory: Tensor, start: int, shapes: Sequence[tuple[int, int]]) -> Sequence[Tensor]:
    """Matrices that lie one behind the other in memory, from `start` on."""
    rows, columns = shapes[0]
    if all(shape == shapes[0] for shape in shapes):  # one call for all, which takes a fifth of the time
        return memory.as_strided((len(shapes), rows, columns), (rows * columns, columns, 1), start).unbind()
    places = accumulate((rows * columns for rows, columns in shapes), initial=start)
    return [memory.as_strided(shape, (shape[1], 1), place) for shape, place in zip(shapes, places, strict=False)]


def _integers(numbers: Sequence[int]) -> Any:
    return (ctypes.c_int64 * len(numbers))(*numbers)


def _floats(numbers: Sequence[float]) -> Any:
    return (ctypes.c_float * len(numbers))(*numbers)


@cache
def _turn() -> Any:
    lib = library()
    assert lib is not None
    function, pointer = lib.low_rank_turn, ctypes.c_void_p
    function.argtypes, function.restype = (ctypes.c_long, ctypes.c_long, *[pointer] * 6), None
    return function
