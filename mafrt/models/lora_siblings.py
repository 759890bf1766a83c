"""Linear layers that read the same input (query, key and value; gate and up) with their adapters, as one operation.

The adapters' A of all layers are one product with the input, forward and backward, and the input's gradient is summed
by the matrix products themselves. The results are those of the layers one by one, up to the order of sums.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mafrt.kernels.low_rank import Joined
from mafrt.kernels.panels import Panels
from mafrt.models.adapter_routing import Run, Segment
from mafrt.models.frozen_layers import Frozen, bias_of, side_by_side, widths_of
from mafrt.models.kernel_siblings import by_kernels, has_kernels, recorded_by_kernels
from mafrt.models.onednn import few_rows, product
from mafrt.models.packed_weights import PackedWeights


def linear_siblings(
    x: Tensor,
    layers: Sequence[Frozen],
    runs: Sequence[Run],
    pairs: Sequence[Tensor],
    joined: Callable[[], Mapping[int, Joined]],
    packed: PackedWeights | None = None,
) -> tuple[Tensor, ...]:
    """`x W^T + b` plus the adapters of every layer: `[..., in]` -> `[..., out]` each.

    Args:
        x: the input that the layers share.
        layers: the frozen layers.
        runs: cover all tokens in order, which are all dimensions of `x` but the last.
        pairs: A `[r, in]` and B `[out, r]` in turn, of all layers and adapters; they and `x` get gradients.
        joined: gives the same weights of each adapter that targets any of the layers; asked where kernels need them.
        packed: copies of the layers' weights; None: there are none.
    """
    if packed is not None and has_kernels(x):
        weight = packed.of(*(layer.weight for layer in layers))
        if weight is not None:
            return recorded_by_kernels(x, layers, runs, joined(), packed, weight, pairs)
    outs = _LinearSiblings.apply(x.reshape(-1, x.shape[-1]), layers, runs, packed, *pairs)
    return tuple(out.view(*x.shape[:-1], -1) for out in outs)


def fixed_siblings(
    x: Tensor,
    layers: Sequence[Frozen],
    segments: Sequence[Segment],
    joined: Mapping[int, Joined],
    weight: Tensor | Panels,
) -> tuple[Tensor, ...]:
    """As `linear_siblings` where nothing is recorded, from weights that are kept joined until they change.

    Args:
        x: `[..., in]`.
        layers: the frozen layers.
        segments: cover all tokens in order.
        joined: of each adapter that targets any of the layers.
        weight: the layers' packed weights.
    """
    if has_kernels(x):
        return by_kernels(x, layers, segments, joined, weight)
    # One product for all layers, zeros included: in bfloat16 its launch costs more than these.
    flat = x.reshape(-1, x.shape[-1])
    out = product(flat, weight, bias_of(flat, layers))
    for k, start, stop in segments:
        if k in joined:
            out[start:stop].addmm_(few_rows(joined[k].down, flat[start:stop].t()).t(), joined[k].up)
    return out.view(*x.shape[:-1], -1).split(widths_of(layers), -1)


def _downs(run: Run, pairs: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """`[sum of ranks, in]`: the A of a run's layers."""
    downs = [pairs[a] for _, a, _ in run.pairs]
    return _as(downs[0] if len(downs) == 1 else torch.cat(downs), dtype)


def _as(t: Tensor, dtype: torch.dtype) -> Tensor:
    return t if t.dtype == dtype else t.to(dtype)


def _frozen(x: Tensor, layers: Sequence[Frozen], weight: Tensor | Panels | None) -> list[Tensor]:
    """The layers' outputs without adapters; `weight`: all of them, packed."""
    if weight is None:
        return [product(x, *layer) for layer in layers]
    return list(product(x, weight, bias_of(x, layers)).split(widths_of(layers), 1))


