"""The gated delta rule (`mafrt.models.delta_rule`) by kernels in C (`source/delta_rule.c`).

A step reads a state once out of memory and writes it once. Chunks, forward and backward, stay in the cache from their
first product to their last; what lies in between is computed again in the backward pass.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import torch
from torch import Tensor

from mafrt.cpu.library import functions_of


def serves(query: Tensor, key: Tensor, value: Tensor, beta: Tensor, state: Tensor | None) -> bool:
    """Whether this machine has the kernels for these tensors, as of `mafrt.models.delta_rule.step`."""
    formats = (torch.float32, torch.bfloat16)
    if _functions() is None or value.dtype not in formats or not query.dtype == key.dtype == value.dtype:
        return False
    # Vectors of 16 numbers, without a rest.
    if query.shape != key.shape or key.shape[:3] != value.shape[:3] or key.shape[3] % 16 or value.shape[3] % 16:
        return False
    return beta.dtype in formats and (state is None or state.dtype == torch.float32)


def step(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    normed: bool,
    in_place: bool = False,
) -> tuple[Tensor, Tensor]:
    """As `mafrt.models.delta_rule.step`; `in_place`: the state, contiguous, is written over, in a third of the time."""
    given = _Pass.of(query, key, value, g, beta, state, normed)
    out, next_state = value.new_empty(value.shape), state if in_place else torch.empty(state.shape, dtype=torch.float32)
    given.out, given.kept = out.data_ptr(), next_state.data_ptr()
    _call("delta_step", ctypes.byref(given))
    return out, next_state


def chunks(
    query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, state: Tensor | None, normed: bool
) -> tuple[Tensor, Tensor]:
    """As `mafrt.models.delta_rule.chunks`, with its gradients."""
    return _Chunks.apply(query, key, value, g, beta, state, normed)  # type: ignore[no-any-return]


class _Chunks(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        g: Tensor,
        beta: Tensor,
        state: Tensor | None,
        normed: bool,
    ) -> tuple[Tensor, Tensor]:
        given = _Pass.of(query, key, value, g, beta, state, normed)
        rows, _, heads, width = value.shape
        out = value.new_empty(value.shape)
        last_state = torch.empty(rows, heads, key.shape[3], width, dtype=torch.float32)
        given.out, given.kept = out.data_ptr(), last_state.data_ptr()
        _call("delta_chunks", ctypes.byref(given), 0)
        ctx.save_for_backward(query, key, value, g, beta, state)
        ctx.normed = normed
        ctx.set_materialize_grads(False)
        return out, last_state

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        query, key, value, g, beta, state = ctx.saved_tensors
        onto, onto_kept = grads
        onto = value.new_zeros(value.shape) if onto is None else onto.to(value.dtype)
        given = _Pass.of(query, key, value, g, beta, state, ctx.normed)
        onto = onto if onto.stride(3) == 1 else onto.contiguous()
        given.grad = _Part.of(onto)
        if onto_kept is not None:
            onto_kept = onto_kept.float().contiguous()
            given.grad_kept = onto_kept.data_ptr()
        found = [value.new_empty(each.shape) for each in (query, key, value)]
        given.dq, given.dk, given.dv = (each.data_ptr() for each in found)
        dg, dbeta = torch.empty(2, *beta.shape, dtype=torch.float32).unbind()
        given.dg, given.dbeta = dg.data_ptr(), dbeta.data_ptr()
        dstate = None
        if state is not None and ctx.needs_input_grad[5]:
            dstate = torch.empty(state.shape, dtype=torch.float32)
            given.dstate = dstate.data_ptr()
        _call("delta_chunks", ctypes.byref(given), 1)
        return *found, dg.to(g.dtype), dbeta.to(beta.dtype), dstate, None


_P, _L, _I = ctypes.c_void_p, ctypes.c_long, ctypes.c_int


class _Part(ctypes.Structure):
    _fields_ = [("data", _P), ("row", _L), ("token", _L), ("head", _L)]

    @classmethod
    def of(cls, x: Tensor) -> _Part:
        """Of `[rows, tokens, heads, size]`, or `[rows, tokens, heads]`."""
        return cls(x.data_ptr(), *x.stride()[:3])


class _Pass(ctypes.Structure):
    """`Pass` of the source. Tensors that it points to are kept alive."""

    kept_alive: tuple[Tensor, ...]
    _fields_ = [
        *((name, _Part) for name in ("q", "k", "v", "g", "beta")),
        *((name, _P) for name in ("state", "out", "kept")),
        ("grad", _Part),
        *((name, _P) for name in ("grad_kept", "dq", "dk", "dv", "dg", "dbeta", "dstate")),
        *((name, _L) for name in ("rows", "tokens", "heads", "size", "width")),
        *((name, _I) for name in ("normed", "half", "half_beta", "threads")),
    ]

    @classmethod
    def of(
        cls, query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, state: Tensor | None, normed: bool
    ) -> _Pass:
        rows = [x if x.stride(3) == 1 else x.contiguous() for x in (query, key, value)]
        small = [g.float(), beta]
        alive = [*rows, *small, *([] if state is None else [state.contiguous()])]
        given = cls(*map(_Part.of, [*rows, *small]), state=None if state is None else alive[-1].data_ptr())
        given.rows, given.tokens, given.heads, given.width = value.shape
        given.size, given.normed = key.shape[3], int(normed)
        given.half, given.half_beta = (int(x.dtype == torch.bfloat16) for x in (value, beta))
        given.threads, given.kept_alive = torch.get_num_threads(), tuple(alive)
        return given


def _call(name: str, *args: Any) -> None:
    functions = _functions()
    assert functions is not None
    functions[name](*args)


@cache
def _functions() -> dict[str, Any] | None:
    pointer = ctypes.POINTER(_Pass)
    return functions_of({"delta_step": [pointer], "delta_chunks": [pointer, _I]})
