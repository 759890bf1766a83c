"""Linear layers that read the same input (query, key and value; gate and up) with their adapters, as one operation.

The adapters' A of all layers are one product with the input, forward and backward, and the input's gradient is summed
by the matrix products themselves. The results are those of the layers one by one, up to the order of sums.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mafrt.kernels.panels import LowRank, Panels, in_panels
from mafrt.models.adapter_routing import Run, Segment
from mafrt.models.onednn import few_rows, product
from mafrt.models.packed_weights import PackedWeights


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


@dataclass
class Joined:
    """One adapter's weights for layers that share their input."""

    down: Tensor
    """`[R, in]`: A of all layers, one below the other"""
    up: Tensor
    """`[R, out of all]`: B of each, scaled and transposed, as a block of its own among zeros"""
    _panels: Tensor | None = None

    def up_panels(self) -> Tensor:
        """`up` in panels, made once."""
        if self._panels is None:
            self._panels = in_panels(self.up)
        return self._panels


def join(pairs: Sequence[tuple[Tensor, Tensor, float] | None], widths: Sequence[int], dtype: torch.dtype) -> Joined:
    """From A `[r, in]`, B `[out, r]` and the scaling of each layer; None: the adapter does not target it."""
    targeted = [pair for pair in pairs if pair is not None]
    down = torch.cat([a for a, _, _ in targeted]).to(dtype)
    up = torch.zeros(len(down), sum(widths), dtype=dtype, device=down.device)
    row = column = 0
    for pair, width in zip(pairs, widths, strict=True):
        if pair is not None:
            rank = len(pair[0])
            up[row : row + rank, column : column + width] = pair[1].t() * pair[2]
            row += rank
        column += width
    return Joined(down, up)


def fixed_siblings(
    x: Tensor,
    layers: Sequence[Frozen],
    segments: Sequence[Segment],
    joined: Mapping[int, Joined],
    weight: Tensor | Panels,
) -> tuple[Tensor, ...]:
    """As `linear_siblings` where nothing is recorded, from weights that are kept joined until they change.

    Args:
        x: `[tokens, in]`.
        layers: the frozen layers.
        segments: cover all tokens in order.
        joined: of each adapter that targets any of the layers.
        weight: the layers' packed weights.
    """
    widths = [len(layer.weight) for layer in layers]
    # One product for all layers, zeros included: in bfloat16 its launch costs more than these.
    inner = [
        (start, stop, few_rows(joined[k].down, x[start:stop].t()), joined[k])
        for k, start, stop in segments
        if k in joined
    ]
    if isinstance(weight, Panels) and _long(x, segments):
        low = [LowRank(start, stop, h, own.up_panels()) for start, stop, h, own in inner]
        return weight.product(x, _bias(x, layers), low=low).split(widths, 1)
    out = product(x, weight, _bias(x, layers))
    for start, stop, h, own in inner:
        out[start:stop].addmm_(h.t(), own.up)
    return out.split(widths, 1)


def _long(x: Tensor, runs: Sequence[object]) -> bool:
    """Whether the runs of tokens are long enough for the adapters to be a part of the product in panels, which takes
    eight rows at a time."""
    return len(x) >= 8 * len(runs)


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
    return list(product(x, weight, _bias(x, layers)).split([len(layer.weight) for layer in layers], 1))


def _bias(x: Tensor, layers: Sequence[Frozen]) -> Tensor | None:
    """Of all layers, with zeros for those without one; None: none has one."""
    if all(layer.bias is None for layer in layers):
        return None
    return torch.cat([x.new_zeros(len(w)) if b is None else b for w, b in layers])


def _side_by_side(parts: Sequence[Tensor]) -> Tensor:
    """Matrices as one, `[tokens, sum of widths]`: a view where they are parts of one matrix, otherwise a copy."""
    first, width, at = parts[0], sum(part.shape[1] for part in parts), parts[0].storage_offset()
    for part in parts:
        own = part.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        if not own or part.stride() != (width, 1) or part.storage_offset() != at:
            return first if len(parts) == 1 else torch.cat(list(parts), 1)
        at += part.shape[1]
    return first.as_strided((len(first), width), (width, 1))


def _frozen_backward(grads: Sequence[Tensor], layers: Sequence[Frozen], weight: Tensor | Panels | None) -> Tensor:
    """The input's gradient through the frozen layers; `weight`: all of them, transposed and packed."""
    if weight is not None:
        return product(_side_by_side(grads), weight)
    grad_x = None
    for layer, grad in zip(layers, grads, strict=True):
        grad_x = product(grad, layer.weight.t(), None, grad_x)
    assert grad_x is not None  # there is a layer
    return grad_x


def _ups(run: Run, pairs: Sequence[Tensor], widths: Sequence[int], like: Tensor) -> Tensor:
    """`[sum of ranks, out of all layers]`: the B of a run's layers, scaled, as blocks among zeros."""
    ups = like.new_zeros(sum(len(pairs[a]) for _, a, _ in run.pairs), sum(widths))
    row = 0
    for number, a, scale in run.pairs:
        column, rank = sum(widths[:number]), len(pairs[a])
        torch.mul(pairs[a + 1].t(), scale, out=ups[row : row + rank, column : column + widths[number]])
        row += rank
    return ups


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
        busy, widths = [run for run in runs if run.pairs], [len(layer.weight) for layer in layers]
        if isinstance(weight, Panels) and _long(x, runs):
            low = [
                LowRank(run.start, run.stop, h, in_panels(_ups(run, pairs, widths, x)))
                for run, h in zip(busy, inner, strict=True)
            ]
            outs = list(weight.product(x, _bias(x, layers), low=low).split(widths, 1))
        else:
            outs = _frozen(x, layers, weight)
            for run, h in zip(busy, inner, strict=True):
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
    if isinstance(weight, Panels) and _long(grads[0], ctx.runs):
        parts = [LowRank(run.start, run.stop, both, in_panels(downs)) for run, both, downs in low]
        return weight.product(_side_by_side(grads), low=parts)
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
