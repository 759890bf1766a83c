"""Packed copies of frozen weights: the products, gradients and samples of the weights themselves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers_models import ALL, add_random_adapter, random_ids, tiny_base
from torch import nn
from torch.nn import functional

from mafrt.core.machine_memory import memory_bytes
from mafrt.core.types import Request, SamplingParams
from mafrt.cpu import onednn
from mafrt.cpu.library import library
from mafrt.cpu.onednn import product
from mafrt.cpu.packed_weights import PackedWeights
from mafrt.engines.local.engine import LocalEngine
from mafrt.models import memory_estimate
from mafrt.models.memory_estimate import MemoryInputs

pytestmark = pytest.mark.skipif(
    library() is None or not onednn.supported(torch.float32),
    reason="needs a C compiler, and a torch and a processor with packed products",
)


def layers(dtype: torch.dtype = torch.float32) -> nn.ModuleList:
    torch.manual_seed(0)
    return nn.ModuleList([nn.Linear(40, out, bias=False) for out in (24, 8)]).to(dtype).requires_grad_(False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_are_those_of_the_weights(dtype):
    if not onednn.supported(dtype):
        pytest.skip("no packed products in this precision")
    model = layers(dtype)
    packed = PackedWeights(model)
    weights = [layer.weight for layer in model]
    x, bias, added = (torch.randn(*shape).to(dtype) for shape in ((5, 40), (32,), (5, 32)))
    ahead, back = packed.of(*weights), packed.of(*weights, transposed=True)
    assert ahead is not None and back is not None
    tolerance = {"atol": 1e-5, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 0.02, "rtol": 0.02}
    expected = functional.linear(x, torch.cat(weights), bias)
    torch.testing.assert_close(product(x, ahead, bias), expected, **tolerance)
    torch.testing.assert_close(product(x, ahead, bias, added), expected + added, **tolerance)
    torch.testing.assert_close(product(added, back), added @ torch.cat(weights), **tolerance)


def test_a_weight_is_packed_once_and_again_when_it_changes():
    model = layers()
    packed = PackedWeights(model)
    weight, x = model[0].weight, torch.randn(3, 40)
    before = packed.of(weight)
    assert packed.of(weight) is before
    weight.mul_(2)
    changed = packed.of(weight)
    assert changed is not before and changed is not None
    torch.testing.assert_close(product(x, changed), functional.linear(x, weight))
    model.to(torch.float64)
    assert packed.of(weight) is None


def test_the_larger_a_model_is_for_the_memory_the_fewer_copies_it_has():
    model = layers()
    size = sum(4 * p.numel() for p in model.parameters())
    small, middle, large = (PackedWeights(model, memory) for memory in (16 * size, 8 * size, 8 * size - 1))
    assert [packed.of(model[0].weight) is not None for packed in (small, middle, large)] == [True, True, False]
    for packed in (small, middle):
        packed.beside_others()
    assert [packed.of(model[0].weight) is not None for packed in (small, middle)] == [True, False]


def test_the_estimate_of_a_runs_memory_counts_these_copies():
    memory = memory_bytes()

    def copies(share: float, **settings: Any) -> float:
        base = share * memory
        return memory_estimate.packed(base, MemoryInputs(on_cpu=True, **settings)) / base

    assert [copies(1e-4, bits=bits) for bits in (32, 16, 8)] == [2, 2, 0]
    assert [copies(share) for share in (1 / 16, 0.12, 0.13, 1.0)] == [2, 2, 0, 0]
    assert [copies(share, processes=2) for share in (1 / 16, 0.12)] == [2, 0]
    assert copies(1e-4, kernels="torch") == 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen2", "qwen3"])
def test_learning_and_sampling_equal_those_without_packed_weights(kind):
    """Qwen2's layers have biases."""
    base = tiny_base(kind)
    for seed, name in enumerate(("a", "b")):
        add_random_adapter(base, name, 3, 5.0, ALL, seed=seed)
    ids = random_ids(6, 12)
    index = torch.tensor([0, 0, 1, 1, -1, -1])
    sampling = SamplingParams(max_new_tokens=8, temperature=0.0)
    requests = [Request(ids[row, :5].tolist(), name, sampling, seed=row) for row, name in enumerate(("a", "b", None))]
    found = []
    for enabled in (True, False):
        base.context.packed.enabled = enabled
        hidden = base.forward(ids, None, index)[:, :-1].flatten(0, 1)
        logprobs, entropy = base.token_logprobs(hidden, ids[:, 1:].flatten())
        parameters = [p for name in ("a", "b") for p in base.adapter_parameters(name)]
        grads = torch.autograd.grad(logprobs.sum() + entropy.sum(), parameters)
        found.append(([logprobs, *grads], [answer.ids for answer in LocalEngine(base).generate(requests)]))
    for packed, plain in zip(found[0][0], found[1][0], strict=True):
        torch.testing.assert_close(packed, plain, atol=1e-5 * float(plain.detach().abs().max()), rtol=1e-5)
    assert found[0][1] == found[1][1]


def test_logits_of_any_shape_are_the_heads_and_a_pass_that_records_is_not_packed():
    base = tiny_base()
    for shape in ((5, 32), (2, 3, 32), (32,)):
        hidden = torch.randn(shape, generator=torch.Generator().manual_seed(0))
        torch.testing.assert_close(base.logits(hidden), base.head(hidden), atol=1e-5, rtol=1e-5)
    hidden.requires_grad_()
    ours, theirs = (
        torch.autograd.grad(logits(hidden).square().sum(), hidden)[0] for logits in (base.logits, base.head)
    )
    assert torch.equal(ours, theirs)
