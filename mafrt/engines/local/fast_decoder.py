"""Decoding for Llama-like models (Gemma 2 and 3, Llama, Mistral, Phi-3, Qwen2, Qwen3 and its MoE) in torch operations.

A decode step has dozens of small operations per layer, and on a small model or batch the Python overhead around them
dominates. Here query, key and value are one product, as are gate and up; masks are not rebuilt; shared prompts are
read once (`shared_prefix_attention.py`); adapters act on runs of rows. `agrees` compares the results with
`SharedBase.forward` when an engine starts; on a mismatch, or for any other model, the engine decodes with Hugging
Face's forward.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from mafrt.engines.local.decode_lora import FusedLora, RowAdapters, fuse
from mafrt.engines.local.decoder_block import (
    SLIDING,
    DecoderBlock,
    Linear,
    attention_kinds,
    norm_factors,
    rms_norm,
    window_of,
)
from mafrt.engines.local.kv_cache import KVCache, KVLayer, PromptKV, prefill
from mafrt.engines.local.shared_prefix_attention import SharedPrompts
from mafrt.engines.local.widened_linear import (
    ColumnMasks,
    NonFiniteAdapterError,
    Pairs,
    WidenedLinear,
    pays,
    pays_back,
    widen,
)

if TYPE_CHECKING:
    from mafrt.models.shared_base import SharedBase

log = logging.getLogger(__name__)

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


class LeanModel:
    """The frozen weights of a Llama-like model, laid out for decoding.

    Raises ValueError, with the reason, for a model that this code does not cover.
    """

    def __init__(self, base: SharedBase) -> None:
        config, inner = base.config, base.inner
        # Each of these reasons is only logged: the model's own forward decodes it then, slower and with the same
        # results.
        if config.model_type not in MODEL_TYPES or not hasattr(inner, "layers"):
            raise ValueError(f"model type {config.model_type}")
        if getattr(config, "use_bidirectional_attention", False):
            raise ValueError("attention to later tokens")
        self.cap = getattr(config, "attn_logit_softcapping", None)
        if self.cap is not None and config.model_type != "gemma2":
            raise ValueError("capped attention scores")
        kinds = attention_kinds(config)
        rope = getattr(inner.rotary_emb, "rope_type", "default")
        for name in rope.values() if isinstance(rope, dict) else [rope]:
            # Tables of the others depend on the length of the sequence, while here they are computed once for all
            # positions.
            if name not in ("default", "linear", "llama3", "yarn"):
                raise ValueError(f"rotary embedding {name}, which changes with the length")
        self.base = base
        self.heads, self.kv_heads = int(config.num_attention_heads), int(config.num_key_value_heads)
        self.head_dim = int(getattr(config, "head_dim", None) or config.hidden_size // self.heads)
        self.eps = float(config.rms_norm_eps)
        self.scale = float(inner.layers[0].self_attn.scaling)
        where = {module: path for path, module in base.model.named_modules()}
        self._source: list[Tensor] = []
        size = sum(p.numel() * p.element_size() for p in inner.layers.parameters())
        self.blocks = [
            self._block(layer, where, size <= FUSE_BYTES, kind) for layer, kind in zip(inner.layers, kinds, strict=True)
        ]
        if any(cos.shape[-1] != self.head_dim for cos, _ in self.rotary(1).values()):
            raise ValueError("a rotary embedding of a part of each head")
        self._seen = self._stamp()
        self._lora: tuple[object, list[list[FusedLora | None]]] | None = None
        self._widened: tuple[object, list[list[WidenedLinear | None]]] | None = None

    def _block(self, layer: Any, where: dict[nn.Module, str], copy: bool, kind: str) -> DecoderBlock:
        attention, linears = layer.self_attn, []
        experts = hasattr(layer.mlp, "experts")
        # The lean decoder calls experts as they are, so adapters on them would silently have no effect.
        if experts and any(path.startswith(f"{where[layer.mlp]}.") for path in self.base.linear_paths()):
            raise ValueError("experts that adapters may target")
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
            norms = ((attention.q_norm, self.heads), (attention.k_norm, self.kv_heads))
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
            window_of(self.base.config, kind),
            kind,
        )

    def _packed(self, weights: Sequence[Tensor]) -> Tensor | None:
        # The weights of a sharded base are there for the time of play only.
        return None if self.base.sharded else self.base.packed.of(*weights)

    def _stamp(self) -> int:
        # Torch counts the writes to a tensor, so that a change shows without a comparison of weights.
        return sum(weight._version for weight in self._source)

    @property
    def dtype(self) -> torch.dtype:
        return self._source[0].dtype

    @property
    def stale(self) -> bool:
        """Whether the frozen weights were written to since they were copied."""
        return self._stamp() != self._seen

    def rotary(self, positions: int) -> dict[str, tuple[Tensor, Tensor]]:
        """Kind of layer -> tables `[positions, 1, D]`: cos, and sin with the sign that `x cos + roll(x) sin` needs."""
        inner, half = self.base.inner, self.head_dim // 2
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

    def lora(self, names: Sequence[str], wide: bool) -> list[list[FusedLora | None]]:
        """Per block the fused adapters of its four linears; kept until one of them changes."""
        key = (*self._state(names), wide)
        if self._lora is None or self._lora[0] != key:
            like, adapters = self._source[0], self._pairs(names)
            stacks = [
                [fuse(adapters, linear.paths, linear.widths, like, wide) for linear in block.linears]
                for block in self.blocks
            ]
            self._lora = (key, stacks)
        return self._lora[1]

    def widened(self, rows: int, steps: int) -> tuple[list[list[WidenedLinear | None]], list[str]] | None:
        """Per block its linears with all adapters in them, and these adapters' names; None where that does not pay in
        so many steps.

        Neither depends on earlier batches, since a resumed run must compute what the whole one did to the last bit:
        all adapters of the base are among them, and layers that are there already count like those to be made.
        """
        among = sorted(self.base.records)
        adapters = self._pairs(among)
        linears = [linear for block in self.blocks for linear in block.linears]
        if not pays(adapters, self.blocks[0].linears, rows) or not pays_back(adapters, linears, steps):
            return None
        key = self._state(among)
        if self._widened is None or self._widened[0] != key:
            self._widened = None  # freed before the next is made
            try:
                layers = [[widen(adapters, linear) for linear in block.linears] for block in self.blocks]
            except NonFiniteAdapterError:
                return None
            self._widened = (key, layers)
        return self._widened[1], among

    def _pairs(self, names: Sequence[str]) -> list[Pairs]:
        adapters: list[Pairs] = []
        for name in names:
            layers = self.base.records[name].layers
            pairs = self.base.adapter_layers(name).items()
            adapters.append({path: (a, b, layers[path][1]) for path, (a, b) in pairs})
        return adapters

    def _state(self, names: Sequence[str]) -> tuple[object, ...]:
        """Equal as long as none of the adapters has changed."""
        # Versions tell of announced changes; torch's own counters of the others.
        writes = [sum(p._version for p in self.base.adapter_parameters(name)) for name in names]
        return (tuple(names), tuple(self.base.versions[name] for name in names), tuple(writes))


class LeanDecoder:
    """One batch in the middle of its generation.

    Args:
        model: the weights.
        prompts: keys and values of the prompts.
        owner: `[rows]`, on the host: which prompt each row goes on from; rows of one prompt lie side by side.
        adapters: adapter name of each row; rows of one adapter lie side by side, those of None last.
        steps: most tokens that will be fed to a row.
        form: of the adapters: "widened" (`widened_linear.py`), "narrow" or "wide" (`decode_lora.py`); "auto" is the one
            for the device and the batch.
    """

    def __init__(
        self,
        model: LeanModel,
        prompts: PromptKV,
        owner: Tensor,
        adapters: Sequence[str | None],
        steps: int,
        form: Literal["auto", "widened", "narrow", "wide"] = "auto",
    ) -> None:
        self.model = model
        device = model.base.device
        names = [name for name in dict.fromkeys(adapters) if name is not None]
        wide = form == "wide" or (form == "auto" and device.type != "cpu")
        self._lora: Sequence[Sequence[FusedLora | WidenedLinear | None]] | None = None
        self._columns: ColumnMasks | None = None
        self._rows: RowAdapters | None = None
        widened = None
        if names and not wide and form != "narrow":
            widened = model.widened(len(adapters), steps)
        if widened is not None:
            self._lora, names = widened
        elif names:
            self._lora = model.lora(names, wide)
        number = {name: k for k, name in enumerate(names)}
        index = torch.tensor([-1 if name is None else number[name] for name in adapters])
        if widened is not None:
            self._columns = ColumnMasks(index)
        elif names:
            self._rows = RowAdapters(index, len(names), wide, device, model.dtype)
        self._prompts = SharedPrompts(prompts, owner, model.cap)
        self._own = [KVLayer(dtype=self._prompts.dtype) for _ in model.blocks]
        self._position = prompts.lengths[owner].to(device)
        self._rotary = model.rotary(int(prompts.lengths.max()) + steps)
        self._turn()

    def step(self, tokens: Tensor) -> Tensor:
        """Feed one token per row `[rows]`; returns the hidden states `[rows, d]` after it, after the final norm."""
        inner = self.model.base.inner
        x = inner.embed_tokens(tokens)
        for number in range(len(self.model.blocks)):
            x = self.block(number, x)
        self.advance()
        return inner.norm(x)

    def block(self, number: int, x: Tensor) -> Tensor:
        """One decoder layer for the present position: `[rows, d]` -> `[rows, d]`."""
        model, block = self.model, self.model.blocks[number]
        heads, both, dim, eps = model.heads, model.heads + model.kv_heads, model.head_dim, model.eps
        h = rms_norm(x, block.norm_in, eps)
        qkv = self._product(number, 0, block.qkv, h).view(len(x), -1, dim)
        qk = qkv[:, :both]
        if block.head_norm is not None:
            qk = rms_norm(qk, block.head_norm, eps)
        cos, sin = self._rotary_now[block.rotary]
        qk = torch.addcmul(qk * cos, qk.roll(dim // 2, -1), sin)
        keys, values = self._own[number].update(qk[:, heads:].unsqueeze(2), qkv[:, both:].unsqueeze(2))
        h = self._prompts.attend(number, qk[:, :heads], keys, values, model.scale, block.window)
        x = self._added(number, 1, block.out, h, x, block.norm_out)
        h = rms_norm(x, block.norm_mlp, eps)
        if block.feed is None:  # of the families with experts, none norms their output
            mixed = block.mlp(h.unsqueeze(0))
            return x + (mixed[0] if isinstance(mixed, tuple) else mixed)[0]
        gate_up, down = block.feed
        gate, up = self._product(number, 2, gate_up, h).chunk(2, 1)
        h = block.act(gate).mul_(up)
        return self._added(number, 3, down, h, x, block.norm_mlp_out)

    def advance(self, positions: int = 1) -> None:
        """Go on to the next position of every row."""
        self._position += positions
        self._turn()

    def _turn(self) -> None:
        """Look up the rotation of the present positions."""
        last = min(len(cos) for cos, _ in self._rotary.values()) - 1
        place = self._position.clamp(max=last)  # after the last step there is no next position
        self._rotary_now = {kind: (cos[place], sin[place]) for kind, (cos, sin) in self._rotary.items()}

    def folded(self) -> PromptKV:
        """Keys and values of every row, own tokens included, as prompts of their own: one for each row."""
        return self._prompts.extended(self._own)

    def _added(self, block: int, linear: int, layer: Linear, h: Tensor, x: Tensor, norm: Tensor | None) -> Tensor:
        """`x` plus a linear layer's output for `h`, which is normed first if there is a norm."""
        if norm is None:
            return self._product(block, linear, layer, h, x)
        return x + rms_norm(self._product(block, linear, layer, h), norm, self.model.eps)

    def _product(self, block: int, linear: int, layer: Linear, h: Tensor, residual: Tensor | None = None) -> Tensor:
        """A linear layer with its adapters, plus `residual`."""
        lora = None if self._lora is None else self._lora[block][linear]
        if self._columns is not None and isinstance(lora, WidenedLinear):
            return self._columns.apply(lora, h, residual)
        out = layer(h, residual)
        if self._rows is not None and isinstance(lora, FusedLora):
            self._rows.add(out, h, lora)
        return out

    def keep(self, rows: Tensor) -> None:
        """Leave only the given rows `[kept]`, in order, in the batch."""
        for layer in self._own:
            layer.keep(rows)
        self._position = self._position[rows]
        self._turn()
        self._prompts.keep(rows.cpu())
        for each in (self._rows, self._columns):
            if each is not None:
                each.keep(rows)


