"""Linear layers that read the same input (query, key and value; gate and up) with their adapters, as one operation.

The adapters' A of all layers are one product with the input, forward and backward, and the input's gradient is summed
by the matrix products themselves. The results are those of the layers one by one, up to the order of sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from mafrt.models.adapter_routing import Run
from mafrt.models.packed_weights import PackedWeights, packed_linear


class Frozen(NamedTuple):
    """A frozen linear layer."""

    weight: Tensor
    bias: Tensor | None


def linear_siblings(
    x: Tensor,
    layers: Sequence[Frozen],
    runs: Sequence[Run],
    pairs: Sequence[Tensor],
    packed: PackedWeights | None = None,
) -> tuple[Tensor, ...]:
    """`x W^T + b` plus the adapters of every layer: `[tokens, in]` -> `[tokens, out]` each.

    Args:
        x: the input that the layers share.
        layers: the frozen layers.
        runs: cover all tokens in order.
        pairs: A `[r, in]` and B `[out, r]` in turn, of all layers and adapters; they and `x` get gradients.
        packed: copies of the layers' weights; None: there are none.
    """
    return _LinearSiblings.apply(x, layers, runs, packed, *pairs)


def _downs(run: Run, pairs: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """`[sum of ranks, in]`: the scaled A of a run's layers."""
    return torch.cat([pairs[a] if scale == 1.0 else pairs[a] * scale for _, a, scale in run.pairs]).to(dtype)


def _frozen(x: Tensor, layers: Sequence[Frozen], packed: PackedWeights | None) -> list[Tensor]:
    """The layers' outputs without adapters."""
    weight = None if packed is None else packed.of(*(layer.weight for layer in layers))
    if weight is None:
        return [F.linear(x, layer.weight, layer.bias) for layer in layers]
    bias = None
    if any(layer.bias is not None for layer in layers):
        bias = torch.cat([x.new_zeros(len(w)) if b is None else b for w, b in layers])
    return list(packed_linear(x, weight, bias).split([len(layer.weight) for layer in layers], 1))


def _frozen_backward(grads: Sequence[Tensor], layers: Sequence[Frozen], packed: PackedWeights | None) -> Tensor:
    """The input's gradient through the frozen layers."""
    weight = None if packed is None else packed.of(*(layer.weight for layer in layers), transposed=True)
    if weight is not None:
        return packed_linear(grads[0] if len(grads) == 1 else torch.cat(list(grads), 1), weight)
    grad_x = torch.mm(grads[0], layers[0].weight)
    for layer, grad in zip(layers[1:], grads[1:], strict=True):
        grad_x.addmm_(grad, layer.weight)
    return grad_x


class _LinearSiblings(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        layers: Sequence[Frozen],
        runs: Sequence[Run],
        packed: PackedWeights | None,
        *pairs: Tensor,
    ) -> tuple[Tensor, ...]:
        outs = _frozen(x, layers, packed)
        inner = []
        for run in runs:
            if not run.pairs:
                continue
            part = x[run.start : run.stop]
            inner.append(torch.mm(_downs(run, pairs, x.dtype), part.t()))
            # One product for all siblings, then split: they read the same input, and narrow products are slow.
            own = inner[-1].split([len(pairs[a]) for _, a, _ in run.pairs])
            for (number, a, _), h in zip(run.pairs, own, strict=True):
                outs[number][run.start : run.stop].addmm_(h.t(), pairs[a + 1].to(x.dtype).t())
        ctx.save_for_backward(x, *inner, *pairs)
        ctx.layers, ctx.runs, ctx.packed = layers, runs, packed
        return tuple(outs)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, *rest = ctx.saved_tensors
        want_x, want = ctx.needs_input_grad[0], ctx.needs_input_grad[4:]
        inner, pairs = iter(rest[: len(rest) - len(want)]), rest[len(rest) - len(want) :]
        grad_x = _frozen_backward(grads, ctx.layers, ctx.packed) if want_x else None
        pair_grads: list[Tensor | None] = [None] * len(pairs)
        for run in ctx.runs:
            if not run.pairs:
                continue
            part = slice(run.start, run.stop)
            onto = [grads[number][part] for number, _, _ in run.pairs]
            across = [pairs[a + 1].to(x.dtype).t() @ own.t() for (_, a, _), own in zip(run.pairs, onto, strict=True)]
            ranks, both = [len(a) for a in across], torch.cat(across)
            if any(want[a] for _, a, _ in run.pairs):
                downs = torch.mm(both, x[part]).split(ranks)
                for (_, a, scale), down in zip(run.pairs, downs, strict=True):
                    _add(pair_grads, a, down * scale, pairs[a], want[a])
            for (_, a, _), kept, own in zip(run.pairs, next(inner).split(ranks), onto, strict=True):
                if want[a + 1]:
                    _add(pair_grads, a + 1, torch.mm(kept, own).t(), pairs[a + 1])
            if grad_x is not None:
                grad_x[part].addmm_(both.t(), _downs(run, pairs, x.dtype))
        return grad_x, None, None, None, *pair_grads


def _add(pair_grads: list[Tensor | None], place: int, grad: Tensor, like: Tensor, want: bool = True) -> None:
    """Add to the gradient of one tensor, in its own precision."""
    if want:
        # Summed in the parameter's precision, float32: sums over runs in bfloat16 would lose the small ones.
        before, grad = pair_grads[place], grad.to(like.dtype)
        pair_grads[place] = grad if before is None else before + grad
