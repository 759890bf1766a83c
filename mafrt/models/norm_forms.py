"""What the RMS norms of a model compute, found out by trying: families name them and write them in many ways."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class NormForm:
    """Of a norm over the last axis."""

    eps: float
    plus_one: bool
    """whether the factors are 1 + w, as Gemma's, and not w"""
    gated: bool
    """whether it takes a gate, and is multiplied by its SiLU"""


def form_of(module: nn.Module) -> NormForm | None:
    """The form that a module computes, bit by bit, for a random input; None for any other, or for no norm at all.

    A norm is one whose class says so in its name.
    """
    weight = getattr(module, "weight", None)
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    # A buffer under that name, as Falcon Mamba's, is used for nothing, and may have another length than the input.
    if "RMSNorm" not in type(module).__name__ or not isinstance(weight, nn.Parameter) or weight.dim() != 1:
        return None
    if not isinstance(eps, float) or weight.is_meta:
        return None
    generator = torch.Generator().manual_seed(0)
    x, gate = (torch.randn(4, len(weight), generator=generator).to(weight.device, weight.dtype) for _ in range(2))
    for form in (NormForm(eps, False, False), NormForm(eps, True, False), NormForm(eps, False, True)):
        # A norm that wants more than its input, such as a gate, or fails otherwise, is of another form.
        try:
            with torch.no_grad():
                expected = module(x, gate) if form.gated else module(x)
        except Exception as error:
            log.debug("%s: %s", type(module).__name__, error)
            continue
        if torch.equal(computed(form, weight, x, gate), expected):
            return form
    return None


def computed(form: NormForm, weight: Tensor, x: Tensor, gate: Tensor) -> Tensor:
    """As transformers writes it."""
    exact = x.float()
    y = exact * torch.rsqrt(exact.pow(2).mean(-1, keepdim=True) + form.eps)
    if form.plus_one:
        return (y * (1.0 + weight.float())).type_as(x)
    y = weight * y.to(x.dtype)
    return (y * functional.silu(gate.float())).to(x.dtype) if form.gated else y
