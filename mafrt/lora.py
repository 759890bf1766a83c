"""Linear layers that hold every agent's LoRA pair, and the plan that says which pair acts on which token.

One batch may mix rows of different agents, of the reference policy and of the critic (both: no adapter). A `Plan` is
made once per forward and shared by all layers; each `StackedLoRALinear` turns it into a few *pieces*:

- *grouped*: a run of tokens of one adapter is one piece, `[tokens, r_k]` wide. The work does not grow with the number
  of adapters K, but each piece costs its own small matrix products. For training and long prompts.
- *wide*: all tokens are one piece with the concatenated weights `[sum r_k, in]`, and a mask that keeps each token's
  own block. Always two products, but `sum r_k` wide. For decoding, where a product costs less than its launch.

Both give `y = W x + b + scaling_k B_k A_k x`, LoRA as of Hu et al. 2021 (arXiv:2106.09685), equation 3.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

LAUNCH_S = {"cpu": 6e-6, "cuda": 1e-5}
"""Seconds that one more small operation costs, by device type."""
FLOP_PER_S = {"cpu": 6e10, "cuda": 6e13}
"""Rate at which the small products of an adapter run, by device type."""


class Segment(NamedTuple):
    """Tokens `start:stop` of the flattened (and, if the plan has `order`, permuted) batch belong to `adapter`."""

    adapter: int
    start: int
    stop: int


@dataclass
class Plan:
    """Which adapter acts on which token in one forward over a `[rows, steps]` batch.

    `index` is `[rows]` or `[rows, steps]`, -1 for no adapter. `train` holds the adapters that get gradients (None:
    all). `order` is None where segments address the batch as it lies, else the `[active]` positions of the tokens
    that have an adapter, sorted by adapter.
    """

    rows: int
    steps: int
    index: Tensor
    present: tuple[int, ...]
    wide: bool
    segments: tuple[Segment, ...]
    order: Tensor | None = None
    train: frozenset[int] | None = None
    masks: dict[object, Tensor] = field(default_factory=dict)

    def learns(self, adapter: int) -> bool:
        return self.train is None or adapter in self.train

    def mask(self, layout: tuple[tuple[int, int, float], ...], like: Tensor) -> Tensor:
        """`[sum r_k, rows, 1 or steps]`: scaling_k where an inner channel belongs to the token's adapter, else 0.

        Layers with the same `layout` of (adapter, rank, scaling) share one mask.
        """
        key = (layout, like.dtype, like.device)
        if key not in self.masks:
            owner = torch.tensor([k for k, r, _ in layout for _ in range(r)], device=like.device)
            scale = torch.tensor([s for _, r, s in layout for _ in range(r)], device=like.device, dtype=like.dtype)
            index = self.index.to(like.device).reshape(1, self.rows, -1)
            self.masks[key] = (index == owner[:, None, None]) * scale[:, None, None]
        return self.masks[key]


def make_plan(
    index: Tensor,
    rows: int,
    steps: int,
    *,
    ranks: Sequence[int],
    width: float,
    device: torch.device,
    form: str = "auto",
    train: frozenset[int] | None = None,
) -> Plan:
    """Group the tokens of a `[rows, steps]` batch by adapter and pick the cheaper form.

    `index`: `[rows]` or `[rows, steps]` on the CPU, since it is read here. `ranks[k]` is adapter k's rank, `width`
    the mean of in + out features over the adapted layers; both only steer the choice of `form`
    ("auto" | "wide" | "grouped").
    """
    span = steps if index.dim() == 1 else 1
    owners, counts = torch.unique_consecutive(index.reshape(-1), return_counts=True)
    stops = (counts.cumsum(0) * span).tolist()
    segments = _segments(owners.tolist(), stops)
    present = tuple(sorted({segment.adapter for segment in segments}))
    total = sum(ranks[k] for k in present)
    wide = form == "wide" and len(present) > 1
    if form == "auto" and len(present) > 1:
        wasted = 2.0 * rows * steps * (total - total / len(present)) * width / FLOP_PER_S.get(device.type, 6e13)
        wide = wasted < 2 * (len(present) - 1) * LAUNCH_S.get(device.type, 1e-5)
    plan = Plan(rows, steps, index, present, wide, segments, train=train)
    if not wide and len(segments) > 2 * len(present):
        # Many short runs: one per adapter instead, at the price of a gather and a scatter in each layer.
        tokens = index.reshape(-1).repeat_interleave(span)
        counts = torch.bincount(tokens + 1, minlength=2).tolist()
        plan.order = torch.argsort(tokens, stable=True)[counts[0] :].to(device)
        stops = list(accumulate(counts[k + 1] for k in present))
        plan.segments = _segments(present, stops)
    return plan


def _segments(owners: Sequence[int], stops: Sequence[int]) -> tuple[Segment, ...]:
    runs = zip(owners, [0, *stops[:-1]], stops, strict=True)
    return tuple(Segment(*run) for run in runs if run[0] >= 0)


@dataclass(frozen=True)
class Packing:
    """The real tokens of a padded `[B, T]` batch, row after row, as one long row of N tokens.

    Rows are sorted by adapter, so that every adapter's tokens are one segment, and then by length.
    """

    take: Tensor
    """`[N]`: where the tokens are in the flattened batch."""
    index: Tensor
    """`[N]` on the CPU: their adapters."""
    runs: tuple[tuple[int, int], ...]
    """(rows, length) of consecutive rows of equal length."""


def pack(real: Tensor, index: Tensor, device: torch.device) -> Packing:
    """`real` `[B, T]` bool (True for a real token) and `index` `[B]` or `[B, T]`, both on the CPU."""
    lengths = real.sum(1)
    owner = index if index.dim() == 1 else index.amax(1)
    order = torch.argsort(lengths, stable=True)
    order = order[torch.argsort(owner[order], stable=True)]
    row, column = real[order].nonzero(as_tuple=True)
    row = order[row]
    sizes, counts = torch.unique_consecutive(lengths[order], return_counts=True)
    runs = tuple((count, size) for count, size in zip(counts.tolist(), sizes.tolist(), strict=True) if size)
    take = (row * real.shape[1] + column).to(device)
    return Packing(take, index[row] if index.dim() == 1 else index[row, column], runs)


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    packing: Packing | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Hugging Face's `sdpa` attention, row by row where the batch is packed: no padding and no mask.

    `query` `[1, heads, N, head_dim]`, `key` and `value` with their own heads; returns `[1, N, heads, head_dim]`.
    """
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if packing is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    sizes = [count * length for count, length in packing.runs]
    out = []
    parts_of = (t.split(sizes, 2) for t in (query, key, value))
    for (count, length), *parts in zip(packing.runs, *parts_of, strict=True):
        q, k, v = (part[0].unflatten(1, (count, length)).transpose(0, 1) for part in parts)
        out.append(sdpa_attention_forward(module, q, k, v, None, **kwargs)[0].flatten(0, 1))
    return torch.cat(out).unsqueeze(0), None


