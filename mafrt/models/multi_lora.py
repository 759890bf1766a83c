"""Linear layers that hold every agent's LoRA pair, and the routing that says which pair acts on which token.

One batch may mix rows of different agents, of the reference policy and of the critic (both: no adapter). One
`AdapterRouting` per forward is shared by all layers; each `StackedLoRALinear` turns it into a few *pieces*:

- *grouped*: a run of tokens of one adapter is one piece, `[tokens, r_k]` wide. The work does not grow with the number
  of adapters K, but each piece costs its own small matrix products. For training and long prompts.
- *wide*: all tokens are one piece with the concatenated weights `[sum r_k, in]`, and a mask that keeps each token's
  own block. Always two products, but `sum r_k` wide. For decoding, where a product costs less than its launch.

Both give `y = W x + b + scaling_k B_k A_k x`, LoRA as of Hu et al. 2021 (arXiv:2106.09685), equation 3.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mafrt.kernels.low_rank import Joined, join
from mafrt.models.adapter_routing import AdapterRouting, Layout, LoraContext, Piece, runs_of
from mafrt.models.frozen_layers import Frozen
from mafrt.models.lora_siblings import fixed_siblings, linear_siblings
from mafrt.models.onednn import few_rows, product

# Inner activations are kept as [r, tokens]: with r of 8 or so as the long side of a product (`x @ A.T`), CPU
# libraries are two to five times slower than with r as the short one (`A @ x.T`).


def _inner(a: Tensor, x: Tensor, piece: Piece) -> Tensor:
    """`scale * mask * a x^T`, `[r, tokens]`: with A forward, with B^T and the gradient backward."""
    h = few_rows(a, x.t(), piece.scale)
    if piece.mask is not None:
        h.view(h.shape[0], piece.mask.shape[1], -1).mul_(piece.mask)
    return h


def _add_adapters(x: Tensor, out: Tensor, pieces: Sequence[Piece], pairs: Sequence[Tensor]) -> list[Tensor]:
    """Add the adapters to `out` `[tokens, out]`; returns the inner activations of each piece that has an adapter.

    `pairs` is A_0, B_0, A_1, B_1, ...
    """
    inner = []
    for piece in pieces:
        if piece.slot >= 0:
            h = _inner(pairs[2 * piece.slot], x[piece.start : piece.stop], piece)
            out[piece.start : piece.stop].addmm_(h.t(), pairs[2 * piece.slot + 1].t())
            inner.append(h)
    return inner


def _backward(
    grad: Tensor,
    grad_x: Tensor | None,
    x: Tensor,
    pieces: Sequence[Piece],
    inner: Sequence[Tensor],
    pairs: Sequence[Tensor],
    want: Sequence[bool],
) -> list[Tensor | None]:
    """Add the adapters' part to `grad_x`; returns the gradients of `pairs` that are wanted."""
    grads: list[Tensor | None] = [None] * len(pairs)
    rest = iter(inner)
    for piece in pieces:
        if piece.slot < 0:
            continue
        g, a, b = grad[piece.start : piece.stop], 2 * piece.slot, 2 * piece.slot + 1
        kept = next(rest)
        if want[a] or grad_x is not None:
            h = _inner(pairs[b].t(), g, piece)
            if want[a]:
                grads[a] = _accumulate(grads[a], h, x[piece.start : piece.stop])
            if grad_x is not None:
                grad_x[piece.start : piece.stop].addmm_(h.t(), pairs[a])
        if want[b]:
            grads[b] = _accumulate(grads[b], kept, g)
    return [g.t() if i % 2 and g is not None else g for i, g in enumerate(grads)]


def _accumulate(total: Tensor | None, left: Tensor, right: Tensor) -> Tensor:
    return few_rows(left, right) if total is None else total.addmm_(left, right)


def _permuted(
    x: Tensor, out: Tensor, order: Tensor, pieces: Sequence[Piece], pairs: Sequence[Tensor]
) -> tuple[Tensor, list[Tensor]]:
    """Add the adapters of the tokens at `order` to `out` in place; returns those tokens and their activations."""
    x = x.index_select(0, order)
    delta = x.new_zeros(x.shape[0], out.shape[1])
    inner = _add_adapters(x, delta, pieces, pairs)
    out.index_add_(0, order, delta)
    return x, inner


