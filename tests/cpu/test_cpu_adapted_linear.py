"""Layers that read the same input are computed together, with the results of the layers one by one."""

from __future__ import annotations

import pytest
import torch
from helpers_models import ALL, add_random_adapter, tiny_base

from mafrt.cpu import adapted_linear
from mafrt.cpu import compute as cpu_compute
from mafrt.cpu.library import library
from mafrt.models import adapter_routing
from mafrt.models.compute import reference

pytestmark = pytest.mark.skipif(library() is None, reason="needs a C compiler")


def grads(base, train, index):
    """Hidden states of a batch and the adapters' gradients."""
    names = list(base.adapters)
    for name in names:
        for parameter in base.adapter_parameters(name):
            parameter.grad = None
    ids = torch.arange(len(index) * 9).view(len(index), 9) % 80 + 5
    hidden = base.forward(ids, torch.ones_like(ids), index, train=train)
    (hidden * torch.linspace(-1, 1, hidden.shape[-1])).sum().backward()
    return hidden.detach(), [p.grad for name in names for p in base.adapter_parameters(name)]


@pytest.mark.parametrize("kind", ["qwen2", "qwen3"])  # with and without biases
def test_results_are_those_of_the_layers_one_by_one(kind, monkeypatch):
    base = tiny_base(kind)
    add_random_adapter(base, "all", 3, 5.0, ALL, seed=0)
    add_random_adapter(base, "some", 2, 8.0, ("q_proj", "v_proj", "up_proj"), seed=1)
    add_random_adapter(base, "frozen", 2, 4.0, ALL, seed=2)
    index, train = torch.tensor([0, 1, 2, -1, 0, 1]), ["all", "some"]
    calls = []
    apply = adapted_linear._AdaptedLinear.apply
    monkeypatch.setattr(
        adapted_linear._AdaptedLinear,
        "apply",
        lambda x, siblings, *rest: calls.append(len(siblings.layers)) or apply(x, siblings, *rest),
    )
    found = grads(base, train, index)
    # Per decoder layer: query, key and value; output; gate and up; down.
    assert sorted(calls) == sorted(2 * [3, 1, 2, 1])
    with reference():
        expected = grads(base, train, index)
    assert len(calls) == 8
    torch.testing.assert_close(found[0], expected[0], atol=1e-5, rtol=1e-5)
    for own, theirs in zip(found[1], expected[1], strict=True):
        assert (own is None) == (theirs is None)
        if own is not None:
            assert float((own - theirs).abs().max()) <= 1e-5 * max(1.0, float(theirs.abs().max()))


@pytest.mark.parametrize("per_token", [False, True])
def test_many_adapters_are_computed_for_their_own_tokens_with_the_same_results(per_token, monkeypatch):
    monkeypatch.setenv("MAFRT_KERNELS", "torch")
    monkeypatch.setattr(cpu_compute, "pays", lambda dtype: False)
    base = tiny_base("qwen2")
    for n in range(5):
        targets = ALL if n != 3 else ("q_proj", "up_proj")
        add_random_adapter(base, f"a{n}", n + 1, 4.0, targets, seed=n)
    index, train = torch.tensor([0, 0, 1, 2, 3, -1, 4, 4]), ["a0", "a2", "a3"]
    index = index.unsqueeze(1).expand(-1, 9).contiguous() if per_token else index
    used = []
    by_runs = cpu_compute._adapted_by_runs
    monkeypatch.setattr(cpu_compute, "_adapted_by_runs", lambda *given: used.append(given[3]) or by_runs(*given))
    found = grads(base, train, index)
    assert used and all(sorted(run)[:4] == [(-1, 9), (0, 18), (1, 9), (2, 9)] for run in used)
    with reference():
        expected = grads(base, train, index)
    torch.testing.assert_close(found[0], expected[0], atol=1e-5, rtol=1e-5)
    for own, theirs in zip(found[1], expected[1], strict=True):
        assert (own is None) == (theirs is None)
        if own is not None:
            torch.testing.assert_close(own, theirs, atol=1e-5, rtol=1e-4)
    used.clear()
    grads(base, train, torch.arange(27).view(3, 9) % 5)  # not side by side: by the reference
    grads(base, train, torch.tensor([0, 0, 1, 2]))  # few
    assert not used


