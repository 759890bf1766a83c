"""Chunked log-probs and entropies against torch's own log_softmax, and what they hold in memory."""

from __future__ import annotations

import math

import pytest
import torch
from helpers_models import random_ids, tiny_base
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from mafrt.cpu.head import CpuHead
from mafrt.cpu.library import library
from mafrt.models.logprobs import FrozenHead, chunk_tokens, token_logprobs


def reference(hidden, targets, weight, bias=None, temperature=1.0):
    """Full logits, log_softmax, gather."""
    temperature = torch.as_tensor(temperature, dtype=hidden.dtype).expand(hidden.shape[0]).unsqueeze(1)
    logp = torch.log_softmax(torch.nn.functional.linear(hidden, weight, bias) / temperature, 1)
    return logp.gather(1, targets.unsqueeze(1)).squeeze(1), -(logp.exp() * logp).sum(1)


def problem(n, d, v, *, dtype=torch.float64, bias=True, seed=0):
    g = torch.Generator().manual_seed(seed)
    hidden = torch.randn(n, d, generator=g, dtype=dtype).requires_grad_()
    weight = torch.randn(v, d, generator=g, dtype=dtype)
    offset = torch.randn(v, generator=g, dtype=dtype) if bias else None
    targets = torch.randint(0, v, (n,), generator=g)
    temperature = torch.rand(n, generator=g, dtype=dtype) + 0.5
    return hidden, targets, weight, offset, temperature


def test_two_logits_by_hand():
    """h = [1], W = [[ln 3], [0]] -> p = (3/4, 1/4); at temperature 1/2 the odds are squared: p = (9/10, 1/10)."""
    hidden, weight = torch.ones(2, 1), torch.tensor([[math.log(3)], [0.0]])
    logprobs, entropy = token_logprobs(
        hidden, torch.tensor([0, 1]), FrozenHead(weight), temperature=torch.tensor([1.0, 0.5])
    )
    assert logprobs.tolist() == pytest.approx([math.log(0.75), math.log(0.1)], abs=1e-6)
    # H(3/4, 1/4) = .75 ln(4/3) + .25 ln 4 = .5623; H(.9, .1) = .9 ln(10/9) + .1 ln 10 = .3251
    assert entropy.tolist() == pytest.approx([0.5623351, 0.3250830], abs=1e-6)


@settings(max_examples=30, deadline=None)
@given(n=st.integers(1, 9), d=st.integers(1, 6), v=st.integers(2, 12), chunk=st.integers(1, 10), bias=st.booleans())
def test_values_and_gradients_equal_log_softmax(n, d, v, chunk, bias):
    hidden, targets, weight, offset, temperature = problem(n, d, v, bias=bias, seed=n)
    weights = torch.linspace(-1, 1, 2 * n, dtype=torch.float64)
    results = []
    for scored in (
        lambda: token_logprobs(hidden, targets, FrozenHead(weight, offset), temperature=temperature, chunk=chunk),
        lambda: reference(hidden, targets, weight, offset, temperature),
    ):
        logprobs, entropy = scored()
        loss = (logprobs * weights[:n]).sum() + (entropy * weights[n:]).sum()
        results.append((logprobs.detach(), entropy.detach(), *torch.autograd.grad(loss, hidden)))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-12, rtol=1e-10)


def test_gradcheck():
    hidden, targets, weight, offset, temperature = problem(5, 3, 7)

    def both(h):
        return token_logprobs(h, targets, FrozenHead(weight, offset), temperature=temperature, chunk=2)

    assert torch.autograd.gradcheck(both, (hidden,))


def test_only_one_output_may_be_used():
    hidden, targets, weight, *_ = problem(4, 3, 5)
    logprobs, entropy = token_logprobs(hidden, targets, FrozenHead(weight))
    expected = reference(hidden, targets, weight)
    for ours, theirs in ((logprobs, expected[0]), (entropy, expected[1])):
        (grad,) = torch.autograd.grad(ours.sum(), hidden, retain_graph=True)
        (wanted,) = torch.autograd.grad(theirs.sum(), hidden, retain_graph=True)
        torch.testing.assert_close(grad, wanted)


def test_entropy_without_gradient_is_the_same_number():
    hidden, targets, weight, *_ = problem(4, 3, 5)
    logprobs, entropy = token_logprobs(hidden, targets, FrozenHead(weight), entropy_grad=False)
    assert logprobs.requires_grad and not entropy.requires_grad
    assert torch.equal(entropy, token_logprobs(hidden, targets, FrozenHead(weight))[1].detach())
    assert torch.autograd.grad(logprobs.sum(), hidden)[0].abs().sum() > 0


def test_the_policy_gradient_of_a_certain_token_is_zero_not_nan():
    """Logits 1e4 apart: p = 1 and 0, log p = 0 and -1e4, entropy 0."""
    hidden = torch.ones(2, 1, requires_grad=True)
    logprobs, entropy = token_logprobs(hidden, torch.tensor([0, 1]), FrozenHead(torch.tensor([[1e4], [0.0]])))
    assert logprobs.tolist() == [0.0, -1e4] and entropy.tolist() == [0.0, 0.0]
    (grad,) = torch.autograd.grad((logprobs + entropy).sum(), hidden)
    assert grad.tolist() == [[0.0], [-1e4]]


