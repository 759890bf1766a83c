"""Attention of rows with a common beginning on a CPU, without a copy of the beginning for each row.

The beginning attends to itself. The queries of all rests attend to the beginning in one product, and each rest to its
own tokens; the two results are merged by their log-sum-exps (Juravsky et al. 2024, "Hydragen", arXiv:2402.05099,
equation 5). The backward pass gives the merged output and log-sum-exp to the backward kernels of both parts: with
these, P = exp(S - lse) and dS = P * (dP - rowsum(dO * O)) are those of the whole attention.

In bfloat16 the kernels spend most of their time on thin products, so scores and sums are float32 there, which is also
the more exact.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mafrt.models.packing import Family


def family_attention(
    query: Tensor, key: Tensor, value: Tensor, family: Family, scale: float, past: tuple[Tensor, Tensor] | None = None
) -> Tensor:
    """Causal attention in a family of rows, exact up to rounding.

    Args:
        query: `[heads, N, D]`; the beginning's tokens, unless it has a `past`, and then the rests' one after the other.
        key: `[kv heads, N, D]`, and `value` alike.
        family: of the rows.
        scale: factor on the scores.
        past: keys and values `[kv heads, shared, D]` of a beginning that another pass has computed; constants.

    Returns:
        `[N, heads, D]`.
    """
    return _FamilyAttention.apply(query, key, value, family, scale, past)


def exact_dtype(tensor: Tensor) -> torch.dtype:
    """The precision of scores and sums on a CPU."""
    return torch.float32 if tensor.dtype in (torch.bfloat16, torch.float16) else tensor.dtype


class _FamilyAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        family: Family,
        scale: float,
        past: tuple[Tensor, Tensor] | None,
    ) -> Tensor:
        exact = exact_dtype(query)
        own, group = family.shared if past is None else 0, len(query) // len(key)
        whole = [t.to(exact) for t in (query, key, value)]
        q, k, v = (_rows_of(t[:, own:], family) for t in whole)
        common_k, common_v = (t[:, :own] for t in whole[1:]) if past is None else (t.to(exact) for t in past)
        near, near_lse = _attend(q, _repeat(k, group), _repeat(v, group), True, scale)
        far, far_lse = _attend(_stacked(q, group), common_k[None], common_v[None], False, scale)
        far, far_lse = _unstacked(far, q.shape), _unstacked(far_lse, q.shape[:3])
        lse = torch.logaddexp(near_lse, far_lse)
        merged = far.mul((far_lse - lse).exp_().unsqueeze(3))
        merged.addcmul_(near, (near_lse - lse).exp_().unsqueeze(3))
        out = query.new_empty(query.shape[1], len(query), query.shape[2])
        out[own:] = _tokens_of(merged, family).transpose(0, 1)
        begun: tuple[Tensor, ...] = ()
        if past is None:
            first = [t[None, :, :own] for t in whole]
            begun = _attend(first[0], _repeat(first[1], group), _repeat(first[2], group), True, scale)
            out[:own] = begun[0][0].transpose(0, 1)
        ctx.save_for_backward(query, key, value, merged, lse, *begun)
        ctx.family, ctx.scale, ctx.past = family, scale, past
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        query, key, value, merged, lse, *begun = ctx.saved_tensors
        family, scale, past = ctx.family, ctx.scale, ctx.past
        exact = exact_dtype(query)
        own, group = family.shared if past is None else 0, len(query) // len(key)
        whole = [t.to(exact) for t in (query, key, value)]
        grad = grads[0].to(exact).transpose(0, 1)
        q, k, v = (_rows_of(t[:, own:], family) for t in whole)
        onto = _rows_of(grad[:, own:], family)
        if not family.even:
            # The repeated tokens are not part of the result.
            onto = onto * family.real[:, None, :, None]
        common = [t[None, :, :own] for t in whole[1:]] if past is None else [t.to(exact)[None] for t in past]
        near = _attend_backward(onto, q, _repeat(k, group), _repeat(v, group), merged, lse, True, scale)
        stacked = [_stacked(t, group) for t in (onto, q, merged, lse)]
        far = _attend_backward(stacked[0], stacked[1], common[0], common[1], stacked[2], stacked[3], False, scale)
        totals = [torch.empty_like(t) for t in whole]
        for target, part in zip(totals, (near[0] + _unstacked(far[0], q.shape), *near[1:]), strict=True):
            heads = len(target)
            target[:, own:] = _tokens_of(
                part if part.shape[1] == heads else part.unflatten(1, (heads, -1)).sum(2), family
            )
        if past is None:
            first = [t[None, :, :own] for t in whole]
            keys, values = (_repeat(t, group) for t in first[1:])
            begin = _attend_backward(grad[None, :, :own], first[0], keys, values, begun[0], begun[1], True, scale)
            totals[0][:, :own] = begin[0][0]
            for target, part, more in zip(totals[1:], begin[1:], far[1:], strict=True):
                target[:, :own] = part[0].unflatten(0, (len(target), -1)).sum(1) + more[0]
        return *(t.to(query.dtype) for t in totals), None, None, None


def _attend(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Attention and the log-sum-exp of the scores, by the kernel behind `scaled_dot_product_attention` on a CPU."""
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)


def _attend_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    return kernel(grad, q, k, v, out, lse, 0.0, causal, scale=scale)


def _rows_of(tokens: Tensor, family: Family) -> Tensor:
    """`[heads, tokens of the rests, D]` -> `[rows, heads, longest, D]`."""
    if family.even:
        return tokens.unflatten(1, tuple(family.rests.shape)).transpose(0, 1)
    return tokens[:, family.rests].transpose(0, 1)


def _tokens_of(rows: Tensor, family: Family) -> Tensor:
    """The inverse of `_rows_of`."""
    tokens = rows.transpose(0, 1)
    return tokens.flatten(1, 2) if family.even else tokens[:, family.real]


def _repeat(kv: Tensor, group: int) -> Tensor:
    """`[rows, kv heads, T, D]` -> `[rows, heads, T, D]`."""
    return kv if group == 1 else kv.repeat_interleave(group, 1)


def _stacked(rows: Tensor, group: int) -> Tensor:
    """`[rows, heads, T, ...]` -> `[1, kv heads, group * rows * T, ...]`: all queries that read the same key head."""
    parts = rows.unflatten(1, (-1, group)).movedim(0, 2)
    return parts.flatten(1, 3)[None]


def _unstacked(stacked: Tensor, shape: torch.Size) -> Tensor:
    """The inverse of `_stacked`, for rows of this shape."""
    rows, heads, steps = shape[:3]
    parts = stacked[0].unflatten(1, (heads // stacked.shape[1], rows, steps))
    return parts.movedim(2, 0).flatten(1, 2)
