"""Attention of packed rows by torch's flash kernels (Dao 2023, arXiv:2307.08691), without copies, repeats or masks.

One launch lets every row, beginning and rest attend to itself. A second lets the rests of all families attend to their
beginnings, which stand in memory once. Both give the log-sum-exp of the scores beside the output, and the two are
merged as two shares of one softmax:

    lse = log(exp(lse_1) + exp(lse_2)),    out = out_1 exp(lse_1 - lse) + out_2 exp(lse_2 - lse)

(Ring attention, arXiv:2310.01889, does so with the parts of one long row.) The way back needs no more than the kernel's
own, which computes the probabilities again from the log-sum-exp: given that of all keys, and the merged output, each
launch returns its share of the gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mafrt.models.packed_attention import PackedRows
from mafrt.models.packing import Packing
from mafrt.models.tensors import integers, moved

HALF = (torch.float16, torch.bfloat16)


class Segments(NamedTuple):
    """Consecutive runs of queries and of keys; those of the n-th run of queries attend to the n-th run of keys."""

    queries: Tensor
    """`[segments + 1]` int32: where each begins, and the end of the last"""
    keys: Tensor
    longest: tuple[int, int]
    causal: bool
    """each query of a run attends to the keys up to its own place"""
    past: Tensor | None = None
    """the keys, as places in the pass before this one; None: they are this pass's own"""


def serves(query: Tensor, rows: PackedRows) -> bool:
    """Whether the kernels compute this attention: half precision, plain scores, heads of up to 256 numbers.

    A window must leave every beginning whole: a rest's window would begin at another place in each row.
    """
    families = (block.longest for block in rows.packing.blocks if block.family is not None)
    if not rows.plain or query.dtype not in HALF or rows.hides(max(families, default=0)):
        return False
    return query.shape[-1] % 8 == 0 and query.shape[-1] <= _largest_head(query.device)


def covers(base: Any) -> bool:
    """Whether the kernels compute all attention of a base, however long its rows are."""
    config = base.config
    capped = getattr(config, "attn_logit_softcapping", None) is not None
    windows = "sliding_attention" in (getattr(config, "layer_types", None) or ())
    windows = windows or (config.model_type in ("mistral", "phi3") and config.sliding_window is not None)
    head = int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
    fits = head % 8 == 0 and head <= _largest_head(base.device)
    return base.model.dtype in HALF and fits and not capped and not windows


@cache
def _largest_head(device: torch.device) -> int:
    """Numbers in a head that this GPU's flash kernels take, backward too; 0: it has none."""
    if torch.version.hip is not None or not torch.backends.cuda.is_flash_attention_available():
        return 0
    capability = torch.cuda.get_device_capability(device)
    if capability < (8, 0):
        return 0
    # Other generations lack the shared memory for the way back of wider heads.
    return 256 if capability in ((8, 0), (9, 0), (10, 0)) else 192


def attend(query: Tensor, key: Tensor, value: Tensor, rows: PackedRows) -> Tensor:
    """`[heads, N, D]`, keys and values with heads of their own, -> `[N, heads, D]`."""
    by_head = (t.transpose(0, 1) for t in (query, key, value))
    past = None if rows.past is None else [t.transpose(0, 1) for t in rows.past]
    window = -1 if rows.window is None else rows.window - 1
    out: Tensor = _Attention.apply(*by_head, rows.packing.once(segments_of), rows.scale, window, past)
    return out


def segments_of(packing: Packing) -> list[Segments]:
    """A packing's launches: runs to themselves, rests to beginnings of this pass, and to those of the one before."""
    runs: list[int] = []
    within, before = list[tuple[int, int, int, int]](), list[tuple[int, int, int, int]]()
    places: list[Tensor] = []
    at = gathered = 0
    for block in packing.blocks:
        if block.family is None:
            runs += [block.length] * block.rows
        else:
            sizes, shared = block.family.real.sum(1).tolist(), block.family.shared
            if block.family.past is None:
                runs.append(shared)
                within.append((at + shared, at + block.length, at, at + shared))
            else:
                before.append((at, at + block.length, gathered, gathered + shared))
                places.append(block.family.past)
                gathered += shared
            runs += sizes
        at += block.rows * block.length
    cuts = [0]
    for run in runs:
        cuts.append(cuts[-1] + run)
    tables = [(cuts, cuts)]
    tables += [_in_turn(pairs, at, keys) for pairs, keys in ((within, at), (before, gathered)) if pairs]
    there = moved([integers(cuts) for pair in tables for cuts in pair], packing.take.device)
    made = []
    for number, (queries, keys) in enumerate(tables):
        longest = max(b - a for a, b in pairwise(queries)), max(b - a for a, b in pairwise(keys))
        bounds = [t.int() for t in there[2 * number : 2 * number + 2]]
        past = torch.cat(places) if places and number == len(tables) - 1 else None
        made.append(Segments(bounds[0], bounds[1], longest, number == 0, past))
    return made


