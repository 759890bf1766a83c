"""Linear layers that read the same input, with their adapters, by the kernels in C (`mafrt.kernels.low_rank`).

Forward, the adapters are a part of the product with the frozen weights; backward, one pass over the outputs' gradient
gives all of theirs, and the inputs' gradient is again one product. The results are those of the layers one by one, up
to the order of sums and, in bfloat16, with fewer roundings.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mafrt.kernels.low_rank import Joined, LowRank, Segments, columns_for, serves
from mafrt.kernels.panels import Panels
from mafrt.models.adapter_routing import Run, Segment
from mafrt.models.frozen_layers import Frozen, bias_of, side_by_side, widths_of
from mafrt.models.onednn import product
from mafrt.models.packed_weights import PackedWeights


def has_kernels(x: Tensor) -> bool:
    """Whether the kernels take such inputs."""
    return serves(x.dtype, x.device.type)


def by_kernels(
    x: Tensor,
    layers: Sequence[Frozen],
    segments: Sequence[Run | Segment],
    joined: Mapping[int, Joined],
    weight: Tensor | Panels,
) -> tuple[Tensor, ...]:
    """The layers' outputs; nothing is recorded. Arguments as of `lora_siblings.fixed_siblings`."""
    return _outputs(x, layers, segments, joined, weight)[0]


def recorded_by_kernels(
    x: Tensor,
    layers: Sequence[Frozen],
    runs: Sequence[Run],
    joined: Mapping[int, Joined],
    packed: PackedWeights,
    weight: Tensor | Panels,
    pairs: Sequence[Tensor],
) -> tuple[Tensor, ...]:
    """The layers' outputs, with gradients for `x` and `pairs`. Arguments as of `lora_siblings.linear_siblings`.

    `weight`: that of the layers in `packed`.
    """
    return _KernelSiblings.apply(x, layers, runs, joined, packed, weight, *pairs)


def _outputs(
    x: Tensor,
    layers: Sequence[Frozen],
    segments: Sequence[Run | Segment],
    joined: Mapping[int, Joined],
    weight: Tensor | Panels,
) -> tuple[tuple[Tensor, ...], LowRank | None]:
    """The layers' outputs, and the table of the adapters that were added."""
    widths, flat = widths_of(layers), x.reshape(-1, x.shape[-1])
    low = _low_rank(flat, segments, joined, widths, weight)
    out = product(flat, weight, bias_of(flat, layers), low=low)
    return out.view(*x.shape[:-1], -1).split(widths, -1), low


def _low_rank(
    x: Tensor,
    segments: Sequence[Run | Segment],
    joined: Mapping[int, Joined],
    widths: Sequence[int],
    weight: Tensor | Panels,
) -> LowRank | None:
    """The table of the adapters, with room for `x A^T`; None: no token has an adapter here."""
    adapters = [joined.get(segment.adapter) for segment in segments]
    if not any(adapters):
        return None
    numbers = x.new_empty(len(x), columns_for(adapters))
    return LowRank(_rows(segments), adapters, widths, numbers, panels=isinstance(weight, Panels))


def _rows(segments: Sequence[Run | Segment]) -> Segments:
    return Segments([segment.stop for segment in segments], [segment.adapter for segment in segments])


class _KernelSiblings(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        layers: Sequence[Frozen],
        runs: Sequence[Run],
        joined: Mapping[int, Joined],
        packed: PackedWeights,
        weight: Tensor | Panels,
        *pairs: Tensor,
    ) -> tuple[Tensor, ...]:
        outs, low = _outputs(x, layers, runs, joined, weight)
        # Given to autograd, which frees them behind the backward pass; the table lives as long as the graph.
        ctx.save_for_backward(x, None if low is None else low.release())
        ctx.layers, ctx.runs, ctx.low, ctx.packed = layers, runs, low, packed
        return outs

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (given, numbers), low = ctx.saved_tensors, ctx.low
        x = given.reshape(-1, given.shape[-1])
        needed = ctx.needs_input_grad
        want_x, want = needed[0], needed[6:]
        grad, back = side_by_side([grad.reshape(-1, grad.shape[-1]) for grad in grads]), None
        found: list[Tensor | None] = [None] * len(want)
        weight = ctx.packed.of(*(layer.weight for layer in ctx.layers), transposed=True)
        if low is not None:
            targets = [run.pairs if any(want[a] or want[a + 1] for _, a, _ in run.pairs) else None for run in ctx.runs]
            # They are float32; autograd gives them another format where somebody has given an adapter one.
            onto, found = low.backward(grad, x, numbers, targets, len(want))
            if want_x:
                each = [None if own is None else own.back for own in low.adapters]
                back = LowRank(low.segments, each, [x.shape[1]], onto, given=True, panels=isinstance(weight, Panels))
        grad_x = product(grad, weight, low=back).view(given.shape) if want_x else None
        return grad_x, None, None, None, None, None, *found
