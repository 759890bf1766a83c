"""How a GPU computes."""

from __future__ import annotations

from collections.abc import Mapping
from types import MethodType
from typing import Any

from torch import Tensor
from torch.nn import functional

from mafrt.models.adapter_routing import AdapterRouting
from mafrt.models.compute import Compute, register
from mafrt.models.decoder import DecodeModel
from mafrt.models.gpu import adapted_linear, lean_decoder, packed_attention, sampling
from mafrt.models.packed_attention import PackedRows

NORMS = ("LlamaRMSNorm", "MistralRMSNorm", "Phi3RMSNorm", "Qwen2RMSNorm", "Qwen3RMSNorm")
"""norms of transformers that are written out there as eight operations, and are one kernel"""


def _fused_norm(module: Any, x: Tensor) -> Tensor:
    return functional.rms_norm(x, module.weight.shape, module.weight, module.variance_epsilon)


class GpuCompute(Compute):
    """The reference, but for what a GPU has kernels for, and what it can do in fewer launches."""

    def adopt(self, base: Any) -> None:
        for module in base.model.modules():
            if type(module).__name__ in NORMS:
                module.forward = MethodType(_fused_norm, module)

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


register("cuda", GpuCompute())
