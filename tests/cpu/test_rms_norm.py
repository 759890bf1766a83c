"""RMS norms with a backward pass of their own: the results of transformers up to the order of one sum, and autograd's
gradients."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from helpers_models import ALL, add_random_adapter, random_ids, tiny_base, tiny_model
from torch import nn

from mafrt.cpu.rms_norm import use_recorded_norms

KINDS = {"llama": 5, "qwen2": 5, "qwen3": 9, "gemma2": 9, "gemma3": 13, "mistral": 5}
"""norms of a model of two layers: of the layers' inputs (and outputs, in Gemma), of queries and keys, and the last"""


def norms(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if "RMSNorm" in type(module).__name__]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_results_are_equal_and_gradients_those_of_autograd(kind, dtype):
    model = tiny_model(kind).to(dtype).requires_grad_(False)
    torch.manual_seed(0)
    for norm in norms(model):
        norm.weight.copy_(torch.randn(len(norm.weight)))
    plain = deepcopy(model)
    assert use_recorded_norms(model) == KINDS[kind]
    assert use_recorded_norms(model) == 0  # each once
    for ours, theirs in zip(norms(model), norms(plain), strict=True):
        assert isinstance(ours, type(theirs)) and type(ours).__name__ == type(theirs).__name__
        width = len(theirs.weight)
        # Rows over several chunks of a backward pass, the last of them short.
        x = (3 * torch.randn(2, 2**16 // width // 2 + 5, width)).to(dtype)
        grad = torch.randn(x.shape).to(dtype)
        found = []
        for norm, precision in ((ours, dtype), (theirs, dtype), (deepcopy(theirs).float(), torch.float32)):
            given = x.to(precision).requires_grad_()
            out = norm(given)
            found.append((out, torch.autograd.grad(out, given, grad.to(precision))[0]))
        # The kernels in C sum the squares in another order, which moves a few results to a neighbouring number.
        torch.testing.assert_close(found[0][0], found[1][0], atol=0, rtol=4 * torch.finfo(dtype).eps)
        if dtype == torch.bfloat16:
            assert (found[0][0] != found[1][0]).float().mean() < 1e-3
        exact = found[2][1]
        error, allowed = ((each - exact).abs().max() / exact.abs().max() for each in (found[0][1], found[1][1]))
        # In half precision not further from the exact gradient than autograd's, which rounds more often.
        assert error <= max(1e-6, 1.1 * allowed)


def test_a_pass_that_records_nothing_or_learns_the_weight_is_the_modules_own(monkeypatch):
    model = tiny_model("qwen3")
    norm, x = norms(model)[-1], torch.randn(3, 32)
    use_recorded_norms(model.requires_grad_(False))
    monkeypatch.setattr("mafrt.cpu.rms_norm._RmsNorm.apply", lambda *_: pytest.fail("recorded"))
    with torch.no_grad():
        norm(x.clone().requires_grad_())
    norm(x)
    norm.weight.requires_grad_()
    norm(x.requires_grad_()).sum().backward()
    assert norm.weight.grad is not None


def test_a_norm_that_computes_something_else_is_left_alone():
    class OtherRMSNorm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.eps = nn.Parameter(torch.ones(8), requires_grad=False), 1e-6

        def forward(self, x):
            return self.weight * x / x.abs().mean(-1, keepdim=True)

    assert use_recorded_norms(nn.Sequential(OtherRMSNorm(), nn.LayerNorm(8))) == 0


@pytest.mark.parametrize("kind", ["qwen3", "gemma3"])
def test_adapters_get_the_gradients_of_the_plain_norms(kind):
    base = tiny_base(kind)
    add_random_adapter(base, "a", 3, 5.0, ALL, seed=0)
    ids, onto = random_ids(3, 12), torch.randn(3, 12, 32)
    found = []
    for recorded in (True, False):
        for module in base.model.modules() if not recorded else ():
            if "RMSNorm" in type(module).__name__:
                module.__class__ = type(module).__mro__[2]
        (base.forward(ids, None, torch.tensor([0, 0, -1])) * onto).sum().backward()
        found.append([parameter.grad.clone() for parameter in base.adapter_parameters("a")])
        for parameter in base.adapter_parameters("a"):
            parameter.grad = None
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5 * float(theirs.abs().max()), rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_norm_with_a_gate_is_transformers_own_with_both_gradients(dtype):
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5RMSNormGated

    torch.manual_seed(0)
    ours, theirs = (Qwen3_5RMSNormGated(48).to(dtype).requires_grad_(False) for _ in range(2))
    for norm in (ours, theirs):
        norm.weight.copy_(torch.linspace(-2, 2, 48))
    assert use_recorded_norms(nn.Sequential(ours)) == 1
    x, gate, onto = (2 * torch.randn(70, 48).to(dtype) for _ in range(3))
    found = []
    for norm, precision in ((ours, dtype), (theirs, dtype), (deepcopy(theirs).float(), torch.float32)):
        leaves = [each.to(precision).requires_grad_() for each in (x, gate)]
        out = norm(*leaves)
        found.append([out.detach(), *torch.autograd.grad(out, leaves, onto.to(precision))])
    torch.testing.assert_close(found[0][0], found[1][0], atol=1e-6, rtol=4 * torch.finfo(dtype).eps)
    for own, autograd, exact in zip(*found, strict=True):
        error, allowed = (float((each - exact).abs().max() / exact.abs().max()) for each in (own, autograd))
        assert error <= max(1e-6, 1.1 * allowed)
    with torch.no_grad():
        assert torch.equal(ours(x, gate), found[0][0])


def test_a_norm_with_a_gate_of_another_shape_or_none_is_the_modules_own(monkeypatch):
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5RMSNormGated

    norm = Qwen3_5RMSNormGated(16).requires_grad_(False)
    use_recorded_norms(nn.Sequential(norm))
    monkeypatch.setattr("mafrt.cpu.rms_norm._GatedNorm.apply", lambda *_: pytest.fail("a kernel"))
    norm(torch.randn(3, 16), torch.randn(1, 16))
    with pytest.raises((TypeError, AttributeError)):
        norm(torch.randn(3, 16))
    norm.weight.requires_grad_()
    norm(torch.randn(3, 16), torch.randn(3, 16)).sum().backward()
    assert norm.weight.grad is not None


class GatedRMSNorm(nn.Module):
    """As in Qwen3.5's linear attention: it cannot be called with its input alone."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width), requires_grad=False), 1e-6

    def forward(self, x, gate):
        return x * torch.sigmoid(gate)


class RaisingRMSNorm(GatedRMSNorm):
    def forward(self, x):
        raise RuntimeError("expected four dimensions")


@pytest.mark.parametrize("kind", [GatedRMSNorm, RaisingRMSNorm])
def test_a_norm_that_the_probe_cannot_call_is_left_alone(kind):
    model = nn.Sequential(kind(8))
    assert use_recorded_norms(model) == 0 and type(model[0]) is kind
