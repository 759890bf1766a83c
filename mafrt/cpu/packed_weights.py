"""Frozen weights in the layout of a CPU's matrix kernels, made once instead of in every product.

oneDNN copies a weight into blocks of its own in every call. That costs a fifth to a half of a product with few rows, as
in decoding, and in float32 also a fifth of one with many rows. The weights are frozen here, so a copy in that layout
is made once, and all later products read it. Products by oneDNN in bfloat16 are equal bit by bit; those in float32, and
those of the kernels in C, differ by the order of sums.

A copy takes the memory of the weights again (in learning twice, since gradients go back through another one), so a
model is packed only if it is small for the machine's memory. That depends on nothing but the numbers of bases and
processes, so a resumed run computes the same.
"""

from __future__ import annotations

from copy import copy
from typing import Any

import torch
from torch import Tensor, nn

from mafrt.core.machine_memory import memory_bytes
from mafrt.cpu.onednn import can_pack, pack
from mafrt.cpu.panels import Panels
from mafrt.models.memory_estimate import PACKED_ALONE, PACKED_SHARE


class PackedWeights:
    """Packed copies of a model's frozen weights, each made at its first use.

    Args:
        model: the frozen model; a weight that is written to later is packed again.
        memory: of the machine, in bytes; None: this one's.
    """

    def __init__(self, model: nn.Module, memory: int | None = None) -> None:
        self._share = sum(p.numel() * p.element_size() for p in model.parameters()) / (memory or memory_bytes())
        self.enabled = self._share <= PACKED_ALONE
        """whether weights are packed at all"""
        self._packed: dict[tuple[object, ...], tuple[int, list[Tensor], Tensor | Panels]] = {}

    def beside_others(self) -> None:
        """Further bases, or further processes with this one, take their parts of the machine's memory."""
        self.enabled = self.enabled and self._share <= PACKED_SHARE

    def of(self, *weights: Tensor, transposed: bool = False) -> Tensor | Panels | None:
        """The weights `[out, in]` one below the other, packed for `onednn.product`; None: use them as they are.

        `transposed` gives the copy for the way back: for products with the weights' transpose.
        """
        first = weights[0]
        if not self.enabled or not can_pack(first):
            return None
        key = (transposed, *((weight.data_ptr(), weight.dtype, weight.shape) for weight in weights))
        # Torch counts the writes to a tensor.
        version = sum(weight._version for weight in weights)
        cached = self._packed.get(key)
        if cached is None or cached[0] != version:
            with torch.no_grad():
                whole = weights[0] if len(weights) == 1 else torch.cat(weights)
                whole = whole.t().contiguous() if transposed else whole
                # The weights' memory is held along with it, so that no other weight comes to lie at their addresses:
                # `Module.to` gives a parameter new memory and lets the old one go.
                cached = self._packed[key] = (version, [w.detach() for w in weights], pack(whole.detach()))
        return cached[2]

    def __deepcopy__(self, memo: dict[int, Any]) -> PackedWeights:
        """Without the copies, which torch cannot copy: those of another model are made of its own weights."""
        fresh = copy(self)
        fresh._packed = {}
        return fresh