class LoraContext:
    """Holds the plan of the forward that is running; all layers of one base share it. None: the bare base."""

    def __init__(self) -> None:
        self.plan: Plan | None = None

    @contextmanager
    def use(self, plan: Plan | None) -> Iterator[None]:
        before, self.plan = self.plan, plan
        try:
            yield
        finally:
            self.plan = before


class Piece(NamedTuple):
    """Tokens `start:stop` get `scale * mask * (x A^T) B^T`; `mask` is None, or `[r, rows, 1 or steps]`."""

    start: int
    stop: int
    scale: float
    mask: Tensor | None


# Inner activations are kept as [r, tokens]: with r of 8 or so as the long side of a product (`x @ A.T`), CPU
# libraries are two to five times slower than with r as the short one (`A @ x.T`).


def _inner(a: Tensor, x: Tensor, piece: Piece) -> Tensor:
    """`scale * mask * a x^T`, `[r, tokens]`: `x A^T` forward, `grad B` backward."""
    # With beta=0 the first argument is not read; it only carries the product's scale in one call.
    h = torch.addmm(a.new_empty(()), a, x.t(), beta=0, alpha=piece.scale)
    if piece.mask is not None:
        h.view(h.shape[0], piece.mask.shape[1], -1).mul_(piece.mask)
    return h