class _LoraLinear(torch.autograd.Function):
    """`x W^T + b + adapters`, or the adapters alone where `weight` is None; gradients for x and the adapters only.

    One node instead of some ten per adapter: no gradient for the frozen weight, no temporaries of the output's size,
    and the adapters' part of the input gradient is accumulated by the matrix product itself.
    """

    @staticmethod
    def forward(ctx, x, weight, bias, width, order, pieces, *params):
        pairs = _as(params, x.dtype)
        out = x.new_zeros(x.shape[0], width) if weight is None else product(x, weight, bias)
        if order is not None:
            x, inner = _permuted(x, out, order, pieces, pairs)
        else:
            inner = _add_adapters(x, out, pieces, pairs)
        ctx.save_for_backward(x, weight, order, *inner, *params)
        ctx.pieces = pieces
        return out

    @staticmethod
    def backward(ctx, grad):
        x, weight, order, *rest = ctx.saved_tensors
        want_x, want = ctx.needs_input_grad[0], ctx.needs_input_grad[6:]
        inner, params = rest[: len(rest) - len(want)], rest[len(rest) - len(want) :]
        pairs = _as(params, grad.dtype)
        total: Any = None
        if want_x:
            total = grad.new_zeros(len(grad), x.shape[1]) if weight is None else product(grad, weight.t())
        if order is None:
            grads = _backward(grad, total, x, ctx.pieces, inner, pairs, want)
        else:
            # Only the adapters' part needs an order, and is scattered back.
            part = grad.new_zeros(x.shape) if want_x else None
            grads = _backward(grad.index_select(0, order), part, x, ctx.pieces, inner, pairs, want)
            if part is not None:
                total.index_add_(0, order, part)
        return (total, None, None, None, None, None, *_like(grads, params))


def _as(tensors: Sequence[Tensor], dtype: torch.dtype) -> Sequence[Tensor]:
    return tensors if all(t.dtype == dtype for t in tensors) else [t.to(dtype) for t in tensors]


def _like(grads: Sequence[Tensor | None], params: Sequence[Tensor]) -> list[Tensor | None]:
    return [g if g is None or g.dtype == p.dtype else g.to(p.dtype) for g, p in zip(grads, params, strict=True)]


class _Targets(NamedTuple):
    """The adapters of a batch in layers that share their input."""

    layouts: tuple[Layout, ...]
    """of each layer"""
    owners: list[int]
    """of each of the pairs' tensors"""
    pairs: list[nn.Parameter]
    """A and B in turn, layer by layer"""


