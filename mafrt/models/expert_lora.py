"""Adapters on experts that a block holds as one parameter, `[experts, out, in]`.

transformers computes such experts behind one interface (`transformers.integrations.moe`): each token goes through a
few of them, and their outputs are added with the router's weights. PEFT adapts them by `target_parameters`: expert e
of a parameter W has the matrix `W_e + scaling B_e A_e`, with the A of all experts in one matrix `[experts * rank, in]`
and the B in one `[out, rank * experts]`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mafrt.models.adapter_routing import AdapterRouting, LoraContext
from mafrt.models.multi_lora import new_pair


class StackedLoRAExperts:
    """The LoRA pairs of all adapters that target one matrix of each expert of a block, in PEFT's layout."""

    def __init__(self, in_features: int, out_features: int, experts: int) -> None:
        self.in_features, self.out_features, self.experts = in_features, out_features, experts
        self.pairs: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}
        self.ranks: dict[int, int] = {}
        self.scalings: dict[int, float] = {}
        self._stacked: tuple[object, Tensor, Tensor, Tensor] | None = None

    def add(self, adapter: int, rank: int, scaling: float, seed: str, device: torch.device) -> None:
        """Give adapter number `adapter` a pair for each expert: A uniform as PEFT draws it, B zero."""
        pair = new_pair(rank * self.experts, self.in_features, self.out_features, device, seed)
        self.pairs[adapter], self.ranks[adapter], self.scalings[adapter] = pair, rank, scaling

    def drop_cache(self) -> None:
        self._stacked = None

    def stack(self, routing: AdapterRouting, slots: Sequence[int], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """A `[experts * slots, rank, in]`, B `[experts * slots, out, rank]` and scalings `[slots]`.

        `slots` are adapters, -1 for none; one without a pair here has zeros. Kept between passes that record nothing.
        """
        adapted = [k for k in slots if k in self.pairs]
        # Torch counts the writes to a tensor, so that a change shows that was not announced.
        key = (tuple(slots), dtype, sum(p._version for k in adapted for p in self.pairs[k]))
        cached = self._stacked  # a local reference: another thread may replace it at any moment
        if not torch.is_grad_enabled() and cached is not None and cached[0] == key:
            return cached[1:]
        # A multiple of 8 numbers a row is what grouped products of GPUs ask for.
        rank = -(-max(self.ranks[k] for k in adapted) // 8) * 8
        downs, ups = [], []
        for k in slots:
            if k not in self.pairs:
                like = self.pairs[adapted[0]][0]
                downs.append(like.new_zeros(self.experts, rank, self.in_features))
                ups.append(like.new_zeros(self.experts, self.out_features, rank))
                continue
            # Detached and not skipped: an adapter that does not learn acts all the same, and passes gradients on.
            a, b = self.pairs[k] if routing.learns(k) else (p.detach() for p in self.pairs[k])
            lacking = rank - self.ranks[k]
            a = a.view(self.experts, self.ranks[k], self.in_features)
            b = b.view(self.out_features, self.ranks[k], self.experts).permute(2, 0, 1)
            downs.append(F.pad(a, (0, 0, 0, lacking)))
            ups.append(F.pad(b, (0, lacking)))
        down, up = (torch.stack(parts, 1).flatten(0, 1).to(dtype) for parts in (downs, ups))
        scalings = torch.tensor([self.scalings.get(k, 0.0) for k in slots], device=down.device, dtype=dtype)
        if not torch.is_grad_enabled():
            self._stacked = (key, down, up, scalings)
        return down, up, scalings


class AdaptedExperts:
    """The forward of a block's experts with the adapter of each token; put in the place of the module's own."""

    def __init__(self, module: Any, context: LoraContext) -> None:
        self.module, self.context = module, context
        self.own = module.forward
        self.layers: dict[str, StackedLoRAExperts] = {}
        """by the name of the parameter"""
        module.forward = self

    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        routing = self.context.routing
        present = (
            [k for k in routing.present if any(k in layer.pairs for layer in self.layers.values())] if routing else []
        )
        if routing is None or not present:
            out: Tensor = self.own(hidden_states, top_k_index, top_k_weights)
            return out
        if len(hidden_states) != routing.rows * routing.steps:
            raise ValueError(f"found {len(hidden_states)} tokens at experts, expected {routing.rows} x {routing.steps}")
        return mixed(self.module, self.layers, routing, present, hidden_states, top_k_index, top_k_weights)


def mixed(
    module: Any,
    layers: Mapping[str, StackedLoRAExperts],
    routing: AdapterRouting,
    present: Sequence[int],
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
) -> Tensor:
    """`sum_e weight_e down_e(act(up_e(x)))` of each token, with its adapter in both products: `[tokens, d]`.

    Pairs of token and expert are sorted by expert and, within one, by adapter: the frozen products are then one for
    each expert, and the adapters' one for each expert and adapter.

    Args:
        module: experts behind transformers' interface.
        layers: by parameter of the module.
        routing: of the pass.
        present: adapters of the pass that act here.
        hidden_states: `[tokens, d]`.
        top_k_index: `[tokens, chosen]`, experts of each token.
        top_k_weights: `[tokens, chosen]`.
    """
    tokens, chosen = top_k_index.shape
    pairs = _sorted(routing, present, top_k_index, int(module.num_experts))
    x = hidden_states[pairs.order // chosen]
    h = _product(module, "gate_up_proj" if module.has_gate else "up_proj", layers, routing, pairs, x)
    h = module._apply_gate(h) if module.has_gate else module.act_fn(h)
    out = _product(module, "down_proj", layers, routing, pairs, h)
    out = out * top_k_weights.flatten()[pairs.order].unsqueeze(1)
    back = torch.empty_like(pairs.order)
    back[pairs.order] = torch.arange(len(back), device=back.device)
    return out[back].view(tokens, chosen, -1).sum(1).to(hidden_states.dtype)


@dataclass(frozen=True)
class _Pairs:
    """Pairs of token and expert, sorted by expert and then by adapter."""

    order: Tensor
    """`[pairs]`: the place of each in `top_k_index`, flat"""
    expert: Tensor
    slot: Tensor
    """`[pairs]`: place of the adapter in `slots`"""
    slots: tuple[int, ...]
    """adapters; -1 for none"""
    ends: Tensor
    """`[experts * slots]`: behind the last pair of each"""


def _sorted(routing: AdapterRouting, present: Sequence[int], top_k_index: Tensor, experts: int) -> _Pairs:
    key = ("experts", tuple(present))
    if key not in routing.derived:  # the same in all blocks
        place = {k: number for number, k in enumerate(present)}
        rows = [place.get(k, len(present)) for k in routing.index.flatten().tolist()]
        slots = (*present, -1) if len(present) in rows else tuple(present)
        slot = torch.tensor(rows).view(routing.rows, -1).expand(-1, routing.steps).flatten()
        routing.derived[key] = (slots, slot.to(top_k_index.device))
    slots, slot = routing.derived[key]
    group = (top_k_index * len(slots) + slot.unsqueeze(1)).flatten()
    group, order = group.sort(stable=True)
    # Counted by a search and not by `bincount`, which has a GPU's host wait.
    ends = torch.searchsorted(group, torch.arange(experts * len(slots), device=group.device), right=True)
    return _Pairs(order, group // len(slots), group % len(slots), slots, ends.int())


def _product(
    module: Any,
    name: str,
    layers: Mapping[str, StackedLoRAExperts],
    routing: AdapterRouting,
    pairs: _Pairs,
    x: Tensor,
) -> Tensor:
    """`W_e x + b_e + scaling B_e A_e x` of each pair: `[pairs, in]` -> `[pairs, out]`."""
    weight, count = getattr(module, name), len(pairs.slots)
    weight = weight if module.is_transposed else weight.transpose(1, 2)
    out = grouped(x, weight, pairs.ends[count - 1 :: count].contiguous())
    if module.has_bias:
        out = out + getattr(module, f"{name}_bias")[pairs.expert]
    layer = layers.get(name)
    if layer is None or not any(k in layer.pairs for k in pairs.slots):
        return out
    down, up, scalings = layer.stack(routing, pairs.slots, x.dtype)
    low = grouped(x, down.transpose(1, 2), pairs.ends) * scalings[pairs.slot].unsqueeze(1)
    return out + grouped(low, up.transpose(1, 2), pairs.ends)


def grouped(x: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """Each group of rows times its own matrix: `[rows, in]`, `[groups, in, out]` -> `[rows, out]`.

    `ends` `[groups]` int32: behind the last row of each group.
    """
    # The grouped product reads 16 bytes at a time, and knows no float64.
    fits = all(size * x.element_size() % 16 == 0 for size in weights.shape[1:]) and x.dtype != torch.float64
    if fits and hasattr(F, "grouped_mm"):
        return F.grouped_mm(x, weights, offs=ends)
    bounds = [0, *ends.tolist()]
    parts = [x[begin:end] @ weights[n] for n, (begin, end) in enumerate(pairwise(bounds))]
    return torch.cat(parts)


def fused_experts(model: nn.Module) -> dict[str, tuple[int, int, int]]:
    """Path -> (in, out, experts) of every parameter that holds a matrix of each expert, behind transformers' interface.

    In the order in which PEFT finds them.
    """
    found = {}
    for path, module in model.named_modules():
        experts: Any = module
        if "has_gate" not in vars(module) or "is_transposed" not in vars(module):
            continue
        used = ("gate_up_proj" if experts.has_gate else "up_proj", "down_proj")
        for name, parameter in module.named_parameters(recurse=False):
            if name in used and parameter.dim() == 3 and parameter.is_floating_point() and len(parameter) > 1:
                count, rows, columns = parameter.shape
                sizes = (rows, columns) if experts.is_transposed else (columns, rows)
                found[f"{path}.{name}"] = (*sizes, count)
    return found
