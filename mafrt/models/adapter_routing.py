"""Which adapter acts on which token of a forward, and the pieces of tokens that its layers compute one by one.

One `AdapterRouting` per forward is shared by all layers of a base, through their `LoraContext`.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from mafrt.models.packed_weights import PackedWeights

LAUNCH_S = {"cpu": 6e-6, "cuda": 1e-5}
"""Cost of one additional small operation in seconds, by device type. Rough: it only steers wide against grouped."""
FLOP_PER_S = {"cpu": 6e10, "cuda": 6e13}
"""Throughput of an adapter's small matrix products, by device type."""


class Segment(NamedTuple):
    """Tokens `start:stop` of the flattened (and, if the routing has `order`, permuted) batch; `adapter` -1 for none."""

    adapter: int
    start: int
    stop: int


class Run(NamedTuple):
    """Tokens `start:stop` of one adapter, -1 for none."""

    adapter: int
    start: int
    stop: int
    pairs: tuple[tuple[int, int, float], ...]
    """(layer, position of its A among the pairs, scaling) of the layers that the adapter targets; B follows A"""


class Piece(NamedTuple):
    """Tokens `start:stop` get `scale * mask * (x A^T) B^T` of the layer's pair number `slot`; -1: they get none.

    `mask` is None, or `[r, rows, 1 or steps]`.
    """

    slot: int
    start: int
    stop: int
    scale: float = 1.0
    mask: Tensor | None = None


Layout: TypeAlias = "tuple[tuple[int, int, float], ...]"
"""(adapter, rank, scaling) of the batch's adapters that exist in a layer."""


@dataclass
class AdapterRouting:
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
    pieces: dict[Layout, list[Piece]] = field(default_factory=dict)
    """Cached pieces, shared by layers of equal layout."""
    runs: dict[tuple[Layout, ...], list[Run]] = field(default_factory=dict)
    """Cached runs of siblings, shared by siblings of equal layouts."""
    ahead: dict[object, tuple[Tensor, Tensor]] = field(default_factory=dict)
    """By layer: its input and its output, where it was computed with a sibling and was not called yet."""

    def learns(self, adapter: int) -> bool:
        return self.train is None or adapter in self.train

    def mask(self, layout: Layout, like: Tensor) -> Tensor:
        """`[sum r_k, rows, 1 or steps]`: scaling_k where an inner channel belongs to the token's adapter, else 0."""
        owner = torch.tensor([k for k, r, _ in layout for _ in range(r)], device=like.device)
        scale = torch.tensor([s for _, r, s in layout for _ in range(r)], device=like.device, dtype=like.dtype)
        index = self.index.to(like.device).reshape(1, self.rows, -1)
        return (index == owner[:, None, None]) * scale[:, None, None]


def route_adapters(
    index: Tensor,
    rows: int,
    steps: int,
    *,
    ranks: Sequence[int],
    width: float,
    device: torch.device,
    form: str = "auto",
    train: frozenset[int] | None = None,
) -> AdapterRouting:
    """Group the tokens of a `[rows, steps]` batch by adapter and pick the cheaper form.

    `index`: `[rows]` or `[rows, steps]` on the CPU, since it is read here. `ranks[k]` is adapter k's rank, `width`
    the mean of in + out features over the adapted layers; both only steer the choice of `form`
    ("auto" | "wide" | "grouped").
    """
    span = steps if index.dim() == 1 else 1
    owners, counts = torch.unique_consecutive(index.reshape(-1), return_counts=True)
    stops = (counts.cumsum(0) * span).tolist()
    segments = _segments(owners.tolist(), stops)
    present = tuple(sorted({segment.adapter for segment in segments} - {-1}))
    total = sum(ranks[k] for k in present)
    wide = form == "wide" and len(present) > 1
    if form == "auto" and len(present) > 1:
        wasted = 2.0 * rows * steps * (total - total / len(present)) * width / FLOP_PER_S.get(device.type, 6e13)
        wide = wasted < 2 * (len(present) - 1) * LAUNCH_S.get(device.type, 1e-5)
    routing = AdapterRouting(rows, steps, index, present, wide, segments, train=train)
    if wide:
        routing.segments = ()
    elif len(segments) > 2 * len(present) + 1:
        # Many short runs: one per adapter instead, at the price of a gather and a scatter in each layer.
        tokens = index.reshape(-1).repeat_interleave(span)
        counts = torch.bincount(tokens + 1, minlength=2).tolist()
        routing.order = torch.argsort(tokens, stable=True)[counts[0] :].to(device)
        stops = list(accumulate(counts[k + 1] for k in present))
        routing.segments = _segments(present, stops)
    return routing


def _segments(owners: Sequence[int], stops: Sequence[int]) -> tuple[Segment, ...]:
    return tuple(Segment(*run) for run in zip(owners, [0, *stops[:-1]], stops, strict=True))


class LoraContext:
    """The routing of the current forward, shared by all layers of one base. None: the bare base."""

    def __init__(self) -> None:
        self._routings: dict[int, AdapterRouting | None] = {}
        self.packed: PackedWeights | None = None
        """packed copies of the frozen weights"""
        self.sharded = False
        """whether FSDP or DeepSpeed gathers the frozen weights before a layer's forward and frees them after it"""

    @property
    def routing(self) -> AdapterRouting | None:
        """The routing of this thread; one thread may sample while another trains."""
        return self._routings.get(threading.get_ident())

    @contextmanager
    def use(self, routing: AdapterRouting | None) -> Iterator[None]:
        before, thread = self.routing, threading.get_ident()
        self._routings[thread] = routing
        try:
            yield
        finally:
            if before is None:
                del self._routings[thread]
            else:
                self._routings[thread] = before


def runs_of(segments: Sequence[Segment], layouts: Sequence[Layout]) -> list[Run]:
    """The segments, with the places of the adapter's pairs among all layers' tensors."""
    pairs: dict[int, list[tuple[int, int, float]]] = {}
    place = 0
    for number, layout in enumerate(layouts):
        for adapter, _, scaling in layout:
            pairs.setdefault(adapter, []).append((number, place, scaling))
            place += 2
    return [Run(adapter, start, stop, tuple(pairs.get(adapter, ()))) for adapter, start, stop in segments]