def agrees(model: LeanModel, steps: int = 3) -> bool:
    """Whether the lean decoder computes what the model computes, for the bare base and each adapter.

    Two prompts of unequal length, several rows each, against Hugging Face's forward over the whole sequences. In
    float32 the hidden states have to be equal but for rounding. In lower precisions rounding alone reaches several
    percent after tens of layers, so every layer is compared by itself, from the input that the model gave it. A wrong
    rotation or mask shows as tens of percent.
    """
    base = model.base
    names: list[str | None] = [*base.adapters, None]
    # A few adapters and the bare base are enough: every adapter takes the same path.
    names = names[:3] + names[-1:] if len(names) > 4 else names
    tokens = torch.arange(7, 7 + 6 + steps) % base.config.vocab_size
    prompts: list[list[int]] = []
    owner: list[int] = []
    rows: list[str | None] = []
    for name in names:
        for length, samples in ((6, 2), (3, 1)):
            owner += [len(prompts)] * samples
            rows += [name] * samples
            prompts.append(tokens[:length].tolist())
    adapters = [base.adapter_index(name) for name in rows]
    _, kv = prefill(base, prompts, [adapters[owner.index(place)] for place in range(len(prompts))])
    decoder = LeanDecoder(model, kv, torch.tensor(owner), rows, steps)
    lengths = torch.tensor([len(prompts[place]) for place in owner])
    states = _layer_states(base, tokens.expand(len(owner), -1), torch.tensor(adapters))
    by_layer = states[0].dtype != torch.float32
    worst, limit = 0.0, 1.0 if by_layer else 1e-3
    for step in range(steps):
        expected = [state[torch.arange(len(owner)), lengths + step] for state in states]
        if by_layer:
            for number, (before, after) in enumerate(pairwise(expected)):
                computed = decoder.block(number, before.clone())
                worst = max(worst, _share_of_allowed(computed.float(), before.float(), after.float()))
            decoder.advance()
        else:
            computed = decoder.step(tokens[lengths + step].to(base.device))
            last = base.inner.norm(expected[-1])
            worst = max(worst, float((computed - last).abs().max() / last.abs().max()))
    log.debug("lean decoding differs by %.1e, limit %.1e", worst, limit)
    return worst <= limit


def _share_of_allowed(computed: Tensor, before: Tensor, after: Tensor) -> float:
    """Largest difference of a row over all that rounding may cause: a share of the update and of the sum."""
    allowed = 0.06 * (after - before).norm(dim=1) + 2**-7 * after.norm(dim=1)
    return float(((computed - after).norm(dim=1) / allowed).max())


def _layer_states(base: SharedBase, tokens: Tensor, adapters: Tensor) -> list[Tensor]:
    """The embeddings and the output of every decoder layer `[rows, T, d]`, by Hugging Face's forward."""
    states: list[Tensor] = []

    def keep(module: Any, given: Any, output: Any) -> None:
        states.append(output[0] if isinstance(output, tuple) else output)

    hooks = [layer.register_forward_hook(keep) for layer in base.inner.layers]
    ids = tokens.to(base.device)
    try:
        base.forward(ids, None, adapters, past_key_values=KVCache())  # with a cache rows are not packed
    finally:
        for hook in hooks:
            hook.remove()
    return [base.inner.embed_tokens(ids), *states]
