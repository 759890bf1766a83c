"""What a decoder layer does to a batch beside its linear layers: norms, attention with its cache, activation.

`TorchSteps` has it in torch operations, for every device and number format; `KernelSteps` by the kernels in C
(`mafrt.kernels`) on a CPU that has them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from mafrt.engines.local.decoder_block import DecoderBlock, rms_norm
from mafrt.engines.local.kv_cache import KVLayer, OwnKeys
from mafrt.engines.local.lean_model import LeanModel
from mafrt.engines.local.shared_prefix_attention import SharedPrompts
from mafrt.kernels.decode import DecodeKernels, FarKeys, NearKeys

Rotation = Mapping[str, tuple[Tensor, Tensor]]
"""Kind of layer -> cosines and signed sines of the present positions, `[rows, 1, D]`."""


class TorchSteps:
    """In torch operations.

    Args:
        model: the weights.
        prompts: of the batch.
    """

    def __init__(self, model: LeanModel, prompts: SharedPrompts) -> None:
        self._model, self._prompts = model, prompts
        self._own = [KVLayer(dtype=prompts.dtype) for _ in model.blocks]
        """of the rows' own tokens, layer by layer"""

    @property
    def own(self) -> Sequence[OwnKeys]:
        """Keys and values of the rows' own tokens, layer by layer."""
        return self._own

    def norm(self, x: Tensor, factors: Tensor) -> Tensor:
        """RMS norm of rows `[rows, d]`."""
        return rms_norm(x, factors, self._model.shape.eps)

    def final_norm(self, x: Tensor) -> Tensor:
        return self._model.base.inner.norm(x)

    def attend(self, number: int, qkv: Tensor, rotation: Rotation) -> Tensor:
        """Attention of one new token per row, `qkv` `[rows, (heads + 2 kv heads) * D]`: `[rows, heads * D]`."""
        shape, block = self._model.shape, self._model.blocks[number]
        both = shape.heads + shape.kv_heads
        qkv = qkv.view(len(qkv), -1, shape.dim)
        qk = qkv[:, :both]
        if block.head_norm is not None:
            qk = rms_norm(qk, block.head_norm, shape.eps)
        cos, sin = rotation[block.rotary]
        qk = torch.addcmul(qk * cos, qk.roll(shape.dim // 2, -1), sin)
        keys, values = self._own[number].update(qk[:, shape.heads :].unsqueeze(2), qkv[:, both:].unsqueeze(2))
        return self._prompts.attend(number, qk[:, : shape.heads], keys, values, shape.scale, block.window)

    def activated(self, block: DecoderBlock, gate_up: Tensor) -> Tensor:
        """act(gate) up `[rows, d]`, of gate and up side by side `[rows, 2 d]`."""
        return _activated(block, gate_up)

    def keep(self, rows: Tensor) -> None:
        """Leave only the given rows `[kept]`, in order; the prompts are told by the decoder."""
        for layer in self._own:
            layer.keep(rows)


def _activated(block: DecoderBlock, gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, 1)
    return block.act(gate).mul_(up)


class KernelSteps:
    """By the kernels in C; methods as of `TorchSteps`, for prompts that are laid out `for_kernels`."""

    def __init__(self, model: LeanModel, prompts: SharedPrompts, kernels: DecodeKernels) -> None:
        self._model, self._prompts, self._kernels = model, prompts, kernels
        self._near = [NearKeys(len(prompts.owner), model.shape, model.dtype) for _ in model.blocks]

    @property
    def own(self) -> Sequence[OwnKeys]:
        return self._near

    def norm(self, x: Tensor, factors: Tensor) -> Tensor:
        return self._kernels.rms_norm(x, self._model.exact(factors), self._model.shape.eps)

    def final_norm(self, x: Tensor) -> Tensor:
        return self.norm(x, self._model.norm_final)

    def attend(self, number: int, qkv: Tensor, rotation: Rotation) -> Tensor:
        block, prompts = self._model.blocks[number], self._prompts
        far = FarKeys(prompts.columns(number), prompts.values[number], prompts.lengths, prompts.owner)
        norms = None if block.head_norm is None else self._model.exact(block.head_norm)
        turned = rotation[block.rotary]
        return self._kernels.attend(qkv, turned, norms, self._model.shape, far, self._near[number], block.window)

    def keep(self, rows: Tensor) -> None:
        for layer in self._near:
            layer.keep(rows)

    def activated(self, block: DecoderBlock, gate_up: Tensor) -> Tensor:
        return self._kernels.silu_product(gate_up) if block.silu else _activated(block, gate_up)
