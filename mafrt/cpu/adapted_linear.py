"""Linear layers that read the same input (query, key and value; gate and up), with their adapters, as one operation.

Forward, the adapters are a part of the product with the frozen weights; backward, one pass over the outputs' gradient
gives all of theirs, and the inputs' gradient is again one product. The results are those of the reference
(`StackedLoRALinear.adapted`), up to the order of sums and, in bfloat16, with fewer roundings.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from mafrt.cpu.low_rank import Joined, LowRank, Segments, columns_for, join
from mafrt.cpu.onednn import product
from mafrt.cpu.packed_weights import PackedWeights
from mafrt.cpu.panels import Panels
from mafrt.models.adapter_routing import AdapterRouting, Layout
from mafrt.models.multi_lora import StackedLoRALinear

SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Layers of one parent that models give the same input; a layer called with another input is computed again."""


class Segment(NamedTuple):
    """Tokens `start:stop` of the flattened batch, all of one adapter; -1 for none."""

    adapter: int
    start: int
    stop: int


class Run(NamedTuple):
    """A segment, with the places of its adapter's pairs among the tensors of the siblings."""

    adapter: int
    start: int
    stop: int
    pairs: tuple[tuple[int, int, float], ...]
    """(layer, place of its A, scaling) of the layers that the adapter targets; B follows A"""


@dataclass
class _Derived:
    """What the layers of a pass derive from its routing."""

    segments: list[Segment]
    runs: dict[tuple[Layout, ...], list[Run]] = field(default_factory=dict)
    ahead: dict[StackedLoRALinear, tuple[Tensor, Tensor]] = field(default_factory=dict)
    """input and output of layers that were computed with a sibling and were not called yet"""

    @classmethod
    def of(cls, routing: AdapterRouting) -> _Derived:
        if cls not in routing.derived:
            span = routing.steps if routing.index.dim() == 1 else 1
            owners, counts = torch.unique_consecutive(routing.index.reshape(-1), return_counts=True)
            stops = (counts.cumsum(0) * span).tolist()
            runs = zip(owners.tolist(), [0, *stops[:-1]], stops, strict=True)
            routing.derived[cls] = cls([Segment(*run) for run in runs])
        derived: _Derived = routing.derived[cls]
        return derived


class _Targets(NamedTuple):
    """The adapters of a batch in the siblings."""

    layouts: tuple[Layout, ...]
    """of each layer"""
    owners: list[int]
    """of each of the pairs' tensors"""
    pairs: list[nn.Parameter]
    """A and B in turn, layer by layer"""


