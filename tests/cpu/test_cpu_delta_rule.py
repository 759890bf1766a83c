"""The kernels of the gated delta rule and of the convolution before it: the plain forms' results and gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.qwen3_5 import modeling_qwen3_5

from mafrt.cpu import delta_rule, short_conv
from mafrt.cpu.library import library
from mafrt.models import delta_rule as plain
from mafrt.models.compute import compute_for, reference

pytestmark = pytest.mark.skipif(library() is None, reason="needs a C compiler")
DTYPES = [torch.float32, torch.bfloat16]


def inputs(rows: int, tokens: int, dtype: torch.dtype, sizes: tuple[int, int] = (32, 48)) -> list[Tensor]:
    """Queries, keys and values as parts of one wider matrix, decay, strength, and a state."""
    torch.manual_seed(tokens)
    heads, (size, width) = 3, sizes
    mixed = torch.randn(rows, tokens, heads * (2 * size + width) + 5).to(dtype)
    q, k, v = mixed[..., 5:].split([heads * size, heads * size, heads * width], -1)
    g, beta = -3 * torch.rand(rows, tokens, heads), torch.rand(rows, tokens, heads).to(dtype)
    parts = [part.view(rows, tokens, heads, -1) for part in (q, k, v)]
    return [*parts, g, beta, torch.randn(rows, heads, size, width)]


def near(found: Tensor, expected: Tensor) -> None:
    """Up to rounding of the largest number; in bfloat16 a neighbouring one."""
    assert found.shape == expected.shape and found.dtype == expected.dtype
    allowed = 2e-5 if found.dtype == torch.float32 else 2**-7
    found, expected = found.detach().float(), expected.detach().float()
    assert float((found - expected).abs().max()) <= allowed * max(float(expected.abs().max()), 1e-3)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", [(128, 128), (32, 48), (16, 80)])
@pytest.mark.parametrize("normed", [True, False])
def test_a_step_is_the_plain_one(dtype: torch.dtype, sizes: tuple[int, int], normed: bool) -> None:
    *given, state = inputs(4, 1, dtype, sizes)
    before = state.clone()
    expected = plain.step(*given, state, normed)
    found = compute_for("cpu").delta_step(*given, state, normed)
    for ours, theirs in zip(found, expected, strict=True):
        near(ours, theirs)
    assert torch.equal(state, before), "another row may go on from it"
    out, kept = compute_for("cpu").delta_step(*given, state, normed, in_place=True)
    assert kept is state and torch.equal(kept, found[1]) and torch.equal(out, found[0])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [1, 2, 16, 33, 64, 65, 130])
@pytest.mark.parametrize("begun", [True, False])
def test_chunks_and_their_gradients_are_the_plain_ones(dtype: torch.dtype, tokens: int, begun: bool) -> None:
    *given, state = inputs(2, tokens, dtype)
    onto, onto_state = torch.randn(given[2].shape).to(dtype), torch.randn(state.shape)
    found = []
    for form in (compute_for("cpu").delta_chunks, plain.chunks):
        leaves = [each.detach().requires_grad_() for each in (*given, state)]
        out, kept = form(*leaves[:5], leaves[5] if begun else None, True)
        loss = (out * onto).float().sum() + (kept * onto_state).sum()
        found.append([out, kept, *torch.autograd.grad(loss, leaves if begun else leaves[:5])])
    for ours, theirs in zip(*found, strict=True):
        near(ours, theirs)


def test_only_the_last_state_or_only_the_outputs_may_be_learnt_from() -> None:
    *given, state = inputs(2, 70, torch.float32)
    for which in (0, 1):
        found = []
        for form in (delta_rule.chunks, plain.chunks):
            leaves = [each.detach().requires_grad_() for each in (*given, state)]
            made = form(*leaves, False)[which]
            grads = torch.autograd.grad(made.square().sum(), leaves, allow_unused=True)
            found.append([torch.zeros_like(x) if g is None else g for g, x in zip(grads, leaves, strict=True)])
        for ours, theirs in zip(*found, strict=True):
            near(ours, theirs)


def test_strong_decay_gives_numbers() -> None:
    *given, state = inputs(1, 40, torch.float32)
    given[3] = given[3] * 200
    leaves = [each.detach().requires_grad_() for each in (*given, state)]
    out, kept = delta_rule.chunks(*leaves, True)
    grads = torch.autograd.grad(out.sum() + kept.sum(), leaves)
    assert all(bool(each.isfinite().all()) for each in (out, kept, *grads))


def test_threads_change_nothing() -> None:
    *given, state = inputs(3, 70, torch.bfloat16)
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            leaves = [each.detach().requires_grad_() for each in (*given, state)]
            out, kept = delta_rule.chunks(*leaves, True)
            step = delta_rule.step(*(x[:, :1].detach() for x in leaves[:5]), state, True)
            found.append([out, kept, *step, *torch.autograd.grad(out.float().sum() + kept.sum(), leaves)])
    finally:
        torch.set_num_threads(before)
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("sizes", [(8, 16), (16, 20)])
def test_widths_that_are_no_whole_vectors_go_the_plain_way(sizes: tuple[int, int]) -> None:
    *given, state = inputs(2, 5, torch.float32, sizes)
    assert not delta_rule.serves(*given[:3], given[4], state)
    for ours, theirs in zip(
        compute_for("cpu").delta_chunks(*given, state, True), plain.chunks(*given, state, True), strict=True
    ):
        assert torch.equal(ours, theirs)


def conv_inputs(tokens: int, dtype: torch.dtype, channels: int = 1056) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens as a linear layer writes them, weights, and the last tokens of before."""
    torch.manual_seed(tokens)
    x = torch.randn(3, tokens, channels).to(dtype).transpose(1, 2)
    return x, torch.randn(channels, 4).to(dtype), torch.randn(3, channels, 4).to(dtype)


