"""Matrix products of a CPU by oneDNN, with weights as they are."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from mafrt.cpu import onednn
from mafrt.cpu.onednn import product, serves

DTYPES = [torch.float32, torch.bfloat16, torch.float64]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 3, 70])
def test_products_are_those_of_torch(dtype, rows):
    torch.manual_seed(0)
    x, weight, bias, added = (torch.randn(*shape).to(dtype) for shape in ((rows, 24), (40, 24), (40,), (rows, 40)))
    tolerance = {"atol": 1e-5, "rtol": 1e-5} if dtype != torch.bfloat16 else {"atol": 0.1, "rtol": 0.02}
    before = added.clone()
    for given, shift, more in ((None, None, 0), (bias, None, bias), (None, added, added), (bias, added, bias + added)):
        expected = functional.linear(x, weight) + more
        torch.testing.assert_close(product(x, weight, given, shift), expected, **tolerance)
    torch.testing.assert_close(product(added, weight.t()), added @ weight, **tolerance)
    assert torch.equal(added, before)


def test_weights_whose_rows_lie_apart_are_left_to_torch():
    """oneDNN has no fast kernel for them."""
    weight = torch.randn(40, 60)
    assert serves(weight) == serves(weight.t()) == onednn.supported(torch.float32)
    part = weight[:, :24]
    assert not serves(part) and not serves(part.t()) and not serves(weight.double()) and not serves(weight.bfloat16())
    x = torch.randn(5, 24)
    torch.testing.assert_close(product(x, part), x @ part.t())


def test_without_the_operators_torch_computes(monkeypatch):
    monkeypatch.setattr(onednn, "supported", lambda dtype: False)
    x, weight = torch.randn(5, 24), torch.randn(40, 24)
    assert not serves(weight)
    assert torch.equal(product(x, weight), functional.linear(x, weight))
