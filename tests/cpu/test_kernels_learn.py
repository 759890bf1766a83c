"""The kernels of the learning pass: results of float64 up to one rounding, NaN stays NaN, threads change nothing."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from helpers_models import tiny_model
from torch.nn import functional as F

from mafrt.cpu import learn_attention, learn_rows
from mafrt.cpu.head import CpuHead
from mafrt.cpu.learn_attention import Rows, rows_attention
from mafrt.cpu.recorded_parts import use_recorded_mlps, use_recorded_rotary
from mafrt.models.logprobs import FrozenHead, LogitForm, token_logprobs

pytestmark = pytest.mark.skipif(not learn_attention.serves(torch.float32), reason="needs a C compiler")
DTYPES = [torch.float32, torch.bfloat16]


def near(found, exact, dtype, roundings=1):
    """Up to some roundings of the largest number: of the result in bfloat16, of the terms of its sums in float32."""
    assert found.dtype == dtype and found.shape == exact.shape
    allowed = (32 if dtype == torch.float32 else 1) * roundings * torch.finfo(dtype).eps
    assert float((found.detach().double() - exact).abs().max()) <= allowed * float(exact.abs().max())


def attention(q, k, v, rows, scale):
    """Row by row in float64: `[N, heads, D]`."""
    group, out = len(q) // len(k), torch.zeros(q.shape[1], len(q), q.shape[2], dtype=q.dtype)
    lines = rows.families.tolist()
    for (first, shared, _, row), (*_, after) in pairwise(lines):
        own = [(first, shared, 0)] if shared else []
        for start, tokens, before in [*own, *((*r, shared) for r in rows.rows[row:after].tolist())]:
            keys = [*range(first, first + before), *range(start, start + tokens)]
            a, b = (t[:, keys].repeat_interleave(group, 0) for t in (k, v))
            seen = torch.ones(tokens, len(keys), dtype=torch.bool).tril(before)
            scores = (scale * q[:, start : start + tokens] @ a.transpose(1, 2)).masked_fill(~seen, -torch.inf)
            out[start : start + tokens] = (scores.softmax(2) @ b).transpose(0, 1)
    return out


def heads(dtype, tokens, counts, size):
    """Queries, keys and values as a linear layer lays them out, and what their result is multiplied with."""
    torch.manual_seed(tokens)
    q, k, v, weight = (torch.randn(tokens, n, size).to(dtype) for n in (*counts, counts[0]))
    return [t.transpose(0, 1).requires_grad_() for t in (q, k, v)], weight


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("query_heads", "key_heads", "size"), [(3, 3, 16), (6, 2, 20), (4, 1, 7), (2, 1, 144)])
def test_attention_of_uneven_rows_equals_float64(dtype, query_heads, key_heads, size):
    # A family of uneven rows, rows on their own, and a row longer than a block of queries.
    rows = Rows.of(
        [(0, 19, False, [(19, 1), (20, 33), (53, 8)]), (61, 0, False, [(61, 70)]), (0, 0, False, [(131, 5)])]
    )
    parts, weight = heads(dtype, 136, (query_heads, key_heads, key_heads), size)
    out = rows_attention(*parts, rows, 0.3, None)
    exact = [p.detach().double().requires_grad_() for p in parts]
    expected = attention(*exact, rows, 0.3)
    near(out, expected.detach(), dtype)
    grads = torch.autograd.grad(out, parts, weight)
    for own, theirs in zip(grads, torch.autograd.grad(expected, exact, weight.double()), strict=True):
        near(own, theirs, dtype, 2)


def test_a_beginning_of_another_pass_is_a_constant():
    parts, weight = heads(torch.float32, 30, (4, 2, 2), 12)
    rest = [p.detach()[:, 10:].requires_grad_() for p in parts]
    past = parts[1].detach()[:, :10], parts[2].detach()[:, :10]
    together = Rows.of([(0, 10, False, [(10, 8), (18, 12)])])
    apart = Rows.of([(0, 10, True, [(0, 8), (8, 12)])])
    whole = rows_attention(*parts, together, 0.3, None)
    out = rows_attention(*rest, apart, 0.3, past)
    assert torch.equal(out, whole[10:])
    weight[:10] = 0
    grads = torch.autograd.grad(whole, parts, weight)
    for own, theirs in zip(torch.autograd.grad(out, rest, weight[10:]), grads, strict=True):
        assert torch.equal(own, theirs[:, 10:])


def test_nan_in_a_row_reaches_that_row_only():
    parts, _ = heads(torch.float32, 40, (2, 1, 1), 16)
    rows = Rows.of([(0, 8, False, [(8, 20), (28, 12)])])
    parts[0].detach()[0, 30, 3] = torch.nan
    found = rows_attention(*parts, rows, 0.3, None).isnan().any(2)
    assert found.nonzero().tolist() == [[30, 0]]


@pytest.fixture
def by_threads():
    before = torch.get_num_threads()

    def run(compute):
        found = []
        for threads in (1, 2, 1):
            torch.set_num_threads(threads)
            found.append([t.clone() for t in compute()])
        return found

    yield run
    torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", DTYPES)
def test_threads_change_no_bit(dtype, by_threads):
    parts, weight = heads(dtype, 136, (6, 2, 2), 20)
    rows = Rows.of([(0, 19, False, [(19, 1), (20, 33), (53, 8)]), (61, 0, False, [(61, 75)])])
    x, w, g = torch.randn(9, 50).to(dtype), torch.randn(50).to(dtype), torch.randn(9, 50).to(dtype)

    def compute():
        out = rows_attention(*parts, rows, 0.3, None)
        normed, r = learn_rows.norm(x, w, 1e-6, False)
        return [
            out.detach(),
            *torch.autograd.grad(out, parts, weight),
            normed,
            learn_rows.norm_backward(x, w, r, g, False),
            *learn_rows.swiglu_backward(x, g, g),
            *learn_rows.word_softmax(x.clone(), torch.arange(9), torch.ones(9), True, torch.empty_like(x)),
        ]

    first, *others = by_threads(compute)
    assert all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 16, 37, 96])
def test_swiglu_reads_parts_of_one_matrix(dtype, size):
    torch.manual_seed(size)
    both, grad = (3 * torch.randn(5, 2 * size)).to(dtype), torch.randn(5, size).to(dtype)
    gate, up = both.split(size, 1)
    exact = [t.double().requires_grad_() for t in (gate, up)]
    expected = F.silu(exact[0]) * exact[1]
    near(learn_rows.swiglu(gate, up), expected.detach(), dtype)
    found = learn_rows.swiglu_backward(gate, up, grad)
    for own, theirs in zip(found, torch.autograd.grad(expected, exact, grad.double()), strict=True):
        near(own, theirs, dtype)
    gate[2, 0], gate[3, 0], gate[4, 0] = torch.nan, -200.0, 200.0
    out = learn_rows.swiglu(gate, up)
    assert out.isnan().sum() == 1 and out[2, 0].isnan() and out[3, 0] == 0 and out[4, 0] == 200 * up[4, 0]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("plus_one", [True, False])
def test_norm_of_odd_width(dtype, plus_one):
    torch.manual_seed(1)
    x, w, g = torch.randn(2, 3, 37).to(dtype), torch.randn(37).to(dtype), torch.randn(2, 3, 37).to(dtype)
    exact = x.double().requires_grad_()
    y = exact * torch.rsqrt(exact.pow(2).mean(-1, keepdim=True) + 1e-6)
    expected = y * (w.double() + plus_one)
    out, r = learn_rows.norm(x, w, 1e-6, plus_one)
    near(out, expected.detach(), dtype)
    near(learn_rows.norm_backward(x, w, r, g, plus_one), torch.autograd.grad(expected, exact, g.double())[0], dtype)
    x[1, 2, 36] = torch.nan
    assert learn_rows.norm(x, w, 1e-6, plus_one)[0].isnan().any(2).nonzero().tolist() == [[1, 2]]


@pytest.mark.parametrize("dtype", DTYPES)
def test_norm_of_heads_that_are_a_part_of_a_wider_matrix(dtype):
    torch.manual_seed(1)
    wide, onto, w = torch.randn(1, 7, 5, 16).to(dtype), torch.randn(1, 4, 7, 16).to(dtype), torch.randn(16).to(dtype)
    x, grad = wide[:, :, 1:4], onto[:, :3].transpose(1, 2)
    out, r = learn_rows.norm(x, w, 1e-6, False)
    expected, factors = learn_rows.norm(x.contiguous(), w, 1e-6, False)
    assert torch.equal(out, expected) and torch.equal(r, factors)
    found = learn_rows.norm_backward(x, w, r, grad, False)
    assert torch.equal(found, learn_rows.norm_backward(x.contiguous(), w, r, grad.contiguous(), False))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [6, 32, 50])
def test_rotary_and_its_transpose(dtype, size):
    torch.manual_seed(size)
    x, cosine, sine = torch.randn(3, 7, size), torch.randn(7, size), torch.randn(7, size)
    x, cosine, sine, grad = (t.to(dtype) for t in (x, cosine, sine, torch.randn(3, 7, size)))
    exact = x.double().requires_grad_()
    turned = torch.cat((-exact[..., size // 2 :], exact[..., : size // 2]), -1)
    expected = exact * cosine.double() + turned * sine.double()
    near(learn_rows.rotary(x, cosine, sine), expected.detach(), dtype)
    back = learn_rows.rotary(grad, cosine, sine, backward=True)
    near(back, torch.autograd.grad(expected, exact, grad.double())[0], dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("words", [5, 48, 4099])
def test_word_softmax(dtype, words):
    torch.manual_seed(words)
    logits, targets, scales = (5 * torch.randn(6, words)).to(dtype), torch.randint(words, (6,)), torch.rand(6) + 0.5
    logits[0, 1] = -torch.inf  # of probability 0
    targets[0] = 0
    exact = (logits.double() * scales.double().unsqueeze(1)).log_softmax(1)
    p, given, surprises = exact.exp(), logits.clone(), torch.empty_like(logits)
    logprob, entropy, rest = learn_rows.word_softmax(given, targets, scales, True, surprises)
    torch.testing.assert_close(logprob.double(), exact.gather(1, targets[:, None])[:, 0], atol=2e-6, rtol=1e-6)
    torch.testing.assert_close(entropy.double(), torch.special.entr(p).sum(1), atol=2e-6, rtol=2e-6)
    near(given, p, dtype)
    shifted = logits.double() * scales.double().unsqueeze(1)
    shifted -= shifted.amax(1, keepdim=True)
    products = torch.where(p > 0, p * shifted, 0.0)
    near(surprises, products, dtype)
    torch.testing.assert_close(rest.double(), -products.sum(1), atol=2e-6, rtol=2e-6)
    logits[3, words - 1] = torch.nan
    assert learn_rows.word_softmax(logits, targets, scales, False, None)[0].isnan().nonzero().tolist() == [[3]]


@pytest.mark.parametrize("form", [LogitForm(), LogitForm(0.25)])
def test_logprobs_equal_those_of_torch(form):
    torch.manual_seed(2)
    weight, targets, temperature = torch.randn(101, 16), torch.randint(101, (9,)), torch.rand(9) + 0.5
    found = []
    for head in (CpuHead(weight, None, form), FrozenHead(weight, None, form)):
        hidden = torch.randn(9, 16, generator=torch.Generator().manual_seed(1)).requires_grad_()
        out = token_logprobs(hidden, targets, head, temperature=temperature, chunk=4)
        found.append([*out, *torch.autograd.grad(out[0].sum() + 0.3 * out[1].square().sum(), hidden)])
    for own, theirs in zip(*found, strict=True):
        torch.testing.assert_close(own, theirs, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "mistral"])
@pytest.mark.parametrize("kernel", [True, False])
def test_a_model_with_recorded_parts_has_the_gradients_of_the_plain_one(kind, kernel, monkeypatch):
    if not kernel:
        monkeypatch.setattr(learn_rows, "_functions", lambda: None)
    ids, found = torch.arange(5, 18)[None], []
    for recorded in (True, False):
        model = tiny_model(kind).requires_grad_(False)
        if recorded:
            assert use_recorded_mlps(model) == 2 == use_recorded_rotary(model)
            assert use_recorded_mlps(model) == 0 == use_recorded_rotary(model)  # each once
        embedded = model.get_input_embeddings()(ids).requires_grad_()
        out = model(inputs_embeds=embedded).logits
        found.append([out.detach(), *torch.autograd.grad(out.square().sum(), embedded)])
    for own, theirs in zip(*found, strict=True):
        torch.testing.assert_close(own, theirs, atol=1e-5 * float(theirs.abs().max()), rtol=1e-4)


def test_other_forms_are_left_alone():
    assert use_recorded_mlps(tiny_model("gemma2")) == 0  # of another activation

    class Squared(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.gate_proj, self.up_proj, self.down_proj = (torch.nn.Linear(4, 4) for _ in range(3))
            self.act_fn = torch.nn.SiLU()

        def forward(self, x):
            return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x).square())

    assert use_recorded_mlps(torch.nn.Sequential(Squared())) == 0
    assert use_recorded_rotary(torch.nn.Sequential(Squared())) == 0


def apply_rotary_pos_emb(q, k=None, cos=None, sin=None):
    """As Qwen 4's, which its indexer calls for queries alone."""
    found = [x * cos + torch.cat((-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]), -1) * sin
             for x in (q, k) if x is not None]  # fmt: skip
    return found[0] if k is None else tuple(found)


class QueriesAlone(torch.nn.Module):
    def forward(self, q, cos, sin):
        return apply_rotary_pos_emb(q, cos=cos, sin=sin)


def test_a_rotary_embedding_that_is_called_otherwise_is_the_modules_own():
    q, cos, sin = torch.randn(1, 2, 5, 8, requires_grad=True), torch.randn(1, 5, 8), torch.randn(1, 5, 8)
    model = torch.nn.Sequential(QueriesAlone())
    assert use_recorded_rotary(model) == 1
    assert torch.equal(model[0](q, cos, sin), apply_rotary_pos_emb(q, cos=cos, sin=sin))
