"""RMS norms of a frozen model, with or without a gate, whose backward pass is one operation.

Autograd goes back through the six operations of such a norm one by one, each a pass over memory, and keeps a float32
copy of a half-precision input. The derivative needs the input and a row's factor r = 1 / sqrt(mean(x^2) + eps) only:

    y = x r,   out = w y   =>   d x = r (w g - y mean(w g y))

By the kernels in C (`mafrt.cpu.learn_rows`) both are one pass over memory that rounds where transformers does; only the
sum of the squares has another order. A pass that records nothing is the module's own.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from mafrt.cpu import learn_rows
from mafrt.models.norm_forms import form_of


def use_recorded_norms(model: nn.Module) -> int:
    """Give the RMS norms of a frozen model a backward pass of their own; returns how many were found.

    Known are the plain one, Gemma's with 1 + w, and one that is multiplied by the SiLU of a gate.
    """
    found = 0
    for module in model.modules():
        form = None if isinstance(module, (_Plain, _Gated)) else form_of(module)
        if form is not None:
            # A class of the same name under the module's own: who asks for its class or its weights finds them.
            kind, ours = type(module), _Gated if form.gated else _Plain
            module.__class__ = type(kind.__name__, (ours, kind), {"eps_of": form.eps, "plus_one": form.plus_one})
            found += 1
    return found


class _Plain(nn.Module):
    weight: Tensor
    eps_of: float
    plus_one: bool

    def forward(self, x: Tensor, *more: Any, **words: Any) -> Tensor:
        if more or words:
            return cast(Tensor, super().forward(x, *more, **words))
        records = torch.is_grad_enabled() and x.requires_grad and not self.weight.requires_grad
        if records and learn_rows.serves(x, self.weight):
            return cast(Tensor, _RmsNorm.apply(x, self.weight, self.eps_of, self.plus_one))
        return cast(Tensor, super().forward(x))


class _Gated(nn.Module):
    weight: Tensor
    eps_of: float

    def forward(self, x: Tensor, gate: Any = None, *more: Any, **words: Any) -> Tensor:
        known = isinstance(gate, Tensor) and gate.shape == x.shape and not (more or words)
        if not known or self.weight.requires_grad or not learn_rows.serves(x, gate, self.weight):
            return cast(Tensor, super().forward(x, gate, *more, **words))
        # A pass that records nothing, too: in decoding its seven operations are a tenth of such a layer.
        return cast(Tensor, _GatedNorm.apply(x, gate, self.weight, self.eps_of))


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, plus_one: bool) -> Tensor:
        out, r = learn_rows.norm(x, weight, eps, plus_one)
        ctx.save_for_backward(x, weight, r)
        ctx.plus_one = plus_one
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, weight, r = ctx.saved_tensors
        return learn_rows.norm_backward(x, weight, r, grads[0].to(x.dtype), ctx.plus_one), None, None, None


class _GatedNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
        out, r = learn_rows.gated_norm(x, gate, weight, eps)
        ctx.save_for_backward(x, gate, weight, r)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, gate, weight, r = ctx.saved_tensors
        return *learn_rows.gated_norm_backward(x, gate, weight, r, grads[0].to(x.dtype)), None, None
