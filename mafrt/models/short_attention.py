"""Attention of short rows with a common beginning, as batched products whose probabilities are kept.

For rows of tens of tokens a fused kernel spends most of its time on thin blocks. Here the scores of a row against the
beginning and against itself stand side by side, one softmax normalises both, and the backward pass reads the
probabilities instead of computing them again.

Queries are `[kv heads, rows, group, T, D]`: all queries that read a key head are one matrix against the beginning, and
those of a row are one matrix against the row's own keys. Keys and values of the rows are `[kv heads, rows, T, D]`, and
those of the beginning `[kv heads, S, D]`. All are contiguous.
"""

from __future__ import annotations

import torch
from torch import Tensor

MOST_KEYS = 4
"""Most keys of a query per channel of a head. The probabilities then take at most four times the memory of the
result."""


def attend(q: Tensor, near: tuple[Tensor, Tensor], far: tuple[Tensor, Tensor], scale: float) -> tuple[Tensor, Tensor]:
    """Causal attention of rows to the beginning `far` and to their own tokens `near`, keys and values each.

    Returns:
        The result `[kv heads, rows, group, T, D]`, and the probabilities `[kv heads, rows * group * T, S + T]`.
    """
    shared, steps = far[0].shape[1], q.shape[3]
    hidden = torch.full((steps, steps), -torch.inf, dtype=q.dtype).triu(1).repeat(q.shape[2], 1)
    own = torch.baddbmm(hidden, _by_row(q), _by_row(near[0]).transpose(1, 2), alpha=scale)
    scores = torch.cat((torch.bmm(_by_head(q), far[0].transpose(1, 2)).mul_(scale), own.view(len(q), -1, steps)), 2)
    p = scores.softmax(2)
    out = torch.bmm(p[:, :, :shared], far[1])
    _by_row(out.view(q.shape)).baddbmm_(_own(p, q, shared), _by_row(near[1]))
    return out.view(q.shape), p


def attend_backward(
    grad: Tensor, q: Tensor, near: tuple[Tensor, Tensor], far: tuple[Tensor, Tensor], p: Tensor, scale: float
) -> tuple[Tensor, tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Gradients of queries, `near` and `far`, from that of the result, shaped like it, and the probabilities."""
    shared, steps = far[0].shape[1], q.shape[3]
    by_row, by_head = _by_row(grad), _by_head(grad)
    own = torch.bmm(by_row, _by_row(near[1]).transpose(1, 2)).view(len(q), -1, steps)
    onto = torch.cat((torch.bmm(by_head, far[1].transpose(1, 2)), own), 2)
    ds = torch._softmax_backward_data(onto, p, 2, p.dtype).mul_(scale)
    ds_far, ds_near = ds[:, :, :shared], _own(ds, q, shared)
    dq = torch.bmm(ds_far, far[0])
    _by_row(dq.view(q.shape)).baddbmm_(ds_near, _by_row(near[0]))
    d_far = torch.bmm(ds_far.transpose(1, 2), _by_head(q)), torch.bmm(p[:, :, :shared].transpose(1, 2), by_head)
    d_near = torch.bmm(ds_near.transpose(1, 2), _by_row(q)), torch.bmm(_own(p, q, shared).transpose(1, 2), by_row)
    return dq.view(q.shape), (d_near[0].view(near[0].shape), d_near[1].view(near[1].shape)), d_far


def _by_row(t: Tensor) -> Tensor:
    """`[kv heads, rows, ..., D]` -> `[kv heads * rows, tokens, D]`."""
    return t.view(t.shape[0] * t.shape[1], -1, t.shape[-1])


def _by_head(t: Tensor) -> Tensor:
    """`[kv heads, rows, ..., D]` -> `[kv heads, tokens, D]`."""
    return t.view(len(t), -1, t.shape[-1])


def _own(p: Tensor, q: Tensor, shared: int) -> Tensor:
    """The part of `[kv heads, rows * group * T, S + T]` that belongs to the rows' own keys, row by row."""
    return p[:, :, shared:].unflatten(1, (q.shape[1], -1)).flatten(0, 1)
