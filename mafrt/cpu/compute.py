"""How a CPU computes where its kernels in C are compiled."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from mafrt.cpu import delta_rule, low_rank, sample, short_conv
from mafrt.cpu.adapted_linear import link
from mafrt.cpu.head import CpuHead
from mafrt.cpu.lean_decoder import decode_model
from mafrt.cpu.library import library, pays
from mafrt.cpu.onednn import serves
from mafrt.cpu.packed_rows import attend
from mafrt.cpu.packed_weights import PackedWeights
from mafrt.cpu.recorded_parts import use_recorded_mlps, use_recorded_rotary
from mafrt.cpu.rms_norm import use_recorded_norms
from mafrt.models.compute import Compute, register

if TYPE_CHECKING:
    from mafrt.models.adapter_routing import AdapterRouting
    from mafrt.models.decoder import DecodeModel
    from mafrt.models.logprobs import FrozenHead, LogitForm
    from mafrt.models.multi_lora import StackedLoRALinear
    from mafrt.models.packed_attention import PackedRows
    from mafrt.models.shared_base import SharedBase


class CpuCompute(Compute):
    """Decoding in float32 and bfloat16 by the kernels, all else by them where that pays (`library.pays`).

    Anything else is the reference's.
    """

    own_adapter_only = True

    def kernels(self, dtype: torch.dtype) -> str:
        if dtype not in (torch.float32, torch.bfloat16):
            return "torch"
        return "c" if pays(dtype) else "c in decoding"

    def adopt(self, base: SharedBase) -> None:
        kernels = self.kernels(base.model.dtype)
        if kernels != "torch":
            base.context.packed = PackedWeights(base.model)
        if kernels == "c":
            for use in (use_recorded_norms, use_recorded_mlps, use_recorded_rotary):
                use(base.model)

    def share_machine(self, base: SharedBase) -> None:
        if base.context.packed is not None:
            base.context.packed.beside_others()

    def link(self, layers: Mapping[str, StackedLoRALinear]) -> None:
        link(layers)

    def routes_bare(self, base: SharedBase) -> bool:
        # The layers of the bare base have their products by packed weights and oneDNN as well.
        packed = base.context.packed
        if packed is None or self.kernels(base.model.dtype) != "c":
            return False
        return packed.enabled or serves(base.head.weight)

    def adapted_linear(self, layer: StackedLoRALinear, x: Tensor, routing: AdapterRouting) -> Tensor:
        context = layer.context
        served = context.packed is not None and self.kernels(x.dtype) == "c" and not context.sharded
        if not served or not low_rank.serves(x.dtype, x.device.type):
            runs = _runs(routing)
            return layer.adapted(x, routing) if runs is None else _adapted_by_runs(layer, x, routing, runs)
        siblings = layer.faster.siblings
        if not siblings.serves():
            return layer.adapted(x, routing)
        return cast(Tensor, siblings.output(layer, x, routing, context.packed))

    def packed_attention(self, query: Tensor, key: Tensor, value: Tensor, rows: PackedRows) -> Tensor:
        longest = max(block.longest for block in rows.packing.blocks)
        if not rows.plain or self.kernels(query.dtype) != "c" or rows.hides(longest):
            return rows.attend(query, key, value)
        return attend(query, key, value, rows)

    def frozen_head(self, weight: Tensor, bias: Tensor | None, form: LogitForm, packed: Any) -> FrozenHead:
        if self.kernels(weight.dtype) != "c":
            return super().frozen_head(weight, bias, form, packed)
        return CpuHead(weight, bias, form, packed)

    def decode_model(self, base: SharedBase) -> DecodeModel | None:
        return None if self.kernels(base.model.dtype) == "torch" else decode_model(base)

    def sample(self, logits: Tensor, temperatures: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if self.kernels(logits.dtype) == "torch" or not sample.serves(logits):
            return super().sample(logits, temperatures, uniforms)
        return sample.sample(logits, temperatures, uniforms)

    def delta_step(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        g: Tensor,
        beta: Tensor,
        state: Tensor,
        normed: bool,
        in_place: bool = False,
    ) -> tuple[Tensor, Tensor]:
        if not delta_rule.serves(query, key, value, beta, state):
            return super().delta_step(query, key, value, g, beta, state, normed)
        return delta_rule.step(query, key, value, g, beta, state, normed, in_place and state.is_contiguous())

    def delta_chunks(
        self, query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, state: Tensor | None, normed: bool
    ) -> tuple[Tensor, Tensor]:
        if self.kernels(value.dtype) != "c" or not delta_rule.serves(query, key, value, beta, state):
            return super().delta_chunks(query, key, value, g, beta, state, normed)
        return delta_rule.chunks(query, key, value, g, beta, state, normed)

    def short_conv(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None, state: Tensor | None
    ) -> Tensor | None:
        if self.kernels(x.dtype) != "c" or not short_conv.serves(x, weight, bias, activation, state):
            return None
        return short_conv.whole(x, weight) if state is None else short_conv.step(x, state, weight)


FEWEST = 4
"""Adapters of a pass from which on each is computed for its own tokens; of fewer, all for all tokens cost less."""


def _runs(routing: AdapterRouting) -> list[tuple[int, int]] | None:
    """(adapter, tokens) where each adapter's tokens are side by side; None: they are not, or the adapters are few."""
    if len(routing.present) < FEWEST:
        return None
    if "runs" not in routing.derived:
        adapters, counts = torch.unique_consecutive(routing.index.reshape(-1), return_counts=True)
        each = routing.rows * routing.steps // routing.index.numel()
        runs = list(zip(adapters.tolist(), (counts * each).tolist(), strict=True))
        routing.derived["runs"] = runs if len(runs) <= 2 * len(routing.present) else None
    found: list[tuple[int, int]] | None = routing.derived["runs"]
    return found


