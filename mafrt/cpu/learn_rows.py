"""The operations of a learning pass between its products, each in one pass over memory (`source/learn_rows.c`).

Numbers in between are float32, and results are rounded once. Nothing here is recorded; the functions' callers in
`mafrt.models` are autograd operations. A tensor is taken as rows of its last dimension.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mafrt.cpu.library import functions_of


def serves(*tensors: Tensor) -> bool:
    """Whether this machine has the kernels for these tensors, all of one number format."""
    first = tensors[0].dtype
    if first not in (torch.float32, torch.bfloat16) or _functions() is None:
        return False
    # A loop, since a generator takes twice as long and this is asked for every operation.
    for t in tensors:  # noqa: SIM110
        if t.dtype != first or t.device.type != "cpu":
            return False
    return True


def norm(x: Tensor, weight: Tensor, eps: float, plus_one: bool) -> tuple[Tensor, Tensor]:
    """RMS norm with the factors w, or 1 + w, and the rows' factors 1 / sqrt(mean(x^2) + eps), `[..., 1]` float32."""
    out, r = _empty(x), torch.empty((*x.shape[:-1], 1), dtype=torch.float32)
    rows = _grouped(x)
    args = rows.start, rows.step, rows.rows, rows.group, weight.contiguous().data_ptr(), out.data_ptr(), r.data_ptr()
    _call("learn_norm", *args, x.shape[-1], eps, int(plus_one), *_how(x))
    return out, r


def norm_backward(x: Tensor, weight: Tensor, r: Tensor, grad: Tensor, plus_one: bool) -> Tensor:
    """The input's gradient from that of `norm`'s result."""
    out, rows, onto = _empty(x), _grouped(x), _grouped(grad)
    args = rows.start, rows.step, rows.rows, rows.group, weight.contiguous().data_ptr()
    more = onto.start, onto.step, onto.group, out.data_ptr(), r.data_ptr()
    _call("learn_norm_backward", *args, *more, x.shape[-1], int(plus_one), *_how(x))
    return out


def gated_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """RMS norm with the factors w, times silu(gate), and the rows' factors as of `norm`."""
    x, gate, out = x.contiguous(), gate.contiguous(), _empty(x)
    r = torch.empty((*x.shape[:-1], 1), dtype=torch.float32)
    args = x.data_ptr(), gate.data_ptr(), r.numel(), weight.contiguous().data_ptr(), out.data_ptr(), r.data_ptr()
    _call("learn_gated_norm", *args, x.shape[-1], eps, *_how(x))
    return out, r


