"""Kernels that are one launch on a GPU and many operations elsewhere, written out: attention and the RMS norm.

On tensors of the meta device they give shapes only. Attention follows FlashAttention-2 (Dao 2023, arXiv:2307.08691):
the backward pass computes the probabilities again from the log-sum-exps, and a query without keys has an output of 0
and a log-sum-exp of +inf.
"""

from __future__ import annotations

import torch
from torch import Tensor


def attention(q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Output `[B, H, T, D]` and log-sum-exps `[B, H, T]` float32 of `q` `[B, H, T, D]`, `k` and `v` `[B, h, S, D]`.

    `mask` is broadcastable to `[B, H, T, S]`: booleans (True: visible), or numbers that are added to the scores.
    """
    if q.device.type == "meta":
        return torch.empty_like(q), q.new_empty(q.shape[:3], dtype=torch.float32)
    scores = _scores(q, k, scale, mask)
    lse = scores.logsumexp(-1)
    out = torch.nan_to_num((scores - lse.unsqueeze(-1)).exp()) @ _repeated(v, q)
    return out.to(q.dtype), lse.masked_fill(lse == -torch.inf, torch.inf)


def attention_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
    mask: Tensor | None,
    learnt: bool = False,
) -> tuple[Tensor, ...]:
    """Gradients of queries, keys and values, and of a mask that is `learnt`; shapes as of `attention`."""
    more = (mask,) if mask is not None and learnt else ()
    if q.device.type == "meta":
        return tuple(torch.empty_like(t) for t in (q, k, v, *more))
    probs = (_scores(q, k, scale, mask) - lse.unsqueeze(-1)).exp()
    grad = grad.to(probs.dtype)
    through = grad @ _repeated(v, q).transpose(2, 3) - (grad * out).sum(-1, keepdim=True)
    d_scores = probs * through
    d_mask = [d_scores.sum_to_size(t.shape).to(t.dtype) for t in more]
    d_scores = d_scores * scale
    group = q.shape[1] // k.shape[1]
    dq = d_scores @ _repeated(k, q)
    dk, dv = (
        (left.transpose(2, 3) @ right).unflatten(1, (-1, group)).sum(2)
        for left, right in ((d_scores, q.to(probs.dtype)), (probs, grad))
    )
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), *d_mask


def segments_attention(
    q: Tensor, k: Tensor, v: Tensor, queries: Tensor, keys: Tensor, causal: bool, scale: float, window: int
) -> tuple[Tensor, Tensor]:
    """`aten._flash_attention_forward` of segments: `[N, H, D]` -> output alike, and log-sum-exps `[H, N]`.

    `queries` and `keys` are the segments' bounds, `window` the tokens on the left that a query sees; -1: all.
    """
    out, lse = torch.empty_like(q), q.new_empty(q.shape[1], q.shape[0], dtype=torch.float32)
    if q.device.type != "meta":
        for a, b in _pairs(queries, keys):
            mask = _mask(a, b, causal, window)
            own, keys_of, values_of = _heads_first(q[a], k[b], v[b])
            part, lse[:, a] = (t[0] for t in attention(own, keys_of, values_of, scale, mask))
            out[a] = part.transpose(0, 1)
    return out, lse


def segments_attention_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    queries: Tensor,
    keys: Tensor,
    causal: bool,
    scale: float,
    window: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """`aten._flash_attention_backward` of segments."""
    dq, dk, dv = (torch.empty_like(t) for t in (q, k, v))
    if q.device.type != "meta":
        for t in (dq, dk, dv):
            t.zero_()
        for a, b in _pairs(queries, keys):
            g, o, own, k_b, v_b = _heads_first(grad[a], out[a], q[a], k[b], v[b])
            parts = attention_backward(g, own, k_b, v_b, o, lse[None, :, a], scale, _mask(a, b, causal, window))
            for whole, place, part in zip((dq, dk, dv), (a, b, b), parts, strict=True):
                whole[place] = part[0].transpose(0, 1)
    return dq, dk, dv


def rms_norm_backward(
    grad: Tensor, x: Tensor, weight: Tensor | None, eps: float | None, learnt: bool = False
) -> tuple[Tensor, ...]:
    """Gradients of the input of `torch.nn.functional.rms_norm` over the last axis, and of a weight that is `learnt`."""
    leaves = [t.detach().requires_grad_() for t in (x, weight if learnt else None) if t is not None]
    if x.device.type == "meta":
        return tuple(map(torch.empty_like, leaves))
    with torch.enable_grad():
        out = torch.nn.functional.rms_norm(leaves[0], x.shape[-1:], leaves[1] if learnt else weight, eps)
        return torch.autograd.grad(out, leaves, grad)


def _scores(q: Tensor, k: Tensor, scale: float, mask: Tensor | None) -> Tensor:
    exact = torch.promote_types(q.dtype, torch.float32)
    scores = q.to(exact) @ _repeated(k, q).transpose(2, 3) * scale
    if mask is None:
        return scores
    return scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask


def _repeated(t: Tensor, q: Tensor) -> Tensor:
    return t.to(torch.promote_types(q.dtype, torch.float32)).repeat_interleave(q.shape[1] // t.shape[1], 1)


def _heads_first(*tensors: Tensor) -> list[Tensor]:
    return [t.transpose(0, 1).unsqueeze(0) for t in tensors]


def _pairs(queries: Tensor, keys: Tensor) -> list[tuple[slice, slice]]:
    a, b = queries.tolist(), keys.tolist()
    return [(slice(*a[n : n + 2]), slice(*b[n : n + 2])) for n in range(len(a) - 1)]


def _mask(a: slice, b: slice, causal: bool, window: int) -> Tensor | None:
    queries, keys = a.stop - a.start, b.stop - b.start
    if not causal:
        return None
    seen = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)
    return seen if window < 0 else seen.triu(keys - queries - window)
