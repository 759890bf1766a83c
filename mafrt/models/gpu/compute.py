"""How a GPU computes."""

from __future__ import annotations

from types import MethodType
from typing import Any

from torch import Tensor
from torch.nn import functional

from mafrt.models.compute import Compute, register
from mafrt.models.decoder import DecodeModel
from mafrt.models.gpu import lean_decoder, packed_attention
from mafrt.models.packed_attention import PackedRows

NORMS = ("LlamaRMSNorm", "MistralRMSNorm", "Phi3RMSNorm", "Qwen2RMSNorm", "Qwen3RMSNorm")
"""norms of transformers that are written out there as eight operations, and are one kernel"""


def _fused_norm(module: Any, x: Tensor) -> Tensor:
    return functional.rms_norm(x, module.weight.shape, module.weight, module.variance_epsilon)


class GpuCompute(Compute):
    """The reference, but for what a GPU has kernels for."""

    def adopt(self, base: Any) -> None:
        for module in base.model.modules():
            if type(module).__name__ in NORMS:
                module.forward = MethodType(_fused_norm, module)

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


register("cuda", GpuCompute())
