"""A frozen linear layer with its adapters in few launches, forward and backward.

The adapters of all layers are laid out together, once a pass, and their gradients go back together. One layer's forward
pass is two products, a mask and a product that is added to the layer's output in place; its backward pass is five
products and a mask.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mafrt.models.adapter_routing import AdapterRouting


def serves(layer: Any) -> bool:
    """Whether the frozen layer is a plain one, whose weight stays where it is."""
    return type(layer.base_layer) is nn.Linear and not layer.context.sharded


class Together:
    """The adapters of all layers of a base, laid out once for a forward and backward pass."""

    def __init__(self, layers: Mapping[str, Any]) -> None:
        self.layers = layers

    def forget(self) -> None:
        """Nothing is kept between passes."""

    def of(self, layer: Any, routing: AdapterRouting, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """A `[R, in]` and B `[out, R]` of the batch's adapters in a layer, in the number format of its input."""
        if (self, dtype) not in routing.derived:
            routing.derived[self, dtype] = self._laid_out(routing, dtype)
        found: tuple[Tensor, Tensor] = routing.derived[self, dtype][layer]
        return found

    def _laid_out(self, routing: AdapterRouting, dtype: torch.dtype) -> dict[Any, tuple[Tensor, Tensor]]:
        owners, parts = [], list[Tensor]()
        for layer in self.layers.values():
            here = [layer.pairs[k] for k in routing.present if k in layer.pairs]
            if here and serves(layer):
                # Detached and not skipped: an adapter that does not learn acts all the same.
                learns = [routing.learns(k) for k in routing.present if k in layer.pairs]
                for side in (0, 1):
                    parts += [p[side] if learnt else p[side].detach() for p, learnt in zip(here, learns, strict=True)]
                owners.append((layer, len(here)))
        made = _LaidOut.apply(tuple(count for _, count in owners for _ in (0, 1)), dtype, *parts)
        return {layer: (made[2 * n], made[2 * n + 1]) for n, (layer, _) in enumerate(owners)}


class _LaidOut(torch.autograd.Function):
    """The A `[r, in]` and then the B `[out, r]` of each layer's adapters -> A `[R, in]` and B `[out, R]` of each."""

    @staticmethod
    def forward(ctx: Any, counts: Sequence[int], dtype: torch.dtype, *parts: Tensor) -> tuple[Tensor, ...]:
        ctx.counts, ctx.shapes, ctx.dtype = counts, [t.shape for t in parts], parts[0].dtype
        ctx.set_materialize_grads(False)  # layers that took no part are zeroed below, without zeros to be copied
        staged = _views(ctx.shapes, parts[0], dtype)
        # Cast and copied, many in a launch.
        torch._foreach_copy_(staged, list(parts))
        sides = _by(counts, staged)
        # The A of a layer follow one another as they are.
        return tuple(torch.cat(side, 1) if n % 2 and len(side) > 1 else _rows(side) for n, side in enumerate(sides))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        wanted = ctx.needs_input_grad[2:]
        known = next(g for g in grads if g is not None)
        # Float32, each in a place of its own, which becomes the parameter's gradient.
        places = _views(ctx.shapes, known, ctx.dtype)
        into, source = list[Tensor](), list[Tensor]()
        for number, (params, grad) in enumerate(zip(_by(ctx.counts, places), grads, strict=True)):
            axis = number % 2
            if grad is None:
                for place in params:
                    place.zero_()
            elif len(params) > 1 and axis and len({p.shape for p in params}) == 1:
                # The columns of all adapters in one launch; their places follow one another.
                whole = params[0].as_strided((len(params), *params[0].shape), (params[0].numel(), *params[0].stride()))
                whole.copy_(grad.unflatten(1, (len(params), -1)).transpose(0, 1))
            else:
                into += params
                source += grad.split([place.shape[axis] for place in params], axis)
        if into:
            torch._foreach_copy_(into, source)
        return (None, None, *(place if needed else None for place, needed in zip(places, wanted, strict=True)))


def _views(shapes: Sequence[torch.Size], like: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """Tensors of these shapes, one after another in one block of memory."""
    sizes = [shape.numel() for shape in shapes]
    flat = like.new_empty(sum(sizes), dtype=dtype)
    return [part.view(shape) for part, shape in zip(flat.split(sizes), shapes, strict=True)]


def _rows(parts: Sequence[Tensor]) -> Tensor:
    """Matrices that follow one another in memory, as one."""
    return parts[0].as_strided((sum(len(part) for part in parts), parts[0].shape[1]), parts[0].stride())


def _by(counts: Sequence[int], tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    found, at = [], 0
    for count in counts:
        found.append(list(tensors[at : at + count]))
        at += count
    return found


def adapted(layer: Any, x: Tensor, routing: AdapterRouting) -> Tensor:
    """`StackedLoRALinear.adapted` of a plain layer."""
    layout = tuple((k, layer.ranks[k], layer.scalings[k]) for k in routing.present if k in layer.pairs)
    if not layout:
        out: Tensor = layer.base_layer(x)
        return out
    if torch.is_grad_enabled():
        down, up = layer.faster.of(layer, routing, x.dtype)
    else:
        down, up = layer.stacked(routing, [k for k, _, _ in layout], x.dtype)
    mask = routing.mask(layout, x)
    weight, bias = layer.base_layer.weight, layer.base_layer.bias
    made: Tensor = _Adapted.apply(x, weight, bias, down, up, mask)
    return made


class _Adapted(torch.autograd.Function):
    """`W x + b + B (mask * A x)`; the frozen weight gets no gradient."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, down: Tensor, up: Tensor, mask: Tensor
    ) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        out = F.linear(flat, weight, bias)
        low = F.linear(flat, down)
        low.view(*mask.shape[:1], -1, mask.shape[-1]).mul_(mask)
        out.addmm_(low, up.t())
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(flat, weight, down, up, mask, low)
        # No view in autograd's eyes, since models may write into what a layer returns.
        made: Tensor = torch.ops.aten._unsafe_view(out, [*x.shape[:-1], out.shape[1]])
        return made

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, weight, down, up, mask, low = ctx.saved_tensors
        if grads[0] is None:  # no loss depends on it: it chose indices, as doge's mask does
            return (None,) * 6
        grad = grads[0].reshape(-1, weight.shape[0])
        grad_low = grad @ up
        grad_low.view(*mask.shape[:1], -1, mask.shape[-1]).mul_(mask)
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x = (grad @ weight).addmm_(grad_low, down).view(*grads[0].shape[:-1], -1)
        grad_down = grad_low.t() @ x if ctx.needs_input_grad[3] else None
        grad_up = grad.t() @ low if ctx.needs_input_grad[4] else None
        return grad_x, None, None, grad_down, grad_up, None