class Siblings:
    """Adapted layers of one parent that read the same input."""

    def __init__(self, layers: Sequence[StackedLoRALinear]) -> None:
        self.layers = tuple(layers)
        self.widths = [layer.out_features for layer in layers]
        self._joined: dict[tuple[int, torch.dtype], tuple[int, Joined]] = {}
        self._targets: tuple[tuple[tuple[int, ...], int], _Targets] | None = None

    def serves(self) -> bool:
        """Whether all layers compute `x W^T + b` from weights as they stand; a quantised layer does something else."""
        return all(type(layer.base_layer) is nn.Linear for layer in self.layers)

    def output(self, layer: StackedLoRALinear, x: Tensor, routing: AdapterRouting, packed: PackedWeights) -> Tensor:
        """A layer's output, computed with those of its siblings or kept from a sibling's call with the same input."""
        derived = _Derived.of(routing)
        # Kept results are only good for the very tensor they were computed from; a model that gives a sibling another
        # input gets it computed.
        given, out = derived.ahead.pop(layer, (None, None))
        if given is x and out is not None:
            return out
        weight = packed.of(*(layer.weight for layer in self.layers))
        if weight is None and len(self.layers) > 1:  # too large for a copy, so that each layer's weight is read alone
            return Siblings.alone(layer).output(layer, x, routing, packed)
        weight = self.layers[0].weight if weight is None else weight
        joined = self.joined(routing.present, x.dtype)
        if not torch.is_grad_enabled():
            outs = self._outputs(x, derived.segments, joined, weight)[0]
        else:
            runs, pairs = self._runs(routing, derived)
            if len(self.layers) == 1:
                # Shaped outside, since autograd lets nobody write to a view that was made inside; Llama 4 does.
                flat = _AdaptedLinear.apply(x.reshape(-1, x.shape[-1]), self, runs, joined, packed, weight, *pairs)[0]
                return cast(Tensor, flat.view(*x.shape[:-1], -1))
            outs = _AdaptedLinear.apply(x, self, runs, joined, packed, weight, *pairs)
        for sibling, result in zip(self.layers, outs, strict=True):
            if sibling is not layer:
                derived.ahead[sibling] = (x, result)
        # Its own is not looked up, since another thread that samples may use the same routing.
        return outs[self.layers.index(layer)]

    @staticmethod
    def alone(layer: StackedLoRALinear) -> Siblings:
        """A layer without its siblings."""
        if layer.faster.single is None:
            layer.faster.single = Siblings((layer,))
        single: Siblings = layer.faster.single
        return single

    def joined(self, adapters: Iterable[int], dtype: torch.dtype) -> dict[int, Joined]:
        """By adapter: its weights in all siblings, where it targets any of them; kept until they change."""
        cached, joined = self._joined, dict[int, Joined]()
        for k in adapters:
            pairs = [(*layer.pairs[k], layer.scalings[k]) if k in layer.pairs else None for layer in self.layers]
            if not any(pairs):
                continue
            # Torch counts the writes to a tensor, so that a change shows that was not announced.
            writes = sum(a._version + b._version for a, b, _ in filter(None, pairs))
            if (k, dtype) not in cached or cached[k, dtype][0] != writes:
                cached[k, dtype] = (writes, join(pairs, self.widths, dtype))
            joined[k] = cached[k, dtype][1]
        return joined

    def copies(self) -> list[Tensor]:
        """The adapters' weights that are kept joined."""
        return [t for _, joined in self._joined.values() for t in joined.tensors()]

    def forget(self) -> None:
        """Drop the joined weights, since an adapter has changed."""
        # A new container, since another thread may be about to fill the old one with what has just changed.
        self._joined = {}

    def bias(self, x: Tensor) -> Tensor | None:
        """Of all layers, with zeros for those without one; None: none has one."""
        if all(layer.bias is None for layer in self.layers):
            return None
        biases = zip((layer.bias for layer in self.layers), self.widths, strict=True)
        return torch.cat([x.new_zeros(width) if bias is None else bias for bias, width in biases])

    def _outputs(
        self,
        x: Tensor,
        segments: Sequence[Run | Segment],
        joined: Mapping[int, Joined],
        weight: Tensor | Panels,
    ) -> tuple[tuple[Tensor, ...], LowRank | None]:
        """The layers' outputs, and the table of the adapters that were added; None: no token has one here."""
        flat, low = x.reshape(-1, x.shape[-1]), None
        adapters = [joined.get(segment.adapter) for segment in segments]
        if any(adapters):
            rows = Segments([segment.stop for segment in segments], [segment.adapter for segment in segments])
            numbers = flat.new_empty(len(flat), columns_for(adapters))
            low = LowRank(rows, adapters, self.widths, numbers, panels=isinstance(weight, Panels))
        out = product(flat, weight, self.bias(flat), low=low)
        if len(self.widths) == 1 and x.dim() == 2:
            return (out,), low
        return out.view(*x.shape[:-1], -1).split(self.widths, -1), low

    def _runs(self, routing: AdapterRouting, derived: _Derived) -> tuple[list[Run], list[Tensor]]:
        """The segments with the places of their adapters' pairs, and these pairs."""
        targets = self._targets_of(routing.present)
        if targets.layouts not in derived.runs:
            pairs_of: dict[int, list[tuple[int, int, float]]] = {}
            place = 0
            for number, layout in enumerate(targets.layouts):
                for adapter, _, scaling in layout:
                    pairs_of.setdefault(adapter, []).append((number, place, scaling))
                    place += 2
            derived.runs[targets.layouts] = [Run(*each, tuple(pairs_of.get(each[0], ()))) for each in derived.segments]
        pairs = list[Tensor](targets.pairs)
        if not all(map(routing.learns, routing.present)):
            pairs = [p if routing.learns(k) else p.detach() for k, p in zip(targets.owners, pairs, strict=True)]
        return derived.runs[targets.layouts], pairs

    def _targets_of(self, present: tuple[int, ...]) -> _Targets:
        """Which of a batch's adapters target the siblings; kept, since adapters come seldom and none goes."""
        key = (present, sum(len(layer.pairs) for layer in self.layers))
        cached = self._targets  # a local reference: another thread may replace it at any moment
        if cached is None or cached[0] != key:
            layouts = tuple(
                tuple((k, layer.ranks[k], layer.scalings[k]) for k in present if k in layer.pairs)
                for layer in self.layers
            )
            pairs = [
                (k, p)
                for layer, layout in zip(self.layers, layouts, strict=True)
                for k, _, _ in layout
                for p in layer.pairs[k]
            ]
            self._targets = cached = (key, _Targets(layouts, [k for k, _ in pairs], [p for _, p in pairs]))
        return cached[1]


