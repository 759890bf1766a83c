"""LoRA in decoding: adapters stacked, rows of one adapter side by side.

Layers that read the same input (query, key and value; gate and up) are one product in the lean decoder. Their
adapters' A are side by side too, so that they are one product; each layer's B works on its own columns of the output.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Up(NamedTuple):
    """One layer's B: `weight` `[K, r, width]` (scaled) takes `inner[..., ranks]` to `out[..., outs]`."""

    weight: Tensor
    ranks: slice
    outs: slice


class FusedLora(NamedTuple):
    """The adapters of layers that share their input: `down` `[K, in, R]` (in the wide form `[in, K*R]`), then `ups`.

    Every layer has the largest of the adapters' ranks; smaller ones are filled up with zeros.
    """

    down: Tensor
    ups: list[Up]


Pairs = Mapping[str, tuple[Tensor, Tensor, float]]
"""One adapter: path of a linear layer -> (A `[r, in]`, B `[out, r]`, scaling)."""


def fuse(
    adapters: Sequence[Pairs], paths: Sequence[str], widths: Sequence[int], like: Tensor, wide: bool
) -> FusedLora | None:
    """Stack the adapters of linear layers that share their input; None if nobody targets them.

    `paths` and `widths` (out features) are the layers'; `like` gives dtype and device.
    """
    downs: list[Tensor] = []
    ups: list[Up] = []
    rank = first = 0
    for path, width in zip(paths, widths, strict=True):
        found = [(k, *pairs[path]) for k, pairs in enumerate(adapters) if path in pairs]
        if found:
            r, size = max(a.shape[0] for _, a, _, _ in found), found[0][1].shape[1]
            down = torch.zeros(len(adapters), size, r, dtype=like.dtype, device=like.device)
            up = torch.zeros(len(adapters), r, width, dtype=like.dtype, device=like.device)
            for k, a, b, scaling in found:
                down[k, :, : len(a)] = a.detach().t()
                up[k, : len(a)] = b.detach().t() * scaling
            downs.append(down)
            ups.append(Up(up, slice(rank, rank + r), slice(first, first + width)))
            rank += r
        first += width
    if not downs:
        return None
    stacked = torch.cat(downs, 2)
    return FusedLora(stacked.transpose(0, 1).reshape(stacked.shape[1], -1) if wide else stacked, ups)


class RowAdapters:
    """Which rows of a batch belong to which of the stacked adapters.

    Args:
        index: `[rows]`, position in the stack, non-decreasing, with the rows of no adapter (-1) at the end.
        count: number of stacked adapters K.
        wide: use the wide form.

    Three forms, all exact. Microseconds on one core for a layer 256 -> 1536, r = 2 x 8, besides the 1016 (K=16, 8
    rows each) or 296 (2 rows each) of the base layer itself:

    - *even*: every adapter has equally many rows: two batched products (119 and 70).
    - *split*: two products per adapter on its own rows (161 and 108); for ragged batches on a CPU. Padding them to an
      even batch costs a gather and a scatter (229 and 124).
    - *wide*: two products with all adapters side by side and a mask in between (1191 and 349); its arithmetic grows
      with K, its launches do not, which is what counts on a GPU.
    """

    def __init__(self, index: Tensor, count: int, wide: bool, device: torch.device) -> None:
        self._count, self._wide, self._device = count, wide, device
        self._set(index)

    def _set(self, index: Tensor) -> None:
        self._index = index
        active = index[index >= 0]
        self._rows = len(active)
        sizes = torch.bincount(active, minlength=self._count).tolist() if self._rows else [0] * self._count
        self._present = [k for k, size in enumerate(sizes) if size]
        # Rows of no adapter are a last part, which the adapters never reach.
        self._sizes = [*(size for size in sizes if size), len(index) - self._rows]
        self._even = len(set(sizes)) == 1 and self._count > 1
        if self._wide:
            self._mask = (index.unsqueeze(1) == torch.arange(self._count)).to(self._device).unsqueeze(2)

    def keep(self, rows: Tensor) -> None:
        """Leave only the given rows `[kept]`, in order."""
        self._set(self._index[rows.cpu()])

    def add(self, out: Tensor, x: Tensor, lora: FusedLora | None) -> None:
        """Add the adapters' part for inputs `x` `[rows, in]` to `out` `[rows, out]`, in place."""
        if lora is None or not self._rows:
            return
        down, ups = lora
        if self._wide:
            inner = torch.mm(x, down).view(len(x), self._count, -1).mul_(self._mask)
            for up, ranks, outs in ups:
                out[:, outs].addmm_(inner[:, :, ranks].reshape(len(x), -1), up.view(-1, up.shape[2]))
        elif self._even:
            each = out[: self._rows].view(self._count, -1, out.shape[1])
            inner = torch.bmm(x[: self._rows].view(self._count, -1, x.shape[1]), down)
            for up, ranks, outs in ups:
                each[:, :, outs].baddbmm_(inner[:, :, ranks], up)
        else:
            # Views of all parts at once: one by one they would cost as much as the products.
            inner, every = x.new_empty(len(x), down.shape[2]), down.unbind()
            for k, into, onto in zip(self._present, x.split(self._sizes), inner.split(self._sizes), strict=False):
                torch.mm(into, every[k], out=onto)
            for up, ranks, outs in ups:
                parts = zip(
                    self._present, inner[:, ranks].split(self._sizes), out[:, outs].split(self._sizes), strict=False
                )
                every = up.unbind()
                for k, into, onto in parts:
                    onto.addmm_(into, every[k])