class StackedLoRALinear(nn.Module):
    """A frozen linear layer and the LoRA pairs of all adapters that target it.

    `base_layer` is any module that maps `[..., in]` to `[..., out]`; a plain `nn.Linear` is computed together with
    the adapters, anything else (a quantised layer) is just called. Adapter parameters are float32 whatever the base
    is; they are used in the input's dtype.
    """

    def __init__(self, base_layer: nn.Module, in_features: int, out_features: int, context: LoraContext) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.in_features, self.out_features = in_features, out_features
        self.context = context
        self.lora_A, self.lora_B = nn.ParameterDict(), nn.ParameterDict()
        self.pairs: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}
        self.ranks: dict[int, int] = {}
        self.scalings: dict[int, float] = {}
        self._fused: tuple[tuple[object, ...], Tensor, Tensor] | None = None
        self._joined: dict[tuple[int, torch.dtype], tuple[int, Joined]] = {}
        self._targets: tuple[tuple[tuple[int, ...], int], _Targets] | None = None
        self.siblings: tuple[StackedLoRALinear, ...] = (self,)
        """layers that the model gives the same input, this one among them"""

    @property
    def weight(self) -> Any:
        """The frozen layer's weight, possibly quantised; some models read its dtype or device."""
        return self.base_layer.weight

    @property
    def bias(self) -> Any:
        return self.base_layer.bias

    def add(self, adapter: int, rank: int, scaling: float, seed: str) -> None:
        """Give adapter number `adapter` a pair here: A uniform as PEFT draws it (seeded by `seed`), B zero."""
        device = self.weight.device
        bits = hashlib.sha256(seed.encode()).digest()[:8]
        # A generator of its own, seeded by name and layer: an adapter begins the same whatever others were added before
        # it.
        generator = torch.Generator().manual_seed(int.from_bytes(bits, "little") >> 1)
        # Drawn on the CPU, so that a GPU begins with the same weights.
        a = torch.empty(rank, self.in_features)
        nn.init.kaiming_uniform_(a, a=math.sqrt(5), generator=generator)
        pair = (nn.Parameter(a.to(device)), nn.Parameter(torch.zeros(self.out_features, rank, device=device)))
        if not self.context.sharded:  # a registered parameter would be sharded along with the module
            self.lora_A[str(adapter)], self.lora_B[str(adapter)] = pair
        self.pairs[adapter], self.ranks[adapter], self.scalings[adapter] = pair, rank, scaling

    def drop_cache(self) -> None:
        # A new container, since another thread may be about to fill the old one with what has just changed.
        self._fused, self._joined = None, {}

    def forward(self, x: Tensor) -> Tensor:
        routing = self.context.routing
        if routing is None:
            return self.base_layer(x)
        if self._goes_together(routing):
            return self._together(routing, x)
        pieces, params = self._pieces(routing, x)
        if not pieces:
            return self.base_layer(x)
        flat = x.reshape(-1, self.in_features)
        _refuse_other_number(flat, routing)
        # An exact type: a subclass, such as a quantised layer, may compute something else than x W^T + b.
        plain = type(self.base_layer) is nn.Linear and not self.context.sharded
        weight, bias = (self.weight, self.bias) if plain else (None, None)
        if torch.is_grad_enabled():
            out = _LoraLinear.apply(flat, weight, bias, self.out_features, routing.order, pieces, *params)
            if not plain:
                out = out + self.base_layer(flat)
        else:
            out = self.base_layer(flat) if weight is None else product(flat, weight, bias)
            if routing.order is not None:
                _permuted(flat, out, routing.order, pieces, _as(params, x.dtype))
            else:
                _add_adapters(flat, out, pieces, _as(params, x.dtype))
        return out.view(*x.shape[:-1], self.out_features)

    def _goes_together(self, routing: AdapterRouting) -> bool:
        """Whether the layer is computed with its siblings."""
        if routing.wide or routing.order is not None or self.context.sharded:
            return False
        return all(type(layer.base_layer) is nn.Linear for layer in self.siblings)

    def _together(self, routing: AdapterRouting, x: Tensor) -> Tensor:
        """The layer's output, computed with those of its siblings or kept from a sibling's call with the same input."""
        # Kept results are only good for the very tensor they were computed from; a model that gives a sibling another
        # input gets it computed.
        given, out = routing.ahead.pop(self, (None, None))
        if given is x and out is not None:
            return out
        _refuse_other_number(x, routing)
        frozen = [Frozen(layer.weight, layer.bias) for layer in self.siblings]
        packed, weight = self.context.packed, None
        if packed is not None and not torch.is_grad_enabled():
            weight = packed.of(*(layer.weight for layer in frozen))
        if weight is not None:
            outs = fixed_siblings(x, frozen, routing.segments, self.joined(routing.present, x.dtype), weight)
        else:
            outs = self._with_pairs(routing, x, frozen)
        for layer, result in zip(self.siblings, outs, strict=True):
            if layer is not self:
                routing.ahead[layer] = (x, result)
        # Its own is not looked up, since another thread that samples may use the same routing.
        return outs[self.siblings.index(self)]

    def _with_pairs(self, routing: AdapterRouting, x: Tensor, frozen: Sequence[Frozen]) -> tuple[Tensor, ...]:
        """The outputs of all siblings from the adapters as they are, also for a backward pass."""
        targets = self._targets_of(routing.present)
        layouts, pairs = targets.layouts, list[Tensor](targets.pairs)
        if layouts not in routing.runs:
            routing.runs[layouts] = runs_of(routing.segments, layouts)
        if not all(map(routing.learns, routing.present)):
            owners = zip(targets.owners, pairs, strict=True)
            pairs = [p if routing.learns(k) else p.detach() for k, p in owners]
        return linear_siblings(
            x,
            frozen,
            routing.runs[layouts],
            pairs,
            lambda: self.joined(routing.present, x.dtype),
            self.context.packed,
        )

    def _targets_of(self, present: tuple[int, ...]) -> _Targets:
        """Which of a batch's adapters target the siblings; kept, since adapters come seldom and none goes."""
        key = (present, sum(len(layer.pairs) for layer in self.siblings))
        kept = self._targets  # a local reference: another thread may replace it at any moment
        if kept is None or kept[0] != key:
            layouts = tuple(
                tuple((k, layer.ranks[k], layer.scalings[k]) for k in present if k in layer.pairs)
                for layer in self.siblings
            )
            pairs = [
                (k, p)
                for layer, layout in zip(self.siblings, layouts, strict=True)
                for k, _, _ in layout
                for p in layer.pairs[k]
            ]
            self._targets = kept = (key, _Targets(layouts, [k for k, _ in pairs], [p for _, p in pairs]))
        return kept[1]

    def copies(self) -> list[Tensor]:
        """The weights that are kept joined, beside the adapters' own."""
        return [t for _, joined in self._joined.values() for t in joined.tensors()]

    def joined(self, adapters: Iterable[int], dtype: torch.dtype) -> dict[int, Joined]:
        """By adapter: its weights in all siblings, where it targets any of them; kept until they change."""
        kept, joined = self._joined, dict[int, Joined]()
        for k in adapters:
            pairs = [(*layer.pairs[k], layer.scalings[k]) if k in layer.pairs else None for layer in self.siblings]
            if not any(pairs):
                continue
            # Torch counts the writes to a tensor, so that a change shows that was not announced.
            writes = sum(a._version + b._version for a, b, _ in filter(None, pairs))
            if (k, dtype) not in kept or kept[k, dtype][0] != writes:
                kept[k, dtype] = (writes, join(pairs, [layer.out_features for layer in self.siblings], dtype))
            joined[k] = kept[k, dtype][1]
        return joined

    def _pieces(self, routing: AdapterRouting, x: Tensor) -> tuple[Sequence[Piece], list[Tensor]]:
        """Pieces of this layer for the routing's segments, and the adapters' tensors A_0, B_0, A_1, B_1, ..."""
        layout = tuple((k, self.ranks[k], self.scalings[k]) for k in routing.present if k in self.pairs)
        if not layout:
            return [], []
        here = [k for k, _, _ in layout]
        if layout not in routing.pieces:
            if routing.wide:
                routing.pieces[layout] = [Piece(0, 0, routing.rows * routing.steps, 1.0, routing.mask(layout, x))]
            else:
                slot = {k: i for i, k in enumerate(here)}
                routing.pieces[layout] = [
                    Piece(slot.get(k, -1), start, stop, self.scalings.get(k, 1.0))
                    for k, start, stop in routing.segments
                ]
        if routing.wide:
            return routing.pieces[layout], self._wide_weights(routing, here, x.dtype)
        pairs = [self.pairs[k] if routing.learns(k) else tuple(p.detach() for p in self.pairs[k]) for k in here]
        return routing.pieces[layout], [p for pair in pairs for p in pair]

    def _wide_weights(self, routing: AdapterRouting, here: list[int], dtype: torch.dtype) -> list[Tensor]:
        """`[sum r_k, in]` and `[out, sum r_k]`; kept between forwards that need no gradient."""
        if torch.is_grad_enabled():
            # Detached and not skipped: an adapter that does not learn acts all the same, and passes gradients on to
            # what came before.
            pairs = [self.pairs[k] if routing.learns(k) else tuple(p.detach() for p in self.pairs[k]) for k in here]
            return [torch.cat([a for a, _ in pairs]), torch.cat([b for _, b in pairs], 1)]
        key = (tuple(here), dtype)
        fused = self._fused  # a local reference: another thread may drop the cache at any moment
        if fused is None or fused[0] != key:
            a = torch.cat([self.pairs[k][0] for k in here]).to(dtype)
            b = torch.cat([self.pairs[k][1] for k in here], 1).to(dtype)
            self._fused = fused = (key, a, b)
        return [fused[1], fused[2]]


