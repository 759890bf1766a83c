"""One decoder layer of a Llama-like model, laid out for decoding, and how each family of models describes it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mafrt.cpu.low_rank import LowRank
from mafrt.cpu.onednn import product
from mafrt.cpu.panels import Panels

FULL, SLIDING = "full_attention", "sliding_attention"
"""Kinds of attention layers, as transformers names them."""


@dataclass
class Linear:
    """Linear layers that share their input, as one: `weights` is one fused `[out, in]`, or the layers' own."""

    weights: list[Tensor]
    bias: Tensor | None
    paths: list[str]
    widths: list[int]
    """Out features of each layer."""
    packed: Tensor | Panels | None = None
    """All weights as one, in the layout of the CPU's kernels (`mafrt.cpu.packed_weights`)."""

    def __call__(self, x: Tensor, residual: Tensor | None = None, low: LowRank | None = None) -> Tensor:
        """`[rows, in]` -> `[rows, out]`, plus `residual` and what the rows' adapters add."""
        if self.packed is not None or len(self.weights) == 1:
            return product(x, self.weights[0] if self.packed is None else self.packed, self.bias, residual, low)
        out = torch.cat([product(x, weight) for weight in self.weights], 1)
        for added in (self.bias, residual):
            out = out if added is None else out.add_(added)
        if low is not None:
            low.add_to(out, x)
        return out


@dataclass
class DecoderBlock:
    """One decoder layer."""

    norm_in: Tensor
    """weights of the norm before attention, as factors: Gemma stores them less 1"""
    qkv: Linear
    head_norm: Tensor | None
    """`[heads + kv heads, D]`: the weights of Qwen3's and Gemma 3's norms of queries and keys."""
    out: Linear
    norm_out: Tensor | None
    """weights of Gemma's norm of what attention adds to the residual"""
    norm_mlp: Tensor
    norm_mlp_out: Tensor | None
    """weights of Gemma's norm of what the feed-forward layer adds"""
    feed: tuple[Linear, Linear] | None
    """gate and up, down; None: `mlp` is a mixture of experts and is called"""
    mlp: Any
    act: Any
    silu: bool
    """whether `act` is SiLU"""
    window: int | None
    """tokens that a query may attend to, itself included; None: all before it"""
    rotary: str
    """its rotary table (`LeanModel.rotary`)"""

    @property
    def linears(self) -> tuple[Linear, ...]:
        return (self.qkv, self.out, *(self.feed or ()))


def attention_kinds(config: Any) -> list[str]:
    """Kind of each layer's attention. Raises ValueError for one that is neither full nor of a sliding window."""
    count = int(config.num_hidden_layers)
    kinds = list(getattr(config, "layer_types", None) or [])
    if not kinds:
        # Without kinds, Mistral and Phi-3 apply their window in every layer, and other families in none.
        windowed = config.model_type in ("mistral", "phi3") and getattr(config, "sliding_window", None) is not None
        kinds = [SLIDING if windowed else FULL] * count
    if other := set(kinds) - {FULL, SLIDING}:
        raise ValueError(f"attention of kind {other.pop()}")
    return kinds


def window_of(config: Any, kind: str) -> int | None:
    """Tokens that a query of such a layer may attend to; None where that hides no context the model can hold."""
    window = getattr(config, "sliding_window", None)
    if kind == FULL or window is None or window >= config.max_position_embeddings:
        return None
    return int(window)


def norm_factors(norm: nn.Module) -> Tensor:
    """`[d]`: the factors of an RMS norm. Gemma's are 1 + weight, in float32 whatever the model's precision is."""
    weight: Any = norm.weight
    factors: Tensor = 1.0 + weight.float() if type(norm).__name__.startswith("Gemma") else weight
    return factors


def rms_norm(x: Tensor, factors: Tensor, eps: float) -> Tensor:
    """RMS norm over the last axis, computed in the factors' precision; `factors` `[d]`, or with more axes of `x`."""
    if factors.dtype != x.dtype:
        return rms_norm(x.to(factors.dtype), factors, eps).to(x.dtype)
    if factors.dim() == 1:
        return F.rms_norm(x, factors.shape, factors, eps)
    return F.rms_norm(x, factors.shape[-1:], None, eps) * factors


def is_silu(act: Any) -> bool:
    """Whether an activation is SiLU, whatever its class is called."""
    if isinstance(act, nn.SiLU):
        return True
    probe = torch.linspace(-4, 4, 33)
    return act is not None and torch.allclose(act(probe), F.silu(probe), atol=1e-6)
