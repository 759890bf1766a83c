"""Attention of the learning pass over rows and families of rows (`source/learn_attention.c`), as an autograd operation.

Scores and sums are float32, and only the result is rounded. Kept for the backward pass are the queries, keys and values
as they are and one number a query and head, the log-sum-exp: the probabilities are computed again.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from mafrt.cpu.library import library

Past = tuple[Tensor, Tensor]


class Rows(NamedTuple):
    """Which tokens of a batch are rows, and with which beginnings."""

    families: Tensor
    """`[families + 1, 4]` int64: first token and length of the beginning, whether it is part of a pass before this one,
    and its first row; the last line has the number of rows"""
    rows: Tensor
    """`[rows, 2]` int64: first token and length"""

    @classmethod
    def of(cls, families: Sequence[tuple[int, int, bool, Sequence[tuple[int, int]]]]) -> Rows:
        """From each family's beginning (first token, length, whether another pass has it) and its rows."""
        lines, rows = list[tuple[int, int, int, int]](), list[tuple[int, int]]()
        for first, length, past, answer_rows in families:
            lines.append((first, length, int(past), len(rows)))
            rows += answer_rows
        return cls(torch.tensor([*lines, (0, 0, 0, len(rows))]), torch.tensor(rows).view(-1, 2))


def serves(dtype: torch.dtype) -> bool:
    """Whether this machine's CPU has the kernel for queries, keys and values of this number format."""
    return dtype in (torch.float32, torch.bfloat16) and _function() is not None


def rows_attention(query: Tensor, key: Tensor, value: Tensor, rows: Rows, scale: float, past: Past | None) -> Tensor:
    """Causal attention of every row to its beginning and to itself, exact up to rounding.

    Args:
        query: `[heads, N, D]`.
        key: `[kv heads, N, D]`, and `value` alike.
        rows: cover all N tokens, beginnings included that are part of this pass.
        scale: factor on the scores.
        past: keys and values `[kv heads, P, D]` of the beginnings from another pass; constants.

    Returns:
        `[N, heads, D]`.
    """
    return cast(Tensor, _RowsAttention.apply(query, key, value, rows, scale, past))


class _RowsAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, rows: Rows, scale: float, past: Past | None
    ) -> Tensor:
        query, key, value = (_side_by_side(t) for t in (query, key, value))
        past = None if past is None else (_side_by_side(past[0]), _side_by_side(past[1]))
        out = query.new_empty(query.shape[1], len(query), query.shape[2])
        lse = query.new_empty(query.shape[:2], dtype=torch.float32)
        _run(False, query, key, value, rows, scale, past, lse, out=out.transpose(0, 1))
        ctx.save_for_backward(query, key, value, lse, *(past or ()))
        ctx.rows, ctx.scale = rows, scale
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        query, key, value, lse, *past = ctx.saved_tensors
        grad = _side_by_side(grads[0]).transpose(0, 1)
        # Heads of a token side by side, as the layers before had them: their way back needs no copy then.
        dq, dk, dv = (t.new_empty(t.shape[1], t.shape[0], t.shape[2]).transpose(0, 1) for t in (query, key, value))
        prefix = (past[0], past[1]) if past else None
        _run(True, query, key, value, ctx.rows, ctx.scale, prefix, lse, grad=grad, dq=dq, dk=dk, dv=dv)
        return dq, dk, dv, None, None, None


def _side_by_side(t: Tensor) -> Tensor:
    return t if t.stride(2) == 1 else t.contiguous()


class _Heads(ctypes.Structure):
    _fields_ = (("data", ctypes.c_void_p), ("head", ctypes.c_long), ("token", ctypes.c_long))

    @classmethod
    def of(cls, t: Tensor) -> _Heads:
        """From `[heads, tokens, D]`."""
        return cls(t.data_ptr(), t.stride(0), t.stride(1))


class _Pass(ctypes.Structure):
    _fields_ = (
        *((name, _Heads) for name in ("q", "k", "v", "past_k", "past_v", "out", "grad", "dq", "dk", "dv")),
        *((name, ctypes.c_void_p) for name in ("lse", "families", "rows")),
        *((name, ctypes.c_long) for name in ("count", "heads", "kv_heads", "tokens", "size")),
        ("scale", ctypes.c_float),
        ("half", ctypes.c_int),
        ("threads", ctypes.c_int),
    )


def _run(
    backward: bool,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rows: Rows,
    scale: float,
    past: Past | None,
    lse: Tensor,
    **others: Tensor,
) -> None:
    heads = {name: _Heads.of(t) for name, t in (("q", query), ("k", key), ("v", value), *others.items())}
    if past is not None:
        heads.update(past_k=_Heads.of(past[0]), past_v=_Heads.of(past[1]))
    numbers = _Pass(
        lse=lse.data_ptr(),
        families=rows.families.data_ptr(),
        rows=rows.rows.data_ptr(),
        count=len(rows.families) - 1,
        heads=len(query),
        kv_heads=len(key),
        tokens=query.shape[1],
        size=query.shape[2],
        scale=scale,
        half=int(query.dtype == torch.bfloat16),
        threads=torch.get_num_threads(),
        **heads,
    )
    function = _function()
    assert function is not None
    if not query.dtype == key.dtype == value.dtype:  # the kernel would read past the smaller ones
        raise ValueError(f"found {query.dtype}, {key.dtype} and {value.dtype}, expected one number format")
    function(ctypes.byref(numbers), int(backward))


@cache
def _function() -> Any:
    lib = library()
    function = None if lib is None else getattr(lib, "learn_attention", None)
    if function is not None:
        function.argtypes, function.restype = [ctypes.c_void_p, ctypes.c_int], None
    return function
