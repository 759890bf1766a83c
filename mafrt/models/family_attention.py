"""Attention of rows with a common beginning on a CPU, without a copy of the beginning for each row.

The beginning attends to itself. Short rests are computed by `short_attention.py`. Of long ones, the queries of all
rests attend to the beginning in one product, and each rest to its own tokens; the two results are merged by their
log-sum-exps (Juravsky et al. 2024, "Hydragen", arXiv:2402.05099, equation 5). The backward pass gives the merged output
and log-sum-exp to the backward kernels of both parts: with these, P = exp(S - lse) and dS = P * (dP - rowsum(dO * O))
are those of the whole attention.

In bfloat16 the kernels spend most of their time on thin products, so scores and sums are float32 there, which is also
the more exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mafrt.models import row_attention, short_attention
from mafrt.models.exact_dtype import exact_dtype
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
    if row_attention.serves(query):
        rows = row_attention.one_family(family, past is not None)
        return row_attention.rows_attention(query, key, value, rows, scale, past)
    return _FamilyAttention.apply(query, key, value, family, scale, past)


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
        own = family.shared if past is None else 0
        whole, common = (query, key, value), (key[:, :own], value[:, :own]) if past is None else past
        out = query.new_empty(query.shape[1], len(query), query.shape[2])
        rests = _rests(whole, common, family, own)
        done, kept = rests.attend(scale)
        _set_tokens(out[own:].transpose(0, 1), done, family)
        begun: tuple[Tensor, ...] = ()
        if past is None:
            q, k, v = _beginning(whole, own)
            begun = _attend(q, k, v, True, scale)
            out[:own] = begun[0][0].transpose(0, 1)
        ctx.save_for_backward(query, key, value, *common, *kept, *begun)
        ctx.family, ctx.scale, ctx.own = family, scale, own
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        query, key, value, *rest = ctx.saved_tensors
        family, scale, own = ctx.family, ctx.scale, ctx.own
        whole, common, rest = (query, key, value), (rest[0], rest[1]), rest[2:]
        grad = grads[0].transpose(0, 1)
        rests = _rests(whole, common, family, own)
        near, far = rests.backward(grad[:, own:], rest, scale)
        totals = [torch.empty_like(t) for t in whole]
        for target, part in zip(totals, near, strict=True):
            _set_tokens(target[:, own:], part, family)
        if own:
            onto = grad[None, :, :own].to(exact_dtype(query))
            q, k, v = _beginning(whole, own)
            begin = _attend_backward(onto, q, k, v, rest[-2], rest[-1], True, scale)
            totals[0][:, :own] = begin[0][0]
            for target, part, more in zip(totals[1:], begin[1:], far, strict=True):
                target[:, :own] = part[0] + more
        return *totals, None, None, None


def _beginning(whole: Sequence[Tensor], own: int) -> list[Tensor]:
    return [t[None, :, :own].to(exact_dtype(t)) for t in whole]


class _Short:
    """Rests by `short_attention`. `whole`: queries, keys and values `[heads, N, D]`; `common`: the beginning's."""

    def __init__(self, whole: Sequence[Tensor], common: Sequence[Tensor], family: Family, own: int) -> None:
        exact, self.family, self.kv_heads = exact_dtype(whole[0]), family, len(whole[1])
        self.q = self._grouped(whole[0][:, own:])
        key, value = (self._grouped(t[:, own:]).squeeze(2) for t in whole[1:])
        self.near = key, value
        self.far = common[0].to(exact).contiguous(), common[1].to(exact).contiguous()

    def _grouped(self, tokens: Tensor) -> Tensor:
        """`[heads, tokens of the rests, D]` -> `[kv heads, rows, group, T, D]`, contiguous."""
        parts = _rows_of(tokens, self.family).unflatten(0, (self.kv_heads, -1)).transpose(1, 2)
        return torch.empty(parts.shape, dtype=exact_dtype(tokens), device=tokens.device).copy_(parts)

    def attend(self, scale: float) -> tuple[Tensor, tuple[Tensor, ...]]:
        out, p = short_attention.attend(self.q, self.near, self.far, scale)
        return out.transpose(1, 2).flatten(0, 1), (p,)

    def backward(
        self, grad: Tensor, kept: Sequence[Tensor], scale: float
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        onto = self._grouped(grad)
        if not self.family.even:
            # The repeated tokens are not part of the result.
            onto *= self.family.real[:, None, :, None]
        dq, near, far = short_attention.attend_backward(onto, self.q, self.near, self.far, kept[0], scale)
        return (dq.transpose(1, 2).flatten(0, 1), *near), far


class _Long:
    """Rests by the kernels of a CPU, which read each key head for its group of heads; arguments as of `_Short`."""

    def __init__(self, whole: Sequence[Tensor], common: Sequence[Tensor], family: Family, own: int) -> None:
        exact, self.family = exact_dtype(whole[0]), family
        self.q, self.k, self.v = (_rows_of(t[:, own:].to(exact), family) for t in whole)
        self.far = [t[None].to(exact) for t in common]

    def attend(self, scale: float) -> tuple[Tensor, tuple[Tensor, ...]]:
        q, k, v = (t.transpose(0, 1) for t in (self.q, self.k, self.v))
        near, near_lse = (t.transpose(0, 1) for t in _attend(q, k, v, True, scale))
        far, far_lse = _attend(self.q.flatten(1, 2)[None], self.far[0], self.far[1], False, scale)
        far, far_lse = far[0].view(self.q.shape), far_lse[0].view(self.q.shape[:3])
        lse = torch.logaddexp(near_lse, far_lse)
        merged = far.mul((far_lse - lse).exp_().unsqueeze(3))
        merged.addcmul_(near, (near_lse - lse).exp_().unsqueeze(3))
        return merged, (merged, lse)

    def backward(
        self, grad: Tensor, kept: Sequence[Tensor], scale: float
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        onto, merged, lse = _rows_of(grad.to(self.q.dtype), self.family), kept[0], kept[1]
        if not self.family.even:
            onto = onto * self.family.real[..., None]
        g, q, k, v, out, sums = (t.transpose(0, 1) for t in (onto, self.q, self.k, self.v, merged, lse))
        near = _attend_backward(g, q, k, v, out, sums, True, scale)
        g, q, out = (t.flatten(1, 2)[None] for t in (onto, self.q, merged))
        far = _attend_backward(g, q, self.far[0], self.far[1], out, lse.flatten(1)[None], False, scale)
        dq = near[0].transpose(0, 1) + far[0][0].view(self.q.shape)
        return (dq, near[1].transpose(0, 1), near[2].transpose(0, 1)), (far[1][0], far[2][0])


def _rests(whole: Sequence[Tensor], common: Sequence[Tensor], family: Family, own: int) -> _Short | _Long:
    keys = common[0].shape[1] + family.rests.shape[1]
    short = keys <= short_attention.MOST_KEYS * whole[0].shape[2]
    return (_Short if short else _Long)(whole, common, family, own)


def _attend(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Attention and the log-sum-exp of the scores, by the kernel behind `scaled_dot_product_attention` on a CPU."""
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)


def _attend_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    return kernel(grad, q, k, v, out, lse, 0.0, causal, scale=scale)


def _rows_of(tokens: Tensor, family: Family) -> Tensor:
    """`[heads, tokens of the rests, D]` -> `[heads, rows, longest, D]`."""
    return tokens.unflatten(1, tuple(family.rests.shape)) if family.even else tokens[:, family.rests]


def _set_tokens(target: Tensor, rows: Tensor, family: Family) -> None:
    """Fill `[heads, tokens of the rests, D]` from `[heads, rows, longest, D]`."""
    if family.even:
        target.unflatten(1, tuple(family.rests.shape)).copy_(rows)
    else:
        target.copy_(rows[:, family.real])