def gated_norm_backward(x: Tensor, gate: Tensor, weight: Tensor, r: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of input and gate from that of `gated_norm`'s result."""
    x, gate, grad, dx, dgate = x.contiguous(), gate.contiguous(), grad.contiguous(), _empty(x), _empty(x)
    args = x.data_ptr(), gate.data_ptr(), r.numel(), weight.contiguous().data_ptr(), grad.data_ptr()
    _call("learn_gated_norm_backward", *args, dx.data_ptr(), dgate.data_ptr(), r.data_ptr(), x.shape[-1], *_how(x))
    return dx, dgate


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """`silu(gate) * up`."""
    out, left, right = _empty(gate), _rows(gate), _rows(up)
    args = left.data_ptr(), left.stride(0), right.data_ptr(), right.stride(0), len(left), gate.shape[-1]
    _call("learn_swiglu", *args, out.data_ptr(), *_how(gate))
    return out


def swiglu_backward(gate: Tensor, up: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of gate and up: halves of one matrix, so that a layer behind both finds them joined."""
    left, right, onto, size = _rows(gate), _rows(up), _rows(grad), gate.shape[-1]
    both = gate.new_empty(*gate.shape[:-1], 2 * size)
    args = left.data_ptr(), left.stride(0), right.data_ptr(), right.stride(0), onto.data_ptr(), onto.stride(0)
    _call("learn_swiglu_backward", *args, len(left), size, both.data_ptr(), *_how(gate))
    return both[..., :size], both[..., size:]


def rotary(x: Tensor, cosine: Tensor, sine: Tensor, backward: bool = False) -> Tensor:
    """Rotary embedding of `[heads, N, D]` by `[N, D]`, or its way back, for a gradient.

    The result's memory is `[N, heads, D]`, as that of a linear layer is.
    """
    x = x if x.stride(2) == 1 else x.contiguous()
    heads, n, size = x.shape
    out = x.new_empty(n, heads, size)
    args = x.data_ptr(), x.stride(0), x.stride(1), heads, n, size, cosine.contiguous().data_ptr()
    _call("learn_rotary", *args, sine.contiguous().data_ptr(), out.data_ptr(), int(backward), *_how(x))
    return out.transpose(0, 1)


def word_softmax(
    products: Tensor, targets: Tensor, scales: Tensor, probabilities: bool, surprises: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities of the targets and entropies of softmax(scale x products), by row of `[tokens, V]`.

    Args:
        products: replaced by the probabilities p where `probabilities`.
        targets: `[tokens]` int64.
        scales: `[tokens]` float32.
        probabilities: whether they are wanted.
        surprises: is filled with p (x - max x) where it is given.

    Returns:
        Log-probabilities, entropies, and the entropies less log sum exp(x - max x); `[tokens]` float32.
    """
    n, words = products.shape
    # Raised and not asserted, since the kernel would read outside the products, also under `python -O`.
    fits = products.is_contiguous() and len(targets) == len(scales) == n
    if not fits or not bool(((targets >= 0) & (targets < words)).all()):
        raise ValueError(f"found targets that do not fit products of {n} tokens and {words} words")
    logprobs, entropies, rest = scales.new_empty(3, n).unbind()
    targets, scales = targets.contiguous(), scales.contiguous()
    args = products.data_ptr(), n, words, targets.data_ptr(), scales.data_ptr(), logprobs.data_ptr()
    more = entropies.data_ptr(), rest.data_ptr(), None if surprises is None else surprises.data_ptr()
    _call("learn_softmax", *args, *more, int(probabilities), *_how(products))
    return logprobs, entropies, rest


def _empty(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype)


def _rows(x: Tensor) -> Tensor:
    """`[rows, size]` with the numbers of a row side by side; rows may have gaps between them."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


class _Grouped(NamedTuple):
    """Rows that lie in groups, side by side in each."""

    of: Tensor
    """holds the memory"""
    start: int
    step: int
    """numbers from one group to the next"""
    rows: int
    group: int
    """rows in a group"""


def _grouped(x: Tensor) -> _Grouped:
    """The rows of the last dimension: heads of tokens may be a part of a wider matrix."""
    shape, strides = tuple(x.shape), x.stride()
    if len(shape) == 4 and shape[0] == 1:
        shape, strides = shape[1:], strides[1:]
    if len(shape) == 3 and strides[1:] == (shape[2], 1):
        return _Grouped(x, x.data_ptr(), strides[0], shape[0] * shape[1], shape[1])
    rows = _rows(x)
    return _Grouped(rows, rows.data_ptr(), rows.stride(0), rows.shape[0], 1)


def _how(x: Tensor) -> tuple[int, int]:
    return int(x.dtype == torch.bfloat16), torch.get_num_threads()


def _call(name: str, *args: Any) -> None:
    functions = _functions()
    assert functions is not None
    functions[name](*args)


_P, _L, _F, _I = ctypes.c_void_p, ctypes.c_long, ctypes.c_float, ctypes.c_int
_ARGUMENTS = {
    "learn_norm": (_P, _L, _L, _L, _P, _P, _P, _L, _F, _I, _I, _I),
    "learn_norm_backward": (_P, _L, _L, _L, _P, _P, _L, _L, _P, _P, _L, _I, _I, _I),
    "learn_gated_norm": (_P, _P, _L, _P, _P, _P, _L, _F, _I, _I),
    "learn_gated_norm_backward": (_P, _P, _L, _P, _P, _P, _P, _P, _L, _I, _I),
    "learn_swiglu": (_P, _L, _P, _L, _L, _L, _P, _I, _I),
    "learn_swiglu_backward": (_P, _L, _P, _L, _P, _L, _L, _L, _P, _I, _I),
    "learn_rotary": (_P, _L, _L, _L, _L, _L, _P, _P, _P, _I, _I, _I),
    "learn_softmax": (_P, _L, _L, _P, _P, _P, _P, _P, _P, _I, _I, _I),
}


@cache
def _functions() -> dict[str, Any] | None:
    return functions_of(_ARGUMENTS)