def _in_turn(pairs: Sequence[tuple[int, int, int, int]], queries: int, keys: int) -> tuple[list[int], list[int]]:
    """Bounds of segments in which these ranges of queries and keys meet, and all others meet nothing.

    The kernel's segments follow one another without a gap. So keys that nobody reads meet no query, and queries that
    read nothing meet no key.
    """
    q, k = [0], [0]
    for first, last, begin, end in [*pairs, (queries, queries, keys, keys)]:
        if begin > k[-1]:
            q, k = [*q, q[-1]], [*k, begin]
        if first > q[-1]:
            q, k = [*q, first], [*k, k[-1]]
        if last > first:
            q, k = [*q, last], [*k, end]
    return q, k


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        launches: Sequence[Segments],
        scale: float,
        window: int,
        past: Sequence[Tensor] | None,
    ) -> Tensor:
        out = lse = None
        read = []
        for segments in launches:
            keys, values = _keys(segments, key, value, past)
            part, part_lse = flash(query, keys, values, segments, scale, window)
            read.append((keys, values) if segments.past is not None else ())
            if out is None or lse is None:
                out, lse = part, part_lse
                continue
            # Queries without keys have a log-sum-exp of +inf there.
            both = torch.logaddexp(lse, part_lse.masked_fill_(part_lse == torch.inf, -torch.inf))
            share = part_lse.sub_(both).exp_().t().unsqueeze(2)
            out.addcmul_(part.sub_(out), share)
            lse = both
        assert out is not None and lse is not None
        ctx.save_for_backward(query, key, value, out, lse, *(t for pair in read for t in pair))
        ctx.launches, ctx.scale, ctx.window = launches, scale, window
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        query, key, value, out, lse, *past = ctx.saved_tensors
        grad = grads[0] if grads[0].stride(-1) == 1 else grads[0].contiguous()
        total: list[Tensor] = []
        for segments in ctx.launches:
            keys, values = (key, value) if segments.past is None else past
            parts = flash_backward(grad, query, keys, values, out, lse, segments, ctx.scale, ctx.window)
            if not total:
                total = list(parts)
                continue
            for whole, part in zip(total, parts[: 3 if segments.past is None else 1], strict=False):
                whole.add_(part)
        return (*total, None, None, None, None)


def _keys(segments: Segments, key: Tensor, value: Tensor, past: Sequence[Tensor] | None) -> tuple[Tensor, Tensor]:
    if segments.past is None:
        return key, value
    assert past is not None
    return past[0].index_select(0, segments.past), past[1].index_select(0, segments.past)


def flash(
    query: Tensor, key: Tensor, value: Tensor, segments: Segments, scale: float, window: int
) -> tuple[Tensor, Tensor]:
    """Output `[N, heads, D]` and log-sum-exps `[heads, N]` float32; queries without keys have 0 and +inf.

    `query` `[N, heads, D]`; `window`: tokens on the left that a query sees in a causal launch; -1: all.
    """
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        *(query, key, value, segments.queries, segments.keys, *segments.longest),
        *(0.0, segments.causal, False),
        scale=scale,
        **_window(segments, window),
    )
    return out, lse


def flash_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    segments: Segments,
    scale: float,
    window: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of queries, keys and values, as far as they come through the keys of one launch."""
    # Without dropout the state of the random numbers is not read.
    unused = torch.empty(2, dtype=torch.uint64, device=query.device)
    made: tuple[Tensor, Tensor, Tensor] = torch.ops.aten._flash_attention_backward(
        *(grad, query, key, value, out, lse, segments.queries, segments.keys, *segments.longest),
        *(0.0, segments.causal, unused, unused),
        scale=scale,
        **_window(segments, window),
    )
    return made


def _window(segments: Segments, window: int) -> dict[str, int]:
    return {"window_size_left": window, "window_size_right": 0} if segments.causal and window >= 0 else {}
