"""How a GPU computes."""

from __future__ import annotations

from collections.abc import Mapping
from types import MethodType
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional

from mafrt.models.adapter_routing import AdapterRouting
from mafrt.models.compute import Compute, register
from mafrt.models.decoder import DecodeModel
from mafrt.models.gpu import adapted_linear, decode_ops, lean_decoder, packed_attention, sampling
from mafrt.models.norm_forms import form_of
from mafrt.models.packed_attention import PackedRows


def _norm(module: Any, x: Tensor, *more: Any, **words: Any) -> Tensor:
    """A norm of transformers, written out there as eight operations or more, as one to five."""
    form, weight = module.form, module.weight
    if words or len(more) != form.gated or x.dtype != weight.dtype:
        return cast(Tensor, type(module).forward(module, x, *more, **words))
    y = functional.rms_norm(x, weight.shape, None if form.plus_one else weight, form.eps)
    if form.plus_one:
        return torch.addcmul(y, y, weight)  # rounded once more than there
    return (y * functional.silu(more[0].float())).to(x.dtype) if form.gated else y


class GpuCompute(Compute):
    """The reference, but for what a GPU has kernels for, and what it can do in fewer launches."""

    def adopt(self, base: Any) -> None:
        for module in base.model.modules():
            if (form := form_of(module)) is not None:
                module.form, module.forward = form, MethodType(_norm, module)

    def link(self, layers: Mapping[str, Any]) -> None:
        together = adapted_linear.Together(layers)
        for layer in layers.values():
            layer.faster = together

    def adapted_linear(self, layer: Any, x: Tensor, routing: AdapterRouting) -> Tensor:
        if not adapted_linear.serves(layer):
            return super().adapted_linear(layer, x, routing)
        return adapted_linear.adapted(layer, x, routing)

    def packed_attention(self, query: Tensor, key: Tensor, value: Tensor, rows: PackedRows) -> Tensor:
        if not packed_attention.serves(query, rows):
            return rows.attend(query, key, value)
        return packed_attention.attend(query, key, value, rows)

    def family_tokens(self, base: Any) -> int:
        # Where nothing is copied for the rows of a family, only what they compute bounds it.
        return 2**31 if packed_attention.covers(base) else super().family_tokens(base)

    def decode_model(self, base: Any) -> DecodeModel | None:
        # The weights of a sharded base are there for the time of play only, and elsewhere each time.
        return None if base.sharded else lean_decoder.decode_model(base)

    def sample(self, logits: Tensor, temperatures: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return sampling.sample(logits, temperatures, uniforms)

    def truncate(self, logits: Tensor, temperatures: Tensor, top_k: Tensor, top_p: Tensor, widest: int = 0) -> Tensor:
        return cast(Tensor, decode_ops.truncated(logits, temperatures, top_k, top_p, widest))


register("cuda", GpuCompute())
