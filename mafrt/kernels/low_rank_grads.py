"""Memory of the gradients of adapters in a backward pass (`LowRank.backward`), and each of them cut from it.

A pass has those of all adapters side by side: a place of its own for each would take longer to ask for than to fill.
Their places are the same in every pass of a batch of the same shape, and are kept.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Any, NamedTuple

from torch import Tensor

Shape = tuple[tuple[int, ...], tuple[float, ...] | None]
"""An adapter's ranks by layer, and its scales; None: it gets no gradients."""


class Grads(NamedTuple):
    """Gradients of one adapter, float32; None for a layer that it does not target."""

    downs: list[Tensor | None]
    """of A, `[r, in]` of each layer"""
    ups: list[Tensor | None]
    """of B, `[out, r]` of each layer"""


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
        number, count, layers = {owner: k for k, owner in enumerate(learning)}, len(learning), range(len(widths))
        self._owners, self._ranks, self._widths, self._inputs = tuple(learning), tuple(learning.values()), widths, size
        self.fresh = bytes(owner not in owners[:place] for place, owner in enumerate(owners))
        """by segment, whether it is its adapter's first"""
        none = (0.0,) * len(widths)
        self.factors = (ctypes.c_float * (len(owners) * len(widths)))(
            *(scale for own in adapters for scale in ((own and own[1]) or none))
        )
        """scales, by segment and layer"""
        each = [sum(ranks) for ranks in self._ranks]
        downs = list(accumulate((rank * size for rank in each), initial=0))
        # Those of B behind those of A, layer by layer: matrices of one shape side by side are cut by one call.
        sizes = [ranks[layer] * widths[layer] for layer in layers for ranks in self._ranks]
        ups = list(accumulate(sizes, initial=downs[-1]))
        parts = list(accumulate((rank * sum(widths) for rank in each), initial=0))
        self.size, self.room = ups[-1], parts[-1]
        """numbers of the gradients, and those that the kernel needs in between"""
        self._layer_starts = ups[:-1:count] if count else []
        places = [number.get(owner) for owner in owners]
        self.downs = _integers([-1 if k is None else downs[k] for k in places])
        """by segment, the place of its adapter's A `[R, in]`"""
        self.ups = _integers([-1 if k is None else ups[layer * count + k] for k in places for layer in layers])
        """by segment and layer, the place of its adapter's B `[out, r]`"""
        self.parts = _integers([-1 if k is None else parts[k] for k in places])
        """by segment, the place of its adapter's B^T `[R, out of all]` in the room in between; -1: it does not learn"""

    def cut(self, memory: Tensor) -> dict[int, Grads]:
        """The gradients by owner, from the filled memory `[size]`; each lies as its parameter: autograd copies none."""
        if not self._owners:
            return {}
        layers = len(self._widths)
        downs = _matrices(memory, 0, [(rank, self._inputs) for ranks in self._ranks for rank in ranks])
        ups = [
            _matrices(memory, start, [(width, ranks[layer]) for ranks in self._ranks])
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


def _matrices(memory: Tensor, start: int, shapes: Sequence[tuple[int, int]]) -> Sequence[Tensor]:
    """Matrices that lie one behind the other in memory, from `start` on."""
    rows, columns = shapes[0]
    if all(shape == shapes[0] for shape in shapes):  # one call for all, which takes a fifth of the time
        return memory.as_strided((len(shapes), rows, columns), (rows * columns, columns, 1), start).unbind()
    places = accumulate((rows * columns for rows, columns in shapes), initial=start)
    return [memory.as_strided(shape, (shape[1], 1), place) for shape, place in zip(shapes, places, strict=False)]


def _integers(numbers: Sequence[int]) -> Any:
    return (ctypes.c_int64 * len(numbers))(*numbers)
