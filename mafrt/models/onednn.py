"""Matrix products of a CPU by oneDNN, which torch's own products use in bfloat16 only.

In float32 torch calls MKL, and MKL keeps to AVX2 on processors that are not Intel's: on an AMD processor with AVX-512
its products take 2.1 times as long. Packed weights (`packed_weights.py`) are read by the same operator.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None, added: Tensor | None = None) -> Tensor:
    """`x W^T + b`, plus `added` `[rows, out]`: `[rows, in]` -> `[rows, out]`. Records nothing for a backward pass.

    `weight` is `[out, in]`, also a transposed view of `[in, out]`, or packed.
    """
    if weight.is_mkldnn or serves(weight):
        if added is not None:
            return torch.ops.mkldnn._linear_pointwise.binary(x, added, weight, bias, "add")
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    if added is None:
        return F.linear(x, weight, bias)
    out = torch.addmm(added, x, weight.t())
    return out if bias is None else out.add_(bias)


def serves(weight: Tensor) -> bool:
    """Whether products with this weight, which is not packed, are oneDNN's: in float32 on a CPU."""
    return weight.dtype == torch.float32 and weight.device.type == "cpu" and supported(torch.float32)


@cache
def supported(dtype: torch.dtype) -> bool:
    """Whether this machine and this version of torch have these products, checked by some of them."""
    if dtype not in (torch.float32, torch.bfloat16):
        return False
    weight = torch.arange(6.0).view(2, 3).to(dtype)
    x, added = torch.ones(4, 3, dtype=dtype), torch.ones(4, 2, dtype=dtype)
    try:
        with torch.no_grad():
            found = [
                torch.ops.mkldnn._linear_pointwise.binary(x, added, each, None, "add")
                for each in (weight, pack(weight))
            ]
    # The operators are not part of torch's public interface, and need kernels that not every processor has.
    except (AttributeError, RuntimeError, TypeError):
        return False
    return all(torch.equal(each, torch.tensor([[4.0, 13.0]] * 4, dtype=dtype)) for each in found)


def pack(weight: Tensor) -> Any:
    """A weight `[out, in]` in the layout of these products' kernels, where `supported`."""
    return torch.ops.mkldnn._reorder_linear_weight(weight.contiguous())
