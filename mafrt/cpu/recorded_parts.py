"""SwiGLU and rotary embeddings of a frozen model, each one operation forward and one backward.

Autograd keeps the activation of gate besides gate, up and the product, and goes through a rotary embedding in seven
operations that each pass over memory. The derivatives need less:

    y = silu(g) u   =>   d g = u silu'(g) d y,   d u = silu(g) d y
    y = R x         =>   d x = R^T d y

By the kernels in C (`mafrt.cpu.learn_rows`) each is one pass over memory with one rounding. A pass that records nothing
is the module's own.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from types import FunctionType, SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mafrt.cpu import learn_rows

ROTARY = "apply_rotary_pos_emb"
"""the function that attention modules of transformers call"""


def use_recorded_mlps(model: nn.Module) -> int:
    """Give MLPs that compute down(silu(gate(x)) * up(x)) a SwiGLU of one operation; returns how many were found."""
    found = 0
    for module in model.modules():
        if not isinstance(module, _Recorded) and _is_swiglu(module):
            kind = type(module)
            module.__class__ = type(kind.__name__, (_RecordedMlp, kind), {})
            found += 1
    return found


def use_recorded_rotary(model: nn.Module) -> int:
    """Give attention modules a rotary embedding of one operation; returns how many were found.

    Their class becomes one of the same name whose forward is the same code, with another function behind the name of
    the embedding's: nothing changes for other models of the process.
    """
    found = 0
    for module in model.modules():
        kind: Any = type(module)
        recorded = None if isinstance(module, _Recorded) else _with_rotary(kind)
        if recorded is not None:
            module.__class__ = recorded
            found += 1
    return found


class _Recorded:
    """Marks classes that were made here."""


class _RecordedMlp(_Recorded, nn.Module):
    gate_proj: nn.Module
    up_proj: nn.Module
    down_proj: nn.Module

    def forward(self, x: Tensor, *more: Any, **words: Any) -> Tensor:
        if more or words or not torch.is_grad_enabled():
            return cast(Tensor, super().forward(x, *more, **words))
        gate, up = self.gate_proj(x), self.up_proj(x)
        records = (gate.requires_grad or up.requires_grad) and learn_rows.serves(gate, up)
        return cast(Tensor, self.down_proj(_SwiGlu.apply(gate, up) if records else F.silu(gate) * up))


def _is_swiglu(module: nn.Module) -> bool:
    kind: Any = type(module)
    parts = dict(module.named_children())
    if not {"gate_proj", "up_proj", "down_proj", "act_fn"} <= parts.keys():
        return False
    x = torch.linspace(-4.0, 4.0, 9)
    return torch.equal(parts["act_fn"](x), F.silu(x)) and _mlp_form(kind)


@cache
def _mlp_form(kind: Any) -> bool:
    """Whether a class of MLPs computes down(silu(gate(x)) * up(x)), tried with small matrices in place of its own."""
    draw = torch.Generator().manual_seed(0)
    gate, up, down = (torch.randn(shape, generator=draw) for shape in ((4, 6), (4, 6), (6, 4)))
    x = torch.randn(3, 4, generator=draw)
    stand_in = SimpleNamespace(
        gate_proj=lambda t: t @ gate, up_proj=lambda t: t @ up, down_proj=lambda t: t @ down, act_fn=F.silu
    )
    try:
        found = kind.forward(stand_in, x)
    except Exception:  # whatever another form needs is not there
        return False
    return isinstance(found, Tensor) and torch.equal(found, (F.silu(x @ gate) * (x @ up)) @ down)


class _SwiGlu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return learn_rows.swiglu(gate, up)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        gate, up = ctx.saved_tensors
        return learn_rows.swiglu_backward(gate, up, grads[0].to(gate.dtype))


@cache
def _with_rotary(kind: Any) -> type[nn.Module] | None:
    """The class with a recorded embedding; None where it has none, or one that computes something else."""
    forward = kind.__dict__.get("forward")
    if not isinstance(forward, FunctionType) or ROTARY not in forward.__code__.co_names:
        return None
    theirs = forward.__globals__.get(ROTARY)
    if theirs is None or not _rotates_halves(theirs):
        return None

    def rotary(*args: Any, **kwargs: Any) -> Any:
        # Some models call it in other ways, too: for queries alone, or by names.
        if kwargs or len(args) != 4 or not _suits(*args):
            return theirs(*args, **kwargs)
        return _Rotary.apply(*args)

    recorded = FunctionType(
        forward.__code__,
        {**forward.__globals__, ROTARY: rotary},
        forward.__name__,
        forward.__defaults__,
        forward.__closure__,
    )
    recorded.__kwdefaults__ = forward.__kwdefaults__
    return type(kind.__name__, (_Recorded, kind), {"forward": recorded, "__module__": kind.__module__})


def _suits(q: Tensor, k: Tensor, cosine: Tensor, sine: Tensor) -> bool:
    """Whether these are one sequence whose heads are rotated as a whole, and a gradient goes back through them."""
    if not torch.is_grad_enabled() or not (q.requires_grad or k.requires_grad) or q.dim() != 4 or len(q) != 1:
        return False
    size, tokens = q.shape[3], q.shape[2]
    if size % 2 or k.shape[2:] != q.shape[2:] or len(k) != 1 or cosine.shape != (1, tokens, size):
        return False
    return sine.shape == cosine.shape and learn_rows.serves(q, k, cosine, sine)


def _rotates_halves(theirs: Callable[..., Any]) -> bool:
    draw = torch.Generator().manual_seed(0)
    q, k = torch.randn(1, 3, 5, 8, generator=draw), torch.randn(1, 2, 5, 8, generator=draw)
    cosine, sine = torch.randn(2, 1, 5, 8, generator=draw).unbind()
    try:
        found = theirs(q, k, cosine, sine)
        return all(
            torch.allclose(each, x * cosine + torch.cat((-x[..., 4:], x[..., :4]), -1) * sine, atol=1e-6)
            for each, x in zip(found, (q, k), strict=True)
        )
    except Exception:  # embeddings with other arguments
        return False


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, cosine: Tensor, sine: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(cosine, sine)
        q, k = (learn_rows.rotary(t[0], cosine[0], sine[0]).unsqueeze(0) for t in (q, k))
        return q, k

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        cosine, sine = ctx.saved_tensors
        dq, dk = (learn_rows.rotary(t[0], cosine[0], sine[0], backward=True).unsqueeze(0) for t in grads)
        return dq, dk, None, None
