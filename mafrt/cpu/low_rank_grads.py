"""Memory of the gradients of adapters in a backward pass (`LowRank.backward`), and each of them cut from it.

A pass has those of all adapters side by side: a place of its own for each would take longer to ask for than to fill.
Their places are the same in every pass of a batch of the same shape, and are kept.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import accumulate, groupby
from typing import Any, NamedTuple

from torch import Tensor

Targets = tuple[tuple[int, int, float], ...]
"""Of each layer that an adapter targets: its number, the place of A's gradient among all (B's is behind it), and B's
scale."""
Shape = tuple[tuple[int, ...], Targets | None]
"""An adapter's ranks by layer, and its targets; None: it gets no gradients."""


class _Matrix(NamedTuple):
    """A gradient in the memory of a pass."""

    place: int
    """among all gradients"""
    rows: int
    columns: int


class Plan:
    """Places of the gradients of a table's adapters, as the kernel takes them.

    Args:
        owners: of the segments.
        adapters: of each segment; None: it has none.
        widths: outputs of each layer.
        size: of the inputs.
        count: of all gradients, also of those that are not computed.
    """

    def __init__(
        self,
        owners: tuple[int, ...],
        adapters: tuple[Shape | None, ...],
        widths: tuple[int, ...],
        size: int,
        count: int,
    ) -> None:
        # Several segments of one adapter are summed into one place.
        learning = {
            owner: (adapter[0], {layer: (place, scale) for layer, place, scale in adapter[1]})
            for owner, adapter in zip(owners, adapters, strict=True)
            if adapter is not None and adapter[1] is not None
        }
        number, layers = {owner: k for k, owner in enumerate(learning)}, range(len(widths))
        self.fresh = bytes(owner not in owners[:place] for place, owner in enumerate(owners))
        """by segment, whether it is its adapter's first"""
        scales = [
            targets.get(layer, (0, 0.0))[1]
            for targets in (learning[owner][1] if owner in learning else {} for owner in owners)
            for layer in layers
        ]
        self.factors = (ctypes.c_float * len(scales))(*scales)
        """scales, by segment and layer"""
        each = [sum(ranks) for ranks, _ in learning.values()]
        downs = list(accumulate((rank * size for rank in each), initial=0))
        # Those of B behind those of A, layer by layer: matrices of one shape side by side are cut by one call.
        sizes = [ranks[layer] * widths[layer] for layer in layers for ranks, _ in learning.values()]
        ups = list(accumulate(sizes, initial=downs[-1]))
        parts = list(accumulate((rank * sum(widths) for rank in each), initial=0))
        self.size, self.room = ups[-1], parts[-1]
        """numbers of the gradients, and those that the kernel needs in between"""
        places = [number.get(owner) for owner in owners]
        self.downs = _integers([-1 if k is None else downs[k] for k in places])
        """by segment, the place of its adapter's A `[R, in]`"""
        self.ups = _integers([-1 if k is None else ups[layer * len(learning) + k] for k in places for layer in layers])
        """by segment and layer, the place of its adapter's B `[out, r]`"""
        self.parts = _integers([-1 if k is None else parts[k] for k in places])
        """by segment, the place of its adapter's B^T `[R, out of all]` in the room in between; -1: it does not learn"""
        matrices = [
            _Matrix(targets[layer][0], ranks[layer], size)
            for ranks, targets in learning.values()
            for layer in layers
            if ranks[layer]
        ]
        matrices += [
            _Matrix(targets[layer][0] + 1, widths[layer], ranks[layer])
            for layer in layers
            for ranks, targets in learning.values()
            if ranks[layer]
        ]
        self._blocks = list(_blocks(matrices))
        at = {matrix.place: k for k, matrix in enumerate(matrices)}
        self._order = [at.get(place, len(matrices)) for place in range(count)]

    def cut(self, memory: Tensor) -> list[Tensor | None]:
        """The gradients by place, from the filled memory `[size]`; None: not computed.

        Each lies as its parameter does: autograd copies none.
        """
        found: list[Tensor | None] = []
        for shape, strides, start in self._blocks:
            found += memory.as_strided(shape, strides, start).unbind()
        found.append(None)
        return [found[k] for k in self._order]


@lru_cache(maxsize=1024)
def plan_of(
    owners: tuple[int, ...], adapters: tuple[Shape | None, ...], widths: tuple[int, ...], size: int, count: int
) -> Plan:
    """The plan of these arguments, made once."""
    return Plan(owners, adapters, widths, size, count)


_Block = tuple[tuple[int, int, int], tuple[int, int, int], int]


def _blocks(matrices: Sequence[_Matrix]) -> Iterator[_Block]:
    """Shape, strides and start of each run of matrices of one shape, which lie one behind the other."""
    start = 0
    for (rows, columns), run in groupby(matrices, lambda matrix: matrix[1:]):
        shape = (sum(1 for _ in run), rows, columns)
        yield shape, (rows * columns, columns, 1), start
        start += shape[0] * rows * columns


def _integers(numbers: Sequence[int]) -> Any:
    return (ctypes.c_int64 * len(numbers))(*numbers)
