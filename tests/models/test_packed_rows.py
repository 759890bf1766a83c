"""Attention of rows with a common beginning equals plain attention over each row's own keys, gradients included."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from mafrt.cpu import learn_attention, packed_rows
from mafrt.models.packed_attention import PackedRows
from mafrt.models.packing import Family, Packing, TokenBlock

HEADS, KV_HEADS, DIM, SHARED = 6, 2, 8, 17


def attend(q, k, v, mask):
    """As transformers' sdpa attention: `[rows, T, heads, D]`."""
    k, v = (t.repeat_interleave(HEADS // KV_HEADS, 1) for t in (k, v))
    return F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None, scale=0.3).transpose(1, 2)


def plain(q, k, v, sizes, past=None):
    """Row by row: every rest after a copy of the beginning."""
    out, start = [], 0
    if past is None:
        out.append(attend(*(t[None, :, :SHARED] for t in (q, k, v)), None)[0])
        start = SHARED
    for size in sizes:
        own = [t[:, start : start + size] for t in (q, k, v)]
        common = [t[:, :SHARED] for t in (k, v)] if past is None else past
        keys, values = (torch.cat(pair, 1)[None] for pair in zip(common, own[1:], strict=True))
        mask = torch.ones(size, SHARED + size, dtype=torch.bool).tril(SHARED)
        out.append(attend(own[0][None], keys, values, mask)[0])
        start += size
    return torch.cat(out)


def inputs(sizes, past, dtype=torch.float32):
    torch.manual_seed(len(sizes) + past)
    tokens = sum(sizes) + (0 if past else SHARED)
    q, k, v = (torch.randn(heads, tokens, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS))
    kept = tuple(torch.randn(KV_HEADS, SHARED, DIM) for _ in range(2)) if past else None
    weight = torch.randn(tokens, HEADS, DIM)
    return [t.to(dtype).requires_grad_() for t in (q, k, v)], kept, weight


def result_and_grads(compute, parts, weight):
    out = compute(*parts)
    return [out.detach(), *torch.autograd.grad((out * weight).sum(), parts)]


def rows_of(family, sizes, kept):
    """One family as a packed batch."""
    tokens = sum(sizes) + (0 if kept else SHARED)
    places = torch.arange(tokens)
    packing = Packing(places, places, (TokenBlock(1, tokens, family),), places, places)
    return PackedRows(packing, attend, 0.3, None, kept, True)


def forms():
    """The reference, and the kernel where there is one."""
    plain_form = {"reference": lambda q, k, v, rows: rows.attend(q, k, v)}
    return {**plain_form, "kernel": packed_rows.attend} if learn_attention.serves(torch.float32) else plain_form


@pytest.mark.parametrize("past", [False, True])
@pytest.mark.parametrize("sizes", [[5, 5, 5], [1, 9, 4], [7]])
def test_equal_to_row_by_row(sizes, past):
    parts, kept, weight = inputs(sizes, past)
    family = Family.of(SHARED, sizes, torch.device("cpu"), torch.arange(SHARED) if past else None)
    expected = result_and_grads(lambda *p: plain(*p, sizes, kept), parts, weight)
    for form, compute in forms().items():
        found = result_and_grads(lambda *p, f=compute: f(*p, rows_of(family, sizes, kept)), parts, weight)
        for name, own, theirs in zip(("out", "q", "k", "v"), found, expected, strict=True):
            torch.testing.assert_close(own, theirs, atol=1e-5, rtol=1e-5, msg=lambda m, n=f"{form} {name}": f"{n}: {m}")


@pytest.mark.skipif(not learn_attention.serves(torch.float32), reason="needs a C compiler")
def test_in_bfloat16_only_the_result_is_rounded():
    sizes = [3, 6]
    parts, _, weight = inputs(sizes, False, torch.bfloat16)
    family = Family.of(SHARED, sizes, torch.device("cpu"))
    exact = [p.detach().float().requires_grad_() for p in parts]
    expected = result_and_grads(lambda *p: plain(*p, sizes), exact, weight.bfloat16().float())
    found = result_and_grads(lambda *p: packed_rows.attend(*p, rows_of(family, sizes, None)), parts, weight.bfloat16())
    for own, theirs in zip(found, expected, strict=True):
        assert own.dtype == torch.bfloat16
        # bfloat16 keeps eight bits, so rounding once is 1 in 256; the gradient passes through two roundings.
        assert float((own.float() - theirs).norm() / theirs.norm()) < 2**-8
