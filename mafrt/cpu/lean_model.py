"""The frozen weights of a Llama-like model, laid out for decoding.

Query, key and value are one product, as are gate and up, and adapters are stacked. Covered are Gemma 2 and 3, Llama,
Mistral, Phi-3, Qwen2, Qwen3 and its mixture of experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from mafrt.cpu.decode import Heads, decode_kernels
from mafrt.cpu.decoder_block import (
    SLIDING,
    DecoderBlock,
    Linear,
    attention_kinds,
    is_silu,
    norm_factors,
    window_of,
)
from mafrt.cpu.low_rank import Joined, join
from mafrt.cpu.panels import Panels
from mafrt.models.decoder import DecodeModel

if TYPE_CHECKING:
    from mafrt.models.shared_base import SharedBase

MODEL_TYPES = ("gemma2", "gemma3_text", "llama", "mistral", "phi3", "qwen2", "qwen3", "qwen3_moe")
FUSE_BYTES = 2**26
"""Weights up to this size are copied into fused ones; above, the layers are called one by one and nothing is copied."""

_GROUPS = (
    ("self_attn", ("q_proj", "k_proj", "v_proj")),
    ("self_attn", ("o_proj",)),
    ("mlp", ("gate_proj", "up_proj")),
    ("mlp", ("down_proj",)),
)
_FUSED = {("q_proj", "k_proj", "v_proj"): "qkv_proj", ("gate_proj", "up_proj"): "gate_up_proj"}
"""Phi-3 holds these layers as one."""


class LeanModel(DecodeModel):
    """The frozen weights of a Llama-like model, laid out for decoding.

    Raises ValueError, with the reason, for a model that this code does not cover.
    """

    name = "lean"

    def __init__(self, base: SharedBase) -> None:
        super().__init__(base)
        config, inner = base.config, base.inner
        # Each of these reasons is only logged: the model's own forward decodes it then, slower and with the same
        # results.
        if config.model_type not in MODEL_TYPES or not hasattr(inner, "layers"):
            raise ValueError(f"model type {config.model_type}")
        if decode_kernels(base.model.dtype, base.device.type) is None:
            raise ValueError(f"numbers in {base.model.dtype}")
        if getattr(config, "use_bidirectional_attention", False):
            raise ValueError("attention to later tokens")
        if getattr(config, "attn_logit_softcapping", None) is not None and config.model_type != "gemma2":
            raise ValueError("capped attention scores")
        kinds = attention_kinds(config)
        rope = getattr(inner.rotary_emb, "rope_type", "default")
        for name in rope.values() if isinstance(rope, dict) else [rope]:
            # Tables of the others depend on the length of the sequence, while here they are computed once for all
            # positions.
            if name not in ("default", "linear", "llama3", "yarn"):
                raise ValueError(f"rotary embedding {name}, which changes with the length")
        heads = int(config.num_attention_heads)
        self.shape = Heads(
            heads,
            int(config.num_key_value_heads),
            int(getattr(config, "head_dim", None) or config.hidden_size // heads),
            float(inner.layers[0].self_attn.scaling),
            getattr(config, "attn_logit_softcapping", None),
            float(config.rms_norm_eps),
        )
        self.norm_final = norm_factors(inner.norm)
        self._exact: dict[int, tuple[Tensor, Tensor]] = {}
        where = {module: path for path, module in base.model.named_modules()}
        self._source: list[Tensor] = []
        norms = [module for module in inner.modules() if "RMSNorm" in type(module).__name__]
        self._norms: list[Tensor] = [norm.weight for norm in norms if isinstance(norm.weight, Tensor)]
        size = sum(p.numel() * p.element_size() for p in inner.layers.parameters())
        self.blocks = [
            self._block(layer, where, size <= FUSE_BYTES, kind) for layer, kind in zip(inner.layers, kinds, strict=True)
        ]
        if any(cos.shape[-1] != self.shape.dim for cos, _ in self.rotary(1).values()):
            raise ValueError("a rotary embedding of a part of each head")
        self._seen = self._stamp()
        self._joined: tuple[object, list[list[list[Joined | None]]]] | None = None

    def _block(self, layer: Any, where: dict[nn.Module, str], copy: bool, kind: str) -> DecoderBlock:
        attention, linears = layer.self_attn, []
        experts = hasattr(layer.mlp, "experts")
        # Experts are called with a routing of their own, in which linear layers within them would not find their rows.
        if experts and any(path.startswith(f"{where[layer.mlp]}.") for path in self.base.linear_paths()):
            raise ValueError("experts of several linear layers")
        for holder, names in _GROUPS[:2] if experts else _GROUPS:
            parent = getattr(layer, holder)
            if hasattr(parent, _FUSED.get(names, "")):
                names = (_FUSED[names],)
            parts = [getattr(parent, name) for name in names]
            # Below an adapter's wrapper: its contribution is added from the fused adapters instead.
            parts = [getattr(part, "base_layer", part) for part in parts]
            # A quantised layer, for one, does not multiply with its `weight` as it stands.
            if any(type(part) is not nn.Linear for part in parts):
                raise ValueError("linear layers of its own kind")
            weights = [part.weight for part in parts]
            self._source += weights
            widths = [len(weight) for weight in weights]
            bias = None
            if any(part.bias is not None for part in parts):
                # Qwen 2 has biases in some of the fused layers only; zeros stand for the others.
                bias = torch.cat([p.weight.new_zeros(len(p.weight)) if p.bias is None else p.bias for p in parts])
            packed = self._packed(weights)
            if copy and packed is None and len(weights) > 1:
                weights = [torch.cat(weights)]
            linears.append(Linear(weights, bias, [f"{where[parent]}.{name}" for name in names], widths, packed))
        head_norm = None
        if getattr(attention, "q_norm", None) is not None:
            norms = ((attention.q_norm, self.shape.heads), (attention.k_norm, self.shape.kv_heads))
            head_norm = torch.cat([norm_factors(norm).expand(count, -1) for norm, count in norms])
        # Gemma norms what both halves of a layer add, and calls the norm after attention by the others' name.
        names = ("post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")
        norms_after = [norm_factors(getattr(layer, name)) if hasattr(layer, name) else None for name in names]
        out, before_mlp, mlp_out = norms_after if norms_after[1] is not None else (None, norms_after[0], None)
        assert before_mlp is not None
        feed = None if experts else (linears[2], linears[3])
        act = None if experts else getattr(layer.mlp, "act_fn", None) or layer.mlp.activation_fn
        return DecoderBlock(
            norm_factors(layer.input_layernorm),
            linears[0],
            head_norm,
            linears[1],
            out,
            before_mlp,
            mlp_out,
            feed,
            layer.mlp,
            act,
            is_silu(act),
            window_of(self.base.config, kind),
            kind,
        )

    def _packed(self, weights: Sequence[Tensor]) -> Tensor | Panels | None:
        # The weights of a sharded base are there for the time of play only.
        return None if self.base.sharded else self.base.context.packed.of(*weights)

    def _stamp(self) -> int:
        # Torch counts the writes to a tensor, so that a change shows without a comparison of weights.
        return sum(weight._version for weight in (*self._source, *self._norms))

    @property
    def dtype(self) -> torch.dtype:
        return self._source[0].dtype

    def exact(self, factors: Tensor) -> Tensor:
        """The factors of a norm in float32, contiguous; kept, since every step asks for them."""
        cached = self._exact.get(id(factors))
        if cached is None:  # held along with the key, so that no other tensor gets its number
            cached = self._exact[id(factors)] = (factors, factors.detach().float().contiguous())
        return cached[1]

    @property
    def stale(self) -> bool:  # type: ignore[override]
        return self._stamp() != self._seen

    def rotary(self, positions: int) -> dict[str, tuple[Tensor, Tensor]]:
        """Kind of layer -> tables `[positions, 1, D]`: cos, and sin with the sign that `x cos + roll(x) sin` needs."""
        inner, half = self.base.inner, self.shape.dim // 2
        ids = torch.arange(positions, device=self.base.device).unsqueeze(0)
        like = self._source[0].new_empty(1, 1, 1)
        by_kind = isinstance(getattr(inner.rotary_emb, "rope_type", None), dict)
        tables = {}
        for kind in dict.fromkeys(block.rotary for block in self.blocks):
            local = kind == SLIDING and hasattr(inner, "rotary_emb_local")  # transformers 4's Gemma 3
            embed = inner.rotary_emb_local if local else inner.rotary_emb
            cos, sin = embed(like, ids, kind) if by_kind else embed(like, ids)
            signed = torch.cat((-sin[0, :, :half], sin[0, :, half:]), 1)
            tables[kind] = (cos[0].unsqueeze(1), signed.unsqueeze(1))
        return tables

    def joined(self, names: Sequence[str]) -> list[list[list[Joined | None]]]:
        """Per block and linear the adapters' weights, None where one does not target it; kept until one changes."""
        key = self._state(names)
        if self._joined is None or self._joined[0] != key:
            blocks = [[self._joined_layers(names, linear) for linear in block.linears] for block in self.blocks]
            self._joined = (key, blocks)
        return self._joined[1]

    def _joined_layers(self, names: Sequence[str], linear: Linear) -> list[Joined | None]:
        """Of each adapter its weights in layers that share their input; None for one that targets none of them."""
        layers = [self.base.adapted_layers.get(path) for path in linear.paths]
        first = next(filter(None, layers), None)
        if first is None:
            return [None] * len(names)
        numbers = [self.base.adapter_index(name) for name in names]
        if list(first.faster.siblings.layers) == layers:  # shared with passes of the model
            found = first.faster.siblings.joined(numbers, self.dtype)
            return [found.get(number) for number in numbers]
        joined = list[Joined | None]()
        for k in numbers:
            pairs = [(*layer.pairs[k], layer.scalings[k]) if layer and k in layer.pairs else None for layer in layers]
            joined.append(join(pairs, linear.widths, self.dtype) if any(pairs) else None)
        return joined

    def _state(self, names: Sequence[str]) -> tuple[object, ...]:
        """Equal as long as none of the adapters has changed."""
        # Versions tell of announced changes; torch's own counters of the others.
        writes = [sum(p._version for p in self.base.adapter_parameters(name)) for name in names]
        return (tuple(names), tuple(self.base.versions[name] for name in names), tuple(writes))
