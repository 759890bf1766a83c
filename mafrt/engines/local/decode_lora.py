"""LoRA in decoding: adapters stacked, rows of one adapter side by side.

Layers that read the same input (query, key and value; gate and up) are one product in the lean decoder, so their
adapters are fused as well: A side by side, B as blocks on the diagonal. A product per layer instead, without the
blocks' zeros, was measured too (d=256, K=1 to 16): up to 20% slower, for its launches, and never clearly faster.
Small batches on a CPU have a form of their own (`widened_linear.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from mafrt.engines.local.widened_linear import Pairs

_MOST_EMPTY = {torch.float32: 6, torch.bfloat16: 64}
"""Empty places per adapter in a batched product, up to which computing them costs less than two products of its own
for every adapter. In bfloat16 every product of two matrices takes some 15 microseconds to start on a CPU."""


class FusedLora(NamedTuple):
    """One fused layer's adapters: `a` `[K, in, R]`, `b` `[K, R, out]` (scaled), padded with zeros to one rank R.

    In the wide form, `a` is `[in, K*R]`; else it is a view of `[K, R, in]`, since products read it faster so.
    """

    a: Tensor
    b: Tensor


def fuse(
    adapters: Sequence[Pairs], paths: Sequence[str], widths: Sequence[int], like: Tensor, wide: bool
) -> FusedLora | None:
    """Stack the adapters of linear layers that share their input; None if no adapter targets them.

    `paths` and `widths` (out features) are the layers'; `like` gives dtype and device.
    """
    ranks = [[pairs[path][0].shape[0] if path in pairs else 0 for path in paths] for pairs in adapters]
    rank = max(sum(each) for each in ranks)
    if rank == 0:
        return None
    size = next(pairs[path][0].shape[1] for pairs in adapters for path in paths if path in pairs)
    a = torch.zeros(len(adapters), rank, size, dtype=like.dtype, device=like.device)
    b = torch.zeros(len(adapters), rank, sum(widths), dtype=like.dtype, device=like.device)
    for k, pairs in enumerate(adapters):
        column = first = 0
        for path, width, r in zip(paths, widths, ranks[k], strict=True):
            if r:
                down, up, scaling = pairs[path]
                a[k, column : column + r] = down.detach()
                b[k, column : column + r, first : first + width] = up.detach().t() * scaling
            column += r
            first += width
    down = a.reshape(-1, size).t().contiguous() if wide else a.transpose(1, 2)
    return FusedLora(down, b)


class RowAdapters:
    """Which rows of a batch belong to which of the stacked adapters.

    Args:
        index: `[rows]`, position in the stack, non-decreasing, with the rows of no adapter (-1) at the end.
        count: number of stacked adapters K.
        wide: use the wide form.
        dtype: of the inputs; steers the choice of a form.

    Three forms, all exact. In brackets the decode speed as a share of the bare base's (d=256, 4 layers, r=8, unequal
    groups, one thread of a busy machine; K=4 with 2 and 8 rows an adapter, then K=16 with 2 and 8):

    - *batched* (.81 .77 .75 .79): two batched products over `[K, most rows of an adapter]`, into which rows are
      gathered and from which they are taken back. Equal groups lie that way already (.88 .86 .78 .89).
    - *split* (.78 .81 .66 .80): two products per adapter on its own rows; where the rectangle would be too empty.
    - *wide* (.81 .82 .63 .64): two products with all adapters side by side and a mask in between. Its arithmetic grows
      with K and its launches do not, so it is the one for other devices than a CPU.
    """

    def __init__(self, index: Tensor, count: int, wide: bool, device: torch.device, dtype: torch.dtype) -> None:
        self._count, self._wide, self._device = count, wide, device
        self._most_empty = _MOST_EMPTY.get(dtype, 6)
        self._set(index)

    def _set(self, index: Tensor) -> None:
        self._index = index
        active = index[index >= 0]
        self._rows = len(active)
        if not self._rows:
            return
        sizes = torch.bincount(active, minlength=self._count).tolist()
        self._present = [k for k, size in enumerate(sizes) if size]
        # Rows of no adapter are a last part, which the adapters never reach.
        self._sizes = [*(size for size in sizes if size), len(index) - self._rows]
        most = max(sizes)
        self._batched = self._count > 1 and self._count * most - self._rows <= self._most_empty * self._count
        self._gather: Tensor | None = None
        if self._batched and min(sizes) < most:
            # Row 0 stands in the empty places; its result there is not read.
            gather = torch.zeros(self._count, most, dtype=torch.long)
            place = torch.cat([torch.arange(size) for size in sizes])
            gather[active, place] = torch.arange(self._rows)
            self._gather = gather.view(-1).to(self._device)
            self._back = (active * most + place).to(self._device)
        if self._wide:
            self._mask = (index.unsqueeze(1) == torch.arange(self._count)).to(self._device).unsqueeze(2)

    def keep(self, rows: Tensor) -> None:
        """Leave only the given rows `[kept]`, in order."""
        self._set(self._index[rows.cpu()])

    def add(self, out: Tensor, x: Tensor, lora: FusedLora) -> None:
        """Add the adapters' part for inputs `x` `[rows, in]` to `out` `[rows, out]`, in place."""
        if not self._rows:
            return
        a, b = lora.a, lora.b
        if self._wide:
            inner = torch.mm(x, a).view(len(x), self._count, -1).mul_(self._mask)
            out.addmm_(inner.view(len(x), -1), b.view(-1, b.shape[2]))
        elif self._count == 1:
            rows = self._rows
            out[:rows].addmm_(torch.mm(x[:rows], a[0]), b[0])
        elif not self._batched:
            # Views of all parts at once: one by one they would cost as much as the products.
            parts = zip(self._present, x.split(self._sizes), out.split(self._sizes), strict=False)
            downs, ups = a.unbind(), b.unbind()
            for k, into, onto in parts:
                onto.addmm_(torch.mm(into, downs[k]), ups[k])
        elif self._gather is None:
            inner = torch.bmm(x[: self._rows].view(self._count, -1, x.shape[1]), a)
            out[: self._rows].view(self._count, -1, out.shape[1]).baddbmm_(inner, b)
        else:
            inner = torch.bmm(x.index_select(0, self._gather).view(self._count, -1, x.shape[1]), a)
            added = torch.bmm(inner, b).view(-1, out.shape[1])
            out[: self._rows].add_(added.index_select(0, self._back))