def theirs_of(name: str) -> Any:
    form = getattr(modeling_qwen3_5, name)
    return getattr(form, "_theirs", form)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 37])
@pytest.mark.parametrize("laid", [True, False])
def test_a_convolution_and_its_gradient_are_transformers_own(dtype: torch.dtype, tokens: int, laid: bool) -> None:
    x, weight, _ = conv_inputs(tokens, dtype)
    x = x if laid else x.contiguous()
    found = []
    for form in (plain.conv(theirs_of(plain.CONV), compute_for), theirs_of(plain.CONV)):
        leaf = x.detach().requires_grad_()
        out = form(leaf, weight, None, activation="silu", seq_idx=None)
        found.append([out, *torch.autograd.grad((out * out.detach()).float().sum(), leaf)])
    for ours, own in zip(*found, strict=True):
        near(ours, own)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("laid", [True, False])
def test_a_convolution_goes_on_by_a_token_as_transformers_does(dtype: torch.dtype, laid: bool) -> None:
    x, weight, state = conv_inputs(1, dtype)
    x = x if laid else x.contiguous()
    found = []
    for form in (plain.conv_step(theirs_of(plain.CONV_STEP), compute_for), theirs_of(plain.CONV_STEP)):
        kept = state.clone()
        with torch.no_grad():
            found.append((form(x, kept, weight, None, "silu"), kept))
    near(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])


def test_another_convolution_is_transformers_own() -> None:
    x, weight, state = conv_inputs(5, torch.float32)
    bias = torch.randn(len(weight))
    for given in ((weight, bias, "silu"), (weight, None, None), (weight[:, :3], None, "silu")):
        assert not short_conv.serves(x, *given, None)
    assert not short_conv.serves(x, weight.clone().requires_grad_(), None, "silu", None)
    assert not short_conv.serves(x, weight, None, "silu", state.transpose(1, 2).contiguous().transpose(1, 2))
    own = theirs_of(plain.CONV)
    assert torch.equal(plain.conv(own, compute_for)(x, weight, bias, "silu"), own(x, weight, bias, "silu"))


def test_without_the_kernels_all_is_the_plain_form(monkeypatch: pytest.MonkeyPatch) -> None:
    *given, state = inputs(2, 1, torch.float32)
    for module, name in ((delta_rule, "step"), (delta_rule, "chunks"), (short_conv, "whole"), (short_conv, "step")):
        monkeypatch.setattr(module, name, lambda *_: pytest.fail("a kernel"))
    x, weight, kept = conv_inputs(1, torch.float32)
    with reference(), torch.no_grad():
        compute_for("cpu").delta_step(*given, state, True)
        compute_for("cpu").delta_chunks(*given, state, True)
        plain.conv(theirs_of(plain.CONV), compute_for)(x, weight, None, "silu")
        plain.conv_step(theirs_of(plain.CONV_STEP), compute_for)(x, kept, weight, None, "silu")