@pytest.mark.parametrize("missing", [False, True])
def test_adapters_of_one_shape_are_one_product(missing, monkeypatch):
    """As many products as with one adapter; layers that one of them lacks are computed adapter by adapter."""
    monkeypatch.setenv("MAFRT_KERNELS", "torch")
    monkeypatch.setattr(cpu_compute, "pays", lambda dtype: False)
    base = tiny_base("qwen2")
    for n in range(5):
        add_random_adapter(base, f"a{n}", 3, 4.0 + n, ("q_proj",) if missing and n == 3 else ALL, seed=n)
    train, calls, linear = [f"a{n}" for n in range(5)], [], torch.nn.functional.linear
    with monkeypatch.context() as patch:
        patch.setattr(torch.nn.functional, "linear", lambda *given: calls.append(1) or linear(*given))
        found = grads(base, train, torch.tensor([0, 0, 1, 1, 2, 2, 3, 3, 4, 4]))
        mixed = len(calls)
        grads(base, train, torch.zeros(10, dtype=torch.long))
    assert (mixed <= len(calls) - mixed) != missing
    with reference():
        expected = grads(base, train, torch.tensor([0, 0, 1, 1, 2, 2, 3, 3, 4, 4]))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)
    # Made in its parameter's layout, and so not copied: a gradient lies in one block with those of the others.
    blocks = [own.untyped_storage().nbytes() // own.nbytes for own in found[1]]
    assert missing or min(blocks) == 5
    # Adapters that act and do not learn pass gradients on, and get none.
    found = grads(base, ["a1", "a4"], torch.tensor([0, 0, 1, 1, 2, 2, 3, 3, 4, 4]))
    with reference():
        expected = grads(base, ["a1", "a4"], torch.tensor([0, 0, 1, 1, 2, 2, 3, 3, 4, 4]))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)


def test_a_layer_that_gets_another_input_is_computed_for_it():
    base = tiny_base()
    add_random_adapter(base, "ann", 2, 4.0, ALL, seed=0)
    attention = base.inner.layers[0].self_attn
    x, other = torch.randn(4, 32), torch.randn(4, 32)
    routing = adapter_routing.AdapterRouting(1, 4, torch.tensor([0]))
    with base.context.use(routing):
        attention.q_proj(x)
        found = attention.k_proj(other)
    with base.context.use(routing), torch.no_grad():
        torch.testing.assert_close(found.detach(), attention.k_proj(other), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", ["qwen2", "qwen3"])
def test_a_pass_that_records_nothing_follows_every_change_of_the_weights(kind):
    base = tiny_base(kind)
    add_random_adapter(base, "all", 3, 5.0, ALL, seed=0)
    add_random_adapter(base, "some", 2, 8.0, ("q_proj", "v_proj", "up_proj"), seed=1)
    index, ids = torch.tensor([0, 1, -1, 0]), torch.arange(36).view(4, 9) + 5
    seen = []
    for change in (None, "announced", "unannounced"):
        if change is not None:
            with torch.no_grad():
                for parameter in base.adapter_parameters("some"):
                    parameter.mul_(1.5)
        if change == "announced":
            base.bump("some")
        recorded = base.forward(ids, None, index).detach()
        with torch.no_grad():
            seen.append(base.forward(ids, None, index))
        torch.testing.assert_close(seen[-1], recorded, atol=1e-5, rtol=1e-5)
    assert not torch.allclose(seen[0], seen[1]) and not torch.allclose(seen[1], seen[2])


@pytest.mark.parametrize("still", ["lora_A", "lora_B"])
def test_one_half_of_an_adapter_may_be_frozen(still):
    base, index = tiny_base(), torch.tensor([0, 1, 0])
    add_random_adapter(base, "ann", 2, 4.0, ALL, seed=0)
    add_random_adapter(base, "bob", 3, 4.0, ALL, seed=1)
    _, expected = grads(base, None, index)
    for n, parameter in enumerate(base.adapter_parameters("ann")):
        parameter.requires_grad_((n % 2 == 1) == (still == "lora_A"))
    _, found = grads(base, None, index)
    learns = [p.requires_grad for name in base.adapters for p in base.adapter_parameters(name)]
    assert [grad is not None for grad in found] == learns and not all(learns)
    for own, theirs in zip(found, expected, strict=True):
        if own is not None:
            torch.testing.assert_close(own, theirs)


def test_adapters_of_another_format_get_gradients_of_theirs():
    base, index = tiny_base(), torch.tensor([0, 0])
    add_random_adapter(base, "ann", 2, 4.0, ALL, seed=0)
    _, exact = grads(base, None, index)
    for parameter in base.adapter_parameters("ann"):
        parameter.data = parameter.data.to(torch.bfloat16)
    base.bump("ann")
    _, found = grads(base, None, index)
    assert {grad.dtype for grad in found} == {torch.bfloat16}
    for own, theirs in zip(found, exact, strict=True):
        assert torch.cosine_similarity(own.float().flatten(), theirs.flatten(), dim=0) > 0.99


def test_weights_too_large_for_a_copy_are_read_layer_by_layer():
    base = tiny_base("qwen2")
    add_random_adapter(base, "all", 3, 5.0, ALL, seed=0)
    add_random_adapter(base, "some", 2, 8.0, ("q_proj", "v_proj", "up_proj"), seed=1)
    index = torch.tensor([0, 1, -1, 0])
    expected = grads(base, None, index)
    base.context.packed.enabled = False
    found = grads(base, None, index)
    torch.testing.assert_close(found[0], expected[0], atol=1e-5, rtol=1e-5)
    for own, theirs in zip(found[1], expected[1], strict=True):
        torch.testing.assert_close(own, theirs, atol=1e-5, rtol=1e-5)