@pytest.mark.parametrize("temperature", [0.0, -1.0, float("nan")])
def test_a_temperature_that_is_not_above_zero_is_refused(temperature):
    hidden, targets, weight, *_ = problem(2, 3, 5)
    with pytest.raises(ValueError, match="temperature"):
        token_logprobs(hidden, targets, FrozenHead(weight), temperature=temperature)


def test_no_tokens_at_all():
    logprobs, entropy = token_logprobs(
        torch.zeros(0, 3, requires_grad=True), torch.zeros(0).long(), FrozenHead(torch.ones(5, 3))
    )
    (logprobs.sum() + entropy.sum()).backward()
    assert logprobs.shape == entropy.shape == (0,)


def test_the_models_own_head_and_labels():
    base = tiny_base()
    ids = random_ids(3, 9)
    with torch.no_grad():
        hidden = base.forward(ids, None, torch.full((3,), -1))
        logprobs, _ = base.token_logprobs(hidden[:, :-1].reshape(-1, base.hidden_size), ids[:, 1:].reshape(-1), 0.7)
        logits = base.model(input_ids=ids).logits[:, :-1].float() / 0.7
    expected = torch.log_softmax(logits, -1).gather(-1, ids[:, 1:, None]).reshape(-1)
    torch.testing.assert_close(logprobs, expected, atol=1e-5, rtol=1e-5)


def test_bfloat16_hidden_states_give_float32_numbers():
    hidden, targets, weight, *_ = problem(6, 16, 20, dtype=torch.float32)
    exact, exact_entropy = token_logprobs(hidden, targets, FrozenHead(weight))
    half = hidden.detach().bfloat16().requires_grad_()
    logprobs, entropy = token_logprobs(half, targets, FrozenHead(weight.bfloat16()))
    assert logprobs.dtype == entropy.dtype == torch.float32
    torch.testing.assert_close(logprobs, exact, atol=0.15, rtol=0.05)
    torch.testing.assert_close(entropy, exact_entropy, atol=0.15, rtol=0.05)
    (grad,) = torch.autograd.grad(logprobs.sum(), half)
    assert grad.dtype == torch.bfloat16


class Largest(TorchDispatchMode):
    """Notes the most elements that any tensor made inside has, forward and backward."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.numel())
        return result


def test_nothing_as_large_as_tokens_times_vocabulary_ever_exists():
    n, d, v, chunk = 640, 8, 1000, 64
    hidden, targets, weight, *_ = problem(n, d, v, dtype=torch.float32, bias=False)
    with Largest() as seen:
        logprobs, entropy = token_logprobs(hidden, targets, FrozenHead(weight), chunk=chunk)
        (logprobs.sum() + entropy.sum()).backward()
    assert seen.elements == chunk * v
    with Largest() as full:
        reference(hidden, targets, weight)
    assert full.elements == n * v


def test_the_default_chunk_is_bounded_in_elements():
    n, v = 3000, 20_000
    hidden, targets, weight, *_ = problem(n, 2, v, dtype=torch.float32, bias=False)
    with torch.no_grad(), Largest() as seen:
        token_logprobs(hidden, targets, FrozenHead(weight))
    assert seen.elements <= 2**22


@pytest.mark.parametrize(
    ("vocabulary", "tokens"), [(512, 1024), (49_152, 128), (151_936, 128), (262_144, 128), (1_000_000, 33), (2**23, 16)]
)
def test_a_chunk_is_large_enough_for_the_products_and_bounded_in_memory(vocabulary, tokens):
    assert chunk_tokens(vocabulary, "cpu") == tokens
    assert tokens == 16 or vocabulary * tokens <= 2**25


@pytest.mark.skipif(library() is None, reason="needs a C compiler")
@pytest.mark.parametrize("entropy_grad", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernels_and_the_reference_give_the_same_numbers(dtype, entropy_grad):
    hidden, targets, weight, *_ = problem(11, 6, 50, dtype=torch.float32, bias=False)
    hidden, weight = hidden.detach().to(dtype).requires_grad_(), weight.to(dtype)
    found = []
    for head in (CpuHead(weight), FrozenHead(weight)):
        logprobs, entropy = token_logprobs(hidden, targets, head, temperature=0.7, chunk=7, entropy_grad=entropy_grad)
        total = logprobs.sum() + (entropy.sum() if entropy_grad else 0)
        found.append((logprobs, entropy, torch.autograd.grad(total, hidden)[0]))
    tolerance = {"atol": 1e-5, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 0.05, "rtol": 0.05}
    for ours, plain in zip(*found, strict=True):
        torch.testing.assert_close(ours, plain, **tolerance)


@pytest.mark.skipif(library() is None, reason="needs a C compiler")
def test_beside_one_chunk_of_products_the_kernels_hold_nothing_in_float32():
    hidden, targets, weight, *_ = problem(64, 8, 1000, dtype=torch.float32, bias=False)
    hidden, weight = hidden.detach().bfloat16().requires_grad_(), weight.bfloat16()

    class Widest(Largest):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = super().__torch_dispatch__(func, types, args, kwargs)
            if isinstance(result, torch.Tensor) and result.dtype == torch.float32:
                assert result.numel() <= 4000
            return result

    with Widest() as seen:
        token_logprobs(hidden, targets, CpuHead(weight), chunk=64, entropy_grad=False)[0].sum().backward()
    assert seen.elements == 64 * 1000
