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

    `index`: `[rows]` or `[rows, steps]`, best on the CPU (it is read on the host). `ranks[k]` is adapter k's rank,
    `width` the mean of in + out features over the adapted layers; both only steer the choice of `form`
    ("auto" | "wide" | "grouped").
    """
    span = steps if index.dim() == 1 else 1
    flat = index.reshape(-1).tolist()
    segments: list[Segment] = []
    for position, k in enumerate(flat):
        if segments and segments[-1].adapter == k:
            segments[-1] = segments[-1]._replace(stop=(position + 1) * span)
        else:
            segments.append(Segment(k, position * span, (position + 1) * span))
    segments = [s for s in segments if s.adapter >= 0]
    present = tuple(sorted({s.adapter for s in segments}))
    plan = Plan(rows, steps, index, present, False, tuple(segments), train=train)
    if form == "grouped" or len(present) < 2:
        plan.wide = False
    elif form == "wide":
        plan.wide = True
    else:
        total = sum(ranks[k] for k in present)
        wasted = 2.0 * rows * steps * (total - total / len(present)) * width / FLOP_PER_S.get(device.type, 6e13)
        plan.wide = wasted < 2 * (len(present) - 1) * LAUNCH_S.get(device.type, 1e-5)
    if not plan.wide and len(segments) > 2 * len(present):
        _sort_tokens(plan, span, device)
    return plan


def _sort_tokens(plan: Plan, span: int, device: torch.device) -> None:
    """Replace many short segments by one per adapter, at the price of a gather and a scatter in each layer."""
    tokens = plan.index.reshape(-1).cpu().repeat_interleave(span)
    order = torch.argsort(tokens, stable=True)
    start, segments = 0, []
    for k in plan.present:
        count = int((tokens == k).sum())
        segments.append(Segment(k, start, start + count))
        start += count
    plan.order = order[len(tokens) - start :].to(device)
    plan.segments = tuple(segments)


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


def _masked(h: Tensor, piece: Piece) -> Tensor:
    if piece.mask is not None:
        rows = piece.mask.shape[1]
        h.view(h.shape[0], rows, -1).mul_(piece.mask)
    return h


def _add_pieces(out: Tensor, x: Tensor, pieces: Sequence[Piece], weights: Sequence[Tensor]) -> list[Tensor]:
    """Add every piece to `out` `[tokens, out]` in place; returns the inner activations `[r, piece tokens]`."""
    inner = []
    for i, piece in enumerate(pieces):
        h = _masked(torch.mm(weights[2 * i], x[piece.start : piece.stop].t()), piece)
        out[piece.start : piece.stop].addmm_(h.t(), weights[2 * i + 1].t(), alpha=piece.scale)
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
        weights = [p.to(x.dtype) for p in params]
        out = x.new_zeros(x.shape[0], width) if weight is None else F.linear(x, weight, bias)
        used, inner = _apply(x, out, order, pieces, weights)
        ctx.save_for_backward(used, weight, order, *inner, *params)
        ctx.pieces = pieces
        return out

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        x, weight, order, *rest = ctx.saved_tensors
        pieces = ctx.pieces
        inner, params = rest[: len(pieces)], rest[len(pieces) :]
        want_x, want = ctx.needs_input_grad[0], ctx.needs_input_grad[6:]
        local = grad if order is None else grad.index_select(0, order)
        grad_x = None
        if want_x:
            grad_x = torch.mm(grad, weight) if weight is not None else grad.new_zeros(grad.shape[0], x.shape[1])
        target = grad_x if order is None or not want_x else torch.zeros_like(x)
        grads: list[Tensor | None] = []
        for i, piece in enumerate(pieces):
            a, b = params[2 * i].to(grad.dtype), params[2 * i + 1].to(grad.dtype)
            g = local[piece.start : piece.stop]
            grad_a = grad_b = None
            if want[2 * i] or want_x:
                gh = _masked(torch.mm(b.t(), g.t()), piece)
                if piece.scale != 1.0:
                    gh.mul_(piece.scale)
                if want[2 * i]:
                    grad_a = torch.mm(gh, x[piece.start : piece.stop]).to(params[2 * i].dtype)
                if want_x:
                    target[piece.start : piece.stop].addmm_(gh.t(), a)
            if want[2 * i + 1]:
                scaled = inner[i] if piece.scale == 1.0 else inner[i] * piece.scale
                grad_b = torch.mm(scaled, g).t().to(params[2 * i + 1].dtype)
            grads += [grad_a, grad_b]
        if want_x and order is not None:
            grad_x.index_add_(0, order, target)
        return (grad_x, None, None, None, None, None, *grads)


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
            _apply(flat, result, plan.order, pieces, [p.to(x.dtype) for p in params])
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
