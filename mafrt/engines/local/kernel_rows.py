"""LoRA in decoding by the kernels in C: rows of one adapter side by side, as a part of the frozen product where that is
in panels."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mafrt.engines.local.decoder_block import Linear
from mafrt.engines.local.lean_model import LeanModel
from mafrt.kernels.low_rank import Joined, LowRank, Segments, columns_for
from mafrt.kernels.panels import Panels


class KernelRows:
    """Which rows of a batch use which adapters, and the tables of all layers that say so to the kernels.

    Args:
        model: the weights.
        names: of the adapters.
        index: `[rows]`, position among the names, -1 for none; rows of one adapter lie side by side.
    """

    def __init__(self, model: LeanModel, names: Sequence[str], index: Tensor) -> None:
        owners, runs = torch.unique_consecutive(index, return_inverse=True)
        self._runs, layers = runs, model.joined(names)
        self._segments = Segments(self._stops(len(owners)), owners.tolist())
        most = max((columns_for(each) for block in layers for each in block), default=0)
        # One place for all layers, of which each is done with it before the next begins.
        self._numbers = torch.empty(len(index), most, dtype=model.dtype)
        self._tables = [
            [self._table(linear, each) for linear, each in zip(block.linears, adapters, strict=True)]
            for block, adapters in zip(model.blocks, layers, strict=True)
        ]

    def _table(self, linear: Linear, adapters: Sequence[Joined | None]) -> LowRank | None:
        own = [None if k < 0 else adapters[k] for k in self._segments.owners]
        if not any(own):
            return None
        return LowRank(self._segments, own, linear.widths, self._numbers, panels=isinstance(linear.packed, Panels))

    def _stops(self, count: int) -> list[int]:
        """The row behind each run; runs may have lost all of their rows."""
        return torch.bincount(self._runs, minlength=count).cumsum(0).tolist()

    def keep(self, rows: Tensor) -> None:
        """Leave only the given rows `[kept]`, in order."""
        self._runs = self._runs[rows.cpu()]
        self._segments.move(self._stops(len(self._segments.owners)))

    def product(self, block: int, linear: int, layer: Linear, x: Tensor, residual: Tensor | None) -> Tensor:
        """A linear layer with its adapters, plus `residual`: `[rows, in]` -> `[rows, out]`."""
        return layer(x, residual, self._tables[block][linear])