def _frozen_backward(grads: Sequence[Tensor], layers: Sequence[Frozen], weight: Tensor | Panels | None) -> Tensor:
    """The input's gradient through the frozen layers; `weight`: all of them, transposed and packed."""
    if weight is not None:
        return product(side_by_side(grads), weight)
    grad_x = None
    for layer, grad in zip(layers, grads, strict=True):
        grad_x = product(grad, layer.weight.t(), None, grad_x)
    assert grad_x is not None  # there is a layer
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
        weight = None if packed is None else packed.of(*(layer.weight for layer in layers))
        # Cut once for all runs: there are as many runs as agents, and cutting piece by piece takes longer.
        sizes = [run.stop - run.start for run in runs]
        tokens = x.split(sizes)
        # One product for all siblings: they read the same input, and narrow products are slow.
        inner = [
            few_rows(_downs(run, pairs, x.dtype), own.t()) for run, own in zip(runs, tokens, strict=True) if run.pairs
        ]
        outs = _frozen(x, layers, weight)
        for run, h in zip([run for run in runs if run.pairs], inner, strict=True):
            own = h.split([len(pairs[a]) for _, a, _ in run.pairs])
            for (number, a, scale), part in zip(run.pairs, own, strict=True):
                target = outs[number][run.start : run.stop]
                target.addmm_(part.t(), _as(pairs[a + 1], x.dtype).t(), alpha=scale)
        ctx.save_for_backward(x, *inner, *pairs)
        ctx.layers, ctx.runs, ctx.packed = layers, runs, packed
        return tuple(outs)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, *rest = ctx.saved_tensors
        want_x, want = ctx.needs_input_grad[0], ctx.needs_input_grad[4:]
        inner, pairs = iter(rest[: len(rest) - len(want)]), rest[len(rest) - len(want) :]
        pair_grads: list[Tensor | None] = [None] * len(pairs)
        sizes = [run.stop - run.start for run in ctx.runs]
        tokens, onto = x.split(sizes), [grad.split(sizes) for grad in grads]
        low: list[tuple[Run, Tensor, Tensor]] = []
        for place, run in enumerate(ctx.runs):
            if not run.pairs:
                continue
            across = [
                few_rows(_as(pairs[a + 1], x.dtype).t(), onto[number][place].t(), scale)
                for number, a, scale in run.pairs
            ]
            ranks, both = [len(a) for a in across], across[0] if len(across) == 1 else torch.cat(across)
            if any(want[a] for _, a, _ in run.pairs):
                downs = few_rows(both, tokens[place]).split(ranks)
                for (_, a, _), down in zip(run.pairs, downs, strict=True):
                    _add(pair_grads, a, down, pairs[a], want[a])
            for (number, a, scale), kept in zip(run.pairs, next(inner).split(ranks), strict=True):
                if want[a + 1]:
                    _add(pair_grads, a + 1, few_rows(kept, onto[number][place], scale).t(), pairs[a + 1])
            low.append((run, both, _downs(run, pairs, x.dtype)))
        return _grad_x(grads, low, ctx) if want_x else None, None, None, None, *pair_grads


def _grad_x(grads: Sequence[Tensor], low: Sequence[tuple[Run, Tensor, Tensor]], ctx: Any) -> Tensor:
    """The input's gradient through the frozen layers and the adapters.

    `low` has of each run B^T g `[R, tokens]` and A `[R, in]`.
    """
    frozen = [layer.weight for layer in ctx.layers]
    weight = None if ctx.packed is None else ctx.packed.of(*frozen, transposed=True)
    grad_x = _frozen_backward(grads, ctx.layers, weight)
    for run, both, downs in low:
        grad_x[run.start : run.stop].addmm_(both.t(), downs)
    return grad_x


def _add(pair_grads: list[Tensor | None], place: int, grad: Tensor, like: Tensor, want: bool = True) -> None:
    """Add to the gradient of one tensor, in its own precision."""
    if want:
        # Summed in the parameter's precision, float32: sums over runs in bfloat16 would lose the small ones.
        before, grad = pair_grads[place], _as(grad, like.dtype)
        pair_grads[place] = grad if before is None else before + grad