def _refuse_other_number(x: Tensor, routing: AdapterRouting) -> None:
    if (tokens := x.shape[:-1].numel()) != routing.rows * routing.steps:
        raise ValueError(f"found {tokens} tokens in a layer, expected {routing.rows} x {routing.steps}")


SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Layers of one parent that models give the same input; a layer called with another input is computed again."""


def link_siblings(layers: Mapping[str, StackedLoRALinear]) -> None:
    """Tell each layer, by its path, which others of its parent read the same input."""
    for path, layer in layers.items():
        parent, _, child = path.rpartition(".")
        names = next((names for names in SIBLINGS if child in names), (child,))
        group = (layers.get(f"{parent}.{name}" if parent else name) for name in names)
        layer.siblings = tuple(sibling for sibling in group if sibling is not None)


def set_checkpointing(inner: nn.Module, context: LoraContext, enabled: bool) -> None:
    """Wrap the `forward` of each decoder block so that its activations are recomputed in the backward pass.

    Hugging Face's own switch works in training mode only, and its recomputation would run after the forward has
    removed its routing; here each block keeps the routing for its recomputation.
    """
    lists = [module for module in inner.children() if isinstance(module, nn.ModuleList)]
    # The longest list holds the decoder blocks; a model may have other lists, such as those of experts.
    for block in max(lists, key=len, default=()):
        # The wrapper is an attribute of the instance; without it the class's own forward is back.
        block.__dict__.pop("forward", None)
        if enabled:
            block.forward = _checkpointed(block.forward, context)


def _checkpointed(forward: Callable[..., Any], context: LoraContext) -> Callable[..., Any]:
    def run(routing: AdapterRouting | None, *args: Any, **kwargs: Any) -> Any:
        with context.use(routing):
            return forward(*args, **kwargs)

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        # A block that appends to a cache must not run a second time.
        if not torch.is_grad_enabled() or kwargs.get("past_key_values") is not None:
            return forward(*args, **kwargs)
        # The base is in eval mode, without dropout, so no random state has to be restored.
        return checkpoint(run, context.routing, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)

    return wrapper