def _add_pieces(out: Tensor, x: Tensor, pieces: Sequence[Piece], weights: Sequence[Tensor]) -> list[Tensor]:
    """Add every piece to `out` `[tokens, out]` in place; returns the scaled inner activations `[r, piece tokens]`."""
    inner = []
    for piece, a, b in zip(pieces, weights[::2], weights[1::2], strict=True):
        h = _inner(a, x[piece.start : piece.stop], piece)
        out[piece.start : piece.stop].addmm_(h.t(), b.t())
        inner.append(h)
    return inner


def _apply(
    x: Tensor, out: Tensor, order: Tensor | None, pieces: Sequence[Piece], weights: Sequence[Tensor]
) -> tuple[Tensor, list[Tensor]]:
    """Add the adapters to `out` in place; returns their input (permuted by `order`) and inner activations."""
    if order is None:
        return x, _add_pieces(out, x, pieces, weights)
    x = x.index_select(0, order)
    delta = out.new_zeros(x.shape[0], out.shape[1])
    inner = _add_pieces(delta, x, pieces, weights)
    out.index_add_(0, order, delta)
    return x, inner


class _LoraLinear(torch.autograd.Function):
    """`x W^T + b + adapters`, or the adapters alone where `weight` is None; gradients for x and the adapters only.

    One node instead of some ten per adapter: no gradient for the frozen weight, no temporaries of the output's size,
    and the adapters' part of the input gradient is accumulated by the matrix product itself.
    """

    @staticmethod
    def forward(ctx, x, weight, bias, width, order, pieces, *params):  # type: ignore[no-untyped-def]
        out = x.new_zeros(x.shape[0], width) if weight is None else F.linear(x, weight, bias)
        used, inner = _apply(x, out, order, pieces, _as(params, x.dtype))
        ctx.save_for_backward(used, weight, order, *inner, *params)
        ctx.pieces = pieces
        return out

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        x, weight, order, *rest = ctx.saved_tensors
        pieces = ctx.pieces
        inner, params = rest[: len(pieces)], rest[len(pieces) :]
        weights = _as(params, grad.dtype)
        want_x, want = ctx.needs_input_grad[0], ctx.needs_input_grad[6:]
        local = grad if order is None else grad.index_select(0, order)
        grad_x = target = None
        if want_x:
            grad_x = torch.mm(grad, weight) if weight is not None else grad.new_zeros(grad.shape[0], x.shape[1])
            target = grad_x if order is None else torch.zeros_like(x)
        grads: list[Tensor | None] = [None] * len(params)
        for i, piece in enumerate(pieces):
            g = local[piece.start : piece.stop]
            if want[2 * i] or want_x:
                h = _inner(weights[2 * i + 1].t(), g, piece)
                if want[2 * i]:
                    grads[2 * i] = torch.mm(h, x[piece.start : piece.stop])
                if want_x:
                    target[piece.start : piece.stop].addmm_(h.t(), weights[2 * i])
            if want[2 * i + 1]:
                grads[2 * i + 1] = torch.mm(inner[i], g).t()
        if want_x and order is not None:
            grad_x.index_add_(0, order, target)
        return (grad_x, None, None, None, None, None, *_like(grads, params))


def _as(tensors: Sequence[Tensor], dtype: torch.dtype) -> Sequence[Tensor]:
    return tensors if all(t.dtype == dtype for t in tensors) else [t.to(dtype) for t in tensors]


