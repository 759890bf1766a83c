"""Attention with capped scores (Gemma 2, arXiv:2408.00118, section 2): softmax(cap tanh(scale q k^T / cap)) v.

No fused kernel of torch caps scores, and transformers' `sdpa` attention leaves the cap out. So the scores are written
out, for a few rows at a time, and computed again in the backward pass instead of being kept for every layer.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from mafrt.models.exact_dtype import exact_dtype

MOST_SCORES = 2**24
"""Scores held at a time: 64 MiB of float32."""


def capped_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float, cap: float
) -> Tensor:
    """Attention with scores between -cap and cap, computed in float32 (float64 for float64).

    Args:
        query: `[rows, heads, T, D]`.
        key: `[rows, kv heads, S, D]`, and `value` alike.
        mask: broadcastable to `[rows, heads, T, S]`: booleans (True: visible), or numbers that are added to the
            scores. None: causal, or all of S for a single query.
        scale: factor on the scores.
        cap: bound of the scores.

    Returns:
        `[rows, T, heads, D]`, as transformers' attention functions do.
    """
    if mask is None and query.shape[2] > 1:
        mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device).tril()[None, None]
    each = max(1, MOST_SCORES // (query.shape[1] * query.shape[2] * key.shape[2]))
    parts = []
    for start in range(0, len(query), each):
        some = slice(start, start + each)
        own = mask[some] if mask is not None and len(mask) == len(query) else mask
        given = (query[some], key[some], value[some], own, scale, cap)
        # Without gradients there is nothing to compute again.
        needs = torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value))
        parts.append(checkpoint(_attend, *given, use_reentrant=False) if needs else _attend(*given))
    return torch.cat(parts)


def _attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float, cap: float) -> Tensor:
    exact = exact_dtype(query)
    group = query.shape[1] // key.shape[1]
    q, k, v = (t.to(exact) for t in (query, key, value))
    if group > 1:
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = torch.matmul(q, k.transpose(2, 3)).mul(scale / cap).tanh().mul(cap)
    if mask is not None and mask.dtype == torch.bool:
        # The least number instead of minus infinity: a padded query that sees nothing gets a mean, not NaN.
        scores = scores.masked_fill(~mask, torch.finfo(exact).min)
    elif mask is not None:
        scores = scores + mask
    return torch.matmul(scores.softmax(3), v).transpose(1, 2).to(query.dtype)