def _adapted_by_runs(
    layer: StackedLoRALinear, x: Tensor, routing: AdapterRouting, runs: list[tuple[int, int]]
) -> Tensor:
    """`StackedLoRALinear.adapted`, with the products of each adapter for its own tokens alone."""
    out: Tensor = layer.base_layer(x)
    present = [k for k in routing.present if k in layer.pairs]
    if not present:
        return out
    ranks = [layer.ranks[k] for k in present]
    counts = {count for _, count in runs}
    alike = [k for k, _ in runs] == present and len(counts) == len(set(ranks)) == 1
    scalings = torch.tensor([layer.scalings[k] for k in present], dtype=x.dtype).view(-1, 1, 1)
    if alike and torch.is_grad_enabled():
        learnt = [p if routing.learns(k) else p.detach() for k in present for p in layer.pairs[k]]
        return cast(Tensor, _AdaptedAlike.apply(x, out, scalings, *learnt))
    down, up = layer.stacked(routing, present, x.dtype)
    if alike:
        # Products of one shape are one call: a call for each costs more than its product where an adapter has few rows.
        rows, shape = x.reshape(len(runs), counts.pop(), layer.in_features), (len(runs), ranks[0])
        low = torch.bmm(rows, down.view(*shape, -1).transpose(1, 2)) * scalings
        return out + torch.bmm(low, up.view(-1, *shape).permute(1, 2, 0)).view(out.shape)
    pairs = dict(zip(present, zip(down.split(ranks), up.split(ranks, 1), strict=True), strict=True))
    pieces = []
    # Split and not sliced: the gradient of a slice is a tensor as large as the whole.
    for (k, count), part in zip(runs, x.reshape(-1, layer.in_features).split([n for _, n in runs]), strict=True):
        if k in pairs:
            a, b = pairs[k]
            pieces.append(F.linear(F.linear(part, a) * layer.scalings[k], b))
        else:
            pieces.append(part.new_zeros(count, layer.out_features))
    return out + torch.cat(pieces).view(out.shape)


class _AdaptedAlike(torch.autograd.Function):
    """`out + scaling_k B_k A_k x` of adapters of one rank, each with as many tokens as the others.

    The gradients of many adapters are the most numbers of a pass over few tokens. Torch's own backward would make those
    of all A and of all B in one block each, in another layout, and copy them.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, out: Tensor, scalings: Tensor, *pairs: Tensor) -> Tensor:
        rows = x.reshape(len(scalings), -1, x.shape[-1])
        down, up = (torch.cat(each).to(x.dtype).view(-1, *each[0].shape) for each in (pairs[::2], pairs[1::2]))
        low = torch.bmm(rows, down.transpose(1, 2)).mul_(scalings)
        ctx.save_for_backward(rows, scalings, down, up, low)
        return torch.baddbmm(out.view(*rows.shape[:2], -1), low, up.transpose(1, 2)).view(out.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        rows, scalings, down, up, low = ctx.saved_tensors
        grad = grads[0].reshape(*rows.shape[:2], -1)
        of_low = torch.bmm(grad, up).mul_(scalings)
        of_x = torch.bmm(of_low, down).view(*grads[0].shape[:-1], -1) if ctx.needs_input_grad[0] else None
        of_pairs = zip(torch.bmm(of_low.transpose(1, 2), rows), torch.bmm(grad.transpose(1, 2), low), strict=True)
        return of_x, grads[0], None, *(part for pair in of_pairs for part in pair)


if library() is not None:
    register("cpu", CpuCompute())