def _like(grads: Sequence[Tensor | None], params: Sequence[Tensor]) -> list[Tensor | None]:
    return [g if g is None or g.dtype == p.dtype else g.to(p.dtype) for g, p in zip(grads, params, strict=True)]


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

    @property
    def weight(self) -> Tensor:
        return self.base_layer.weight

    @property
    def bias(self) -> Tensor | None:
        return self.base_layer.bias

    def add(self, adapter: int, rank: int, scaling: float, seed: str) -> None:
        """Give adapter number `adapter` a pair here: A uniform as PEFT draws it (seeded by `seed`), B zero."""
        device = self.base_layer.weight.device
        bits = hashlib.sha256(seed.encode()).digest()[:8]
        generator = torch.Generator().manual_seed(int.from_bytes(bits, "little") >> 1)
        a = torch.empty(rank, self.in_features)
        nn.init.kaiming_uniform_(a, a=math.sqrt(5), generator=generator)
        pair = (nn.Parameter(a.to(device)), nn.Parameter(torch.zeros(self.out_features, rank, device=device)))
        self.lora_A[str(adapter)], self.lora_B[str(adapter)] = pair
        self.pairs[adapter], self.ranks[adapter], self.scalings[adapter] = pair, rank, scaling

    def drop_cache(self) -> None:
        self._fused = None

    def forward(self, x: Tensor) -> Tensor:
        plan = self.context.plan
        if plan is None:
            return self.base_layer(x)
        pieces, params = self._pieces(plan, x)
        if not pieces:
            return self.base_layer(x)
        flat = x.reshape(-1, self.in_features)
        if flat.shape[0] != plan.rows * plan.steps:
            raise ValueError(f"found {flat.shape[0]} tokens in a layer, expected {plan.rows} x {plan.steps}")
        plain = type(self.base_layer) is nn.Linear
        weight, bias = (self.base_layer.weight, self.base_layer.bias) if plain else (None, None)
        if torch.is_grad_enabled():
            result = _LoraLinear.apply(flat, weight, bias, self.out_features, plan.order, pieces, *params)
            if not plain:
                result = result + self.base_layer(flat)
        else:
            result = F.linear(flat, weight, bias) if plain else self.base_layer(flat)
            _apply(flat, result, plan.order, pieces, _as(params, x.dtype))
        return result.view(*x.shape[:-1], self.out_features)

    def _pieces(self, plan: Plan, x: Tensor) -> tuple[list[Piece], list[Tensor]]:
        here = [k for k in plan.present if k in self.pairs]
        if not here:
            return [], []
        if plan.wide:
            layout = tuple((k, self.ranks[k], self.scalings[k]) for k in here)
            mask = plan.mask(layout, x)
            return [Piece(0, plan.rows * plan.steps, 1.0, mask)], self._wide_weights(plan, here, x.dtype)
        pieces, params = [], []
        for k, start, stop in plan.segments:
            if k in self.pairs:
                pieces.append(Piece(start, stop, self.scalings[k], None))
                params += self.pairs[k] if plan.learns(k) else [p.detach() for p in self.pairs[k]]
        return pieces, params

    def _wide_weights(self, plan: Plan, here: list[int], dtype: torch.dtype) -> list[Tensor]:
        """`[sum r_k, in]` and `[out, sum r_k]`; kept between forwards that need no gradient."""
        if torch.is_grad_enabled():
            pairs = [self.pairs[k] if plan.learns(k) else tuple(p.detach() for p in self.pairs[k]) for k in here]
            return [torch.cat([a for a, _ in pairs]), torch.cat([b for _, b in pairs], 1)]
        key = (tuple(here), dtype)
        if self._fused is None or self._fused[0] != key:
            a = torch.cat([self.pairs[k][0] for k in here]).to(dtype)
            b = torch.cat([self.pairs[k][1] for k in here], 1).to(dtype)
            self._fused = (key, a, b)
        return [self._fused[1], self._fused[2]]


def set_checkpointing(inner: nn.Module, context: LoraContext, enabled: bool) -> None:
    """Wrap the `forward` of each decoder block so that its activations are recomputed in the backward pass.

    Hugging Face's own switch works in training mode only, and its recomputation would run after the forward has
    taken its plan away; here the plan travels with the block.
    """
    lists = [module for module in inner.children() if isinstance(module, nn.ModuleList)]
    for block in max(lists, key=len, default=()):
        block.__dict__.pop("forward", None)
        if enabled:
            block.forward = _checkpointed(block.forward, context)


def _checkpointed(forward: Callable[..., Any], context: LoraContext) -> Callable[..., Any]:
    def run(plan: Plan | None, *args: Any, **kwargs: Any) -> Any:
        with context.use(plan):
            return forward(*args, **kwargs)

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled() or kwargs.get("past_key_values") is not None:
            return forward(*args, **kwargs)
        return checkpoint(run, context.plan, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)

    return wrapper
