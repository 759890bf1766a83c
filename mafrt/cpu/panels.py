"""Products with frozen weights that lie in panels of 48 outputs (`source/gemm.c`).

On one thread of an AMD EPYC (Zen 4), per second: 8 rows by 576 to 3,072 in bfloat16 182 GFLOP with panels and 62 with
oneDNN's packed weights, 32 rows 214 and 161, 1,214 rows 219 and 207; in float32 91 and 39, 107 and 89, 109 and 107.
Processors with AMX multiply bfloat16 faster by oneDNN, so there are no panels in bfloat16 there.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor

from mafrt.cpu.library import library
from mafrt.cpu.low_rank import LowRank, in_panels

_FUNCTIONS = {torch.float32: "gemm_f32", torch.bfloat16: "gemm_bf16"}


@dataclass(frozen=True)
class Panels:
    """A frozen weight `[out, in]` as `[panels, in, 48]`, in bfloat16 `[panels, in / 2, 48, 2]`; zeros at the end."""

    numbers: Tensor
    width: int
    """out"""
    size: int
    """in"""

    @staticmethod
    def of(weight: Tensor) -> Panels:
        """Copy a weight into panels; `serves` tells for which that is possible."""
        return Panels(in_panels(weight.t()), *weight.shape)

    def product(
        self,
        x: Tensor,
        bias: Tensor | None = None,
        added: Tensor | None = None,
        low: LowRank | None = None,
    ) -> Tensor:
        """`x W^T + b`, plus `added` `[rows, out]`: `[rows, in]` -> `[rows, out]`. Records nothing.

        `low` is what the rows' adapters add in the same pass; its numbers are computed first unless they are given.
        """
        # The rows' numbers have to lie side by side; rows may have gaps between them.
        x = x if x.stride(1) == 1 else x.contiguous()
        if added is not None and added.stride(1) != 1:
            added = added.contiguous()
        out = x.new_empty(len(x), self.width)
        function = _function(x.dtype)
        assert function is not None
        if x.dtype != self.numbers.dtype or x.shape[1] != self.size:  # the kernel would read past the rows
            raise ValueError(f"found rows of {x.shape[1]} {x.dtype}, expected {self.size} {self.numbers.dtype}")
        function(
            x.data_ptr(),
            x.stride(0),
            len(x),
            self.size,
            self.numbers.data_ptr(),
            self.width,
            None if bias is None else bias.data_ptr(),
            None if added is None else added.data_ptr(),
            0 if added is None else added.stride(0),
            None if low is None else low.reference,
            out.data_ptr(),
            self.width,
            torch.get_num_threads(),
        )
        return out


def serves(weight: Tensor) -> bool:
    """Whether this machine multiplies with this weight in panels."""
    if weight.device.type != "cpu" or weight.dim() != 2 or _function(weight.dtype) is None:
        return False
    # In bfloat16 two inputs are one unit.
    return weight.dtype != torch.bfloat16 or weight.shape[1] % 2 == 0


@cache
def _function(dtype: torch.dtype) -> Callable[..., Any] | None:
    """The product in this number format, tried once; None: the processor or the machine has none."""
    lib = library()
    if lib is None or dtype not in _FUNCTIONS:
        return None
    function = getattr(lib, _FUNCTIONS[dtype], None)
    if function is None:
        return None
    pointer, number = ctypes.c_void_p, ctypes.c_long
    function.argtypes = [pointer, number, number, number, pointer, number, pointer, pointer, number]
    function.argtypes += [pointer, pointer, number, ctypes.c_int]
    function.restype = None
    return cast(Callable[..., Any], function)