@dataclass
class Kept:
    """What a layer keeps: itself with its siblings, and alone."""

    siblings: Siblings
    single: Siblings | None = None

    def forget(self) -> None:
        for each in (self.siblings, self.single):
            if each is not None:
                each.forget()


def link(layers: Mapping[str, StackedLoRALinear]) -> None:
    """Tell each layer, by its path, which others of its parent read the same input."""
    for path, layer in layers.items():
        parent, _, child = path.rpartition(".")
        names = next((names for names in SIBLINGS if child in names), (child,))
        group = tuple(filter(None, (layers.get(f"{parent}.{name}" if parent else name) for name in names)))
        # The first makes it for all. It is made anew where an adapter has wrapped a layer whose siblings had none.
        if group[0] is layer and (layer.faster is None or layer.faster.siblings.layers != group):
            siblings = Siblings(group)
            for each in group:
                each.faster = Kept(siblings)


class _AdaptedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        siblings: Siblings,
        runs: Sequence[Run],
        joined: Mapping[int, Joined],
        packed: PackedWeights,
        weight: Tensor | Panels,
        *pairs: Tensor,
    ) -> tuple[Tensor, ...]:
        outs, low = siblings._outputs(x, runs, joined, weight)
        # Given to autograd, which frees them behind the backward pass; the table lives as long as the graph.
        ctx.save_for_backward(x, None if low is None else low.release())
        ctx.siblings, ctx.runs, ctx.low, ctx.packed = siblings, runs, low, packed
        return outs

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (given, numbers), low = ctx.saved_tensors, ctx.low
        x = given.reshape(-1, given.shape[-1])
        needed = ctx.needs_input_grad
        want_x, want = needed[0], needed[6:]
        grad, back = side_by_side([grad.reshape(-1, grad.shape[-1]) for grad in grads]), None
        found: list[Tensor | None] = [None] * len(want)
        frozen = [layer.weight for layer in ctx.siblings.layers]
        weight = ctx.packed.of(*frozen, transposed=True)
        weight = frozen[0].t() if weight is None else weight
        if low is not None:
            targets = [run.pairs if any(want[a] or want[a + 1] for _, a, _ in run.pairs) else None for run in ctx.runs]
            # They are float32; autograd gives them another format where somebody has given an adapter one.
            onto, found = low.backward(grad, x, numbers, targets, len(want))
            if want_x:
                each = [None if adapter is None else adapter.back for adapter in low.adapters]
                back = LowRank(low.segments, each, [x.shape[1]], onto, given=True, panels=isinstance(weight, Panels))
        grad_x = product(grad, weight, low=back).view(given.shape) if want_x else None
        return grad_x, None, None, None, None, None, *found


def side_by_side(parts: Sequence[Tensor]) -> Tensor:
    """Matrices as one, `[tokens, sum of widths]`: a view where they are parts of one matrix, otherwise a copy."""
    if len(parts) == 1:
        return parts[0]
    first, width, at = parts[0], sum(part.shape[1] for part in parts), parts[0].storage_offset()
    for part in parts:
        same_storage = part.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        if not same_storage or part.stride() != (width, 1) or part.storage_offset() != at:
            return torch.cat(list(parts), 1)
        at += part.shape[1]
    return first.as_strided((len(first), width), (width, 1))
