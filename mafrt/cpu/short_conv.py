"""The causal convolution of four taps before a recurrence, with its SiLU, by kernels in C (`source/short_conv.c`).

Tensors are `[rows, channels, tokens]` as transformers has them, and lie in memory as linear layers write and read them:
the channels of a token side by side.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import torch
from torch import Tensor

from mafrt.cpu.library import functions_of

TAPS = 4


def serves(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None, state: Tensor | None) -> bool:
    """Whether this machine has the kernels for these tensors; the weights `[channels, taps]` are frozen."""
    if _functions() is None or x.dtype not in (torch.float32, torch.bfloat16) or weight.dtype != x.dtype:
        return False
    if bias is not None or activation not in ("silu", "swish") or weight.requires_grad:
        return False
    if weight.shape != (x.shape[1], TAPS) or x.shape[1] % 16:
        return False
    return state is None or (state.dtype == x.dtype and state.is_contiguous() and state.shape[2] == TAPS)


def step(x: Tensor, state: Tensor, weight: Tensor) -> Tensor:
    """One token `[rows, channels, 1]`; `state` `[rows, channels, taps]` takes it up, in place."""
    rows, channels, _ = x.shape
    now = x[:, :, 0] if x.stride(1) == 1 else x[:, :, 0].contiguous()
    out, taps = x.new_empty(rows, channels), _by_tap(weight)
    args = now.data_ptr(), now.stride(0), state.data_ptr(), taps.data_ptr(), out.data_ptr(), rows, channels
    _call("short_conv_step", *args, int(x.dtype == torch.bfloat16))
    return out.unsqueeze(2)


def whole(x: Tensor, weight: Tensor) -> Tensor:
    """All tokens, the first with zeros before it; gradients go to `x`."""
    return _Conv.apply(x, _by_tap(weight))  # type: ignore[no-any-return]


def _by_tap(weight: Tensor) -> Tensor:
    return weight.detach().t().float().contiguous()


class _Conv(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, taps: Tensor) -> Tensor:
        x = _side_by_side(x)
        given, out = _Given.of(x, taps), _like(x)
        given.out = out.data_ptr()
        _call("short_conv", ctypes.byref(given), 0)
        ctx.save_for_backward(x, taps)
        return out.transpose(1, 2)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, taps = ctx.saved_tensors
        grad = _side_by_side(grads[0].to(x.dtype))
        given, dx = _Given.of(x, taps), _like(x)
        given.grad, given.grad_row, given.grad_token = grad.data_ptr(), grad.stride(0), grad.stride(2)
        given.dx = dx.data_ptr()
        _call("short_conv", ctypes.byref(given), 1)
        return dx.transpose(1, 2), None


def _side_by_side(x: Tensor) -> Tensor:
    return x if x.stride(1) == 1 else x.transpose(1, 2).contiguous().transpose(1, 2)


def _like(x: Tensor) -> Tensor:
    """`[rows, tokens, channels]`."""
    return x.new_empty(x.shape[0], x.shape[2], x.shape[1])


_P, _L, _I = ctypes.c_void_p, ctypes.c_long, ctypes.c_int


class _Given(ctypes.Structure):
    """`Conv` of the source."""

    _fields_ = [
        *(("x", _P), ("ldrow", _L), ("ldtoken", _L), ("weight", _P), ("out", _P), ("grad", _P)),
        *(("grad_row", _L), ("grad_token", _L), ("dx", _P), ("rows", _L), ("tokens", _L), ("channels", _L)),
        *(("half", _I), ("threads", _I)),
    ]

    @classmethod
    def of(cls, x: Tensor, taps: Tensor) -> _Given:
        given = cls(x=x.data_ptr(), ldrow=x.stride(0), ldtoken=x.stride(2), weight=taps.data_ptr())
        given.rows, given.channels, given.tokens = x.shape
        given.half, given.threads = int(x.dtype == torch.bfloat16), torch.get_num_threads()
        return given


def _call(name: str, *args: Any) -> None:
    functions = _functions()
    assert functions is not None
    functions[name](*args)


@cache
def _functions() -> dict[str, Any] | None:
    arguments: dict[str, list[Any]] = {
        "short_conv": [ctypes.POINTER(_Given), _I],
        "short_conv_step": [_P, _L, _P, _P, _P, _L, _L, _I],
    }
    return functions_of(arguments)
