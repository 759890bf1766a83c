"""What mixes the tokens of a row in a decode step: attention, attention with a gate, the gated delta rule.

Each takes the outputs `[rows, out]` of the linear layers that share the norm's output, with the inner product of their
adapters (`low` and `up` as of `decode_ops`), and writes to what its layer keeps of the rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from mafrt.models.gpu import decode_ops


@dataclass
class Rows:
    """The rows of a step."""

    index: Tensor
    """`[rows]`: adapter of each, -1 without one"""
    position: Tensor
    """`[rows]`"""
    cos: Tensor
    sin: Tensor
    """`[rows, R]`: of the first R numbers of a head, for `x cos + roll(x) sin`"""
    bias: Tensor | None
    """to add to the scores of the first `used` positions"""
    used: int


class Attention:
    """Of Llama-like models; keeps keys and values `[rows, kv heads, capacity, D]`."""

    recurrent = False
    """whether a layer keeps states of its rows, and not keys and values"""
    holder, into, out = "self_attn", ("q_proj", "k_proj", "v_proj"), ("o_proj",)

    def __init__(self, layer: Any, widths: list[int], eps: float) -> None:
        self.eps, self.scale, self.dim = eps, float(layer.scaling), int(layer.head_dim)
        self.heads, self.kv_heads = widths[0] // self.dim, widths[1] // self.dim
        self.rotated: int | None = self.dim
        """numbers of a head that have to be rotated all; None: as many as there are angles for"""
        self.norm: Tensor | None = None
        """of the heads, `[heads + kv heads, D]`"""
        if getattr(layer, "q_norm", None) is not None:
            self.norm = self._head_norm(layer, plus_one=False)

    def _head_norm(self, layer: Any, *, plus_one: bool) -> Tensor:
        counted = zip((layer.q_norm, layer.k_norm), (self.heads, self.kv_heads), strict=True)
        return torch.cat([factors(norm, plus_one).expand(count, -1) for norm, count in counted])

    def __call__(
        self, h: Tensor, low: Tensor | None, up: Tensor | None, rows: Rows, cache: tuple[Tensor, ...]
    ) -> Tensor:
        turned = rows.cos, rows.sin, rows.position
        return self._attended(
            decode_ops.heads(*cache, h, low, up, rows.index, self.norm, self.eps, *turned), rows, cache
        )

    def _attended(self, q: Tensor, rows: Rows, cache: tuple[Tensor, ...]) -> Tensor:
        # The queries of one key head side by side, as if they were several steps: no keys are repeated for them.
        q, keys, values = q.unflatten(1, (self.kv_heads, -1)), *(buffer[:, :, : rows.used] for buffer in cache)
        return F.scaled_dot_product_attention(q, keys, values, attn_mask=rows.bias, scale=self.scale).flatten(1)


class GatedDelta:
    """The gated delta rule behind a convolution; keeps the last inputs of this, and a state (`decode_ops.delta`)."""

    recurrent = True
    rotated: int | None = None
    holder, into, out = "linear_attn", ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"), ("out_proj",)

    def __init__(self, layer: Any, widths: list[int], eps: float) -> None:
        if layer.conv1d.bias is not None or layer.activation not in ("silu", "swish"):
            raise ValueError("a gated delta rule of its own form")
        self.widths, self.eps, self.norm = widths, eps, layer.norm.weight
        self.filter = layer.conv1d.weight.squeeze(1)
        self.decay, self.bias = -layer.A_log.float().exp(), layer.dt_bias.float()

    def __call__(
        self, h: Tensor, low: Tensor | None, up: Tensor | None, rows: Rows, cache: tuple[Tensor, ...]
    ) -> Tensor:
        h = h if low is None else decode_ops.added(h, low, up, rows.index, self.widths)
        inputs, state = cache
        qkv = decode_ops.convolved(inputs, h, self.filter)
        out: Tensor = decode_ops.delta(state, qkv, h, self.decay, self.bias, self.norm, self.eps)
        return out


class GatedAttention(Attention):
    """Whose queries come with a gate, and whose heads are rotated in part."""

    def __init__(self, layer: Any, widths: list[int], eps: float) -> None:
        super().__init__(layer, widths, eps)
        self.heads, self.widths, self.rotated = self.heads // 2, widths, None
        self.norm = self._head_norm(layer, plus_one=True)

    def __call__(
        self, h: Tensor, low: Tensor | None, up: Tensor | None, rows: Rows, cache: tuple[Tensor, ...]
    ) -> Tensor:
        h = h if low is None else decode_ops.added(h, low, up, rows.index, self.widths)
        count, turned = len(h), rows.cos.shape[1]
        q, k, v = h.view(count, -1, self.dim).split([2 * self.heads, self.kv_heads, self.kv_heads], 1)
        gate, norm = q[:, 1::2], cast(Tensor, self.norm)
        both = torch.cat((q[:, ::2], k), 1).to(norm.dtype)
        both = (F.rms_norm(both, (self.dim,), None, self.eps) * norm).to(h.dtype)
        x, rest = both.split([turned, self.dim - turned], 2)
        x = x * rows.cos.unsqueeze(1) + x.roll(turned // 2, -1) * rows.sin.unsqueeze(1)
        q, k = torch.cat((x, rest), 2).split([self.heads, self.kv_heads], 1)
        every = torch.arange(count, device=h.device)
        for buffer, new in zip(cache, (k, v), strict=True):
            buffer[every, :, rows.position] = new.to(buffer.dtype)
        return self._attended(q, rows, cache) * torch.sigmoid(gate.reshape(count, -1))


def factors(norm: Any, plus_one: bool) -> Tensor:
    """By which a norm multiplies; 1 + w in float32, as transformers computes it, where it keeps them less one."""
    weight: Tensor = norm.weight
    return 1.0 + weight.float() if plus_one else weight


Mixer = Attention | GatedDelta
