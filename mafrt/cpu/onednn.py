"""Matrix products of a CPU: packed weights by the kernels in C where there are any, the rest by oneDNN.

Torch's own products use oneDNN in bfloat16 only. In float32 torch calls MKL, and MKL keeps to AVX2 on processors that
are not Intel's: on an AMD processor with AVX-512 its products take 2.1 times as long. Weights that oneDNN has packed
(`packed_weights.py`) are read by the same operator.
"""

from __future__ import annotations

from functools import cache
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from mafrt.cpu import panels
from mafrt.cpu.low_rank import LowRank
from mafrt.cpu.panels import Panels


def product(
    x: Tensor,
    weight: Tensor | Panels,
    bias: Tensor | None = None,
    added: Tensor | None = None,
    low: LowRank | None = None,
) -> Tensor:
    """`x W^T + b`, plus `added` `[rows, out]`: `[rows, in]` -> `[rows, out]`. Records nothing for a backward pass.

    `weight` is `[out, in]`, also a transposed view of `[in, out]`, or packed; `low` is what the rows' adapters add.
    """
    if isinstance(weight, Panels):
        return weight.product(x, bias, added, low)
    out = _plain(x, weight, bias, added)
    if low is not None:
        low.add_to(out, x)
    return out


def _plain(x: Tensor, weight: Tensor, bias: Tensor | None, added: Tensor | None) -> Tensor:
    if weight.is_mkldnn or serves(weight):
        if added is not None:
            return cast(Tensor, torch.ops.mkldnn._linear_pointwise.binary(x, added, weight, bias, "add"))
        return cast(Tensor, torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], ""))
    if added is None:
        return F.linear(x, weight, bias)
    out = torch.addmm(added, x, weight.t())
    return out if bias is None else out.add_(bias)


def serves(weight: Tensor) -> bool:
    """Whether products with this weight, which is not packed, are oneDNN's: in float32 on a CPU.

    Its rows or its columns have to lie side by side; for any other view oneDNN has a kernel that takes 500 times as
    long.
    """
    if weight.dtype != torch.float32 or weight.device.type != "cpu" or not supported(torch.float32):
        return False
    return weight.is_contiguous() or weight.t().is_contiguous()


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
                for each in (weight, _reordered(weight))
            ]
    # The operators are not part of torch's public interface, and need kernels that not every processor has.
    except (AttributeError, RuntimeError, TypeError):
        return False
    return all(torch.equal(each, torch.tensor([[4.0, 13.0]] * 4, dtype=dtype)) for each in found)


def can_pack(weight: Tensor) -> bool:
    """Whether `pack` has a layout for this weight."""
    return panels.serves(weight) or (weight.device.type == "cpu" and supported(weight.dtype))


def pack(weight: Tensor) -> Tensor | Panels:
    """A weight `[out, in]` in the layout of the kernels that are fastest here; see `can_pack`."""
    return Panels.of(weight) if panels.serves(weight) else _reordered(weight)


def _reordered(weight: Tensor) -> Any:
    return torch.ops.mkldnn._reorder_linear_weight(weight.contiguous())
