"""Decoding for Llama-like models in few launches: a GPU's step takes as long as the host needs to launch its kernels.

Query, key and value are one product, as are gate and up; residuals are summands of products; all else of a layer but
attention is five kernels (`decode_ops`), adapters included, however many there are. Every row writes keys and values at
its own position, counted on the device, so that nothing is padded on the left and no step makes a mask.

A step is recorded as a CUDA graph once the batch has made a few steps, and given to the GPU as one launch from then on,
until rows leave or the buffers grow. A recorded step reads the buffers as far as they are laid out, with a mask.

Covered are Llama, Mistral without a window, Qwen2, Qwen3 and Qwen3.5, in any number format.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mafrt.models.decoder import DecodeModel, FoldingDecoder, where_it_agrees
from mafrt.models.gpu import decode_ops
from mafrt.models.gpu.graphs import Recorder
from mafrt.models.gpu.mixers import Attention, GatedAttention, GatedDelta, Mixer, Rows, factors
from mafrt.models.kv_cache import PromptKV, prefill
from mafrt.models.state_prompts import StatePrompts
from mafrt.models.tensors import moved

if TYPE_CHECKING:
    from mafrt.models.shared_base import SharedBase


MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3", "qwen3_5_text")
HYBRIDS = ("qwen3_5_text",)
GROUPS = 4
"""groups of linear layers of a block that share their input: into what mixes tokens, out of it, and the MLP's two"""
MLP = (("mlp", ("gate_proj", "up_proj")), ("mlp", ("down_proj",)))
RECORD_AFTER = 1
"""steps on the same buffers after which a step is recorded, which takes as long as a few of them"""
WORTH = 8
"""steps that must be left then"""
ROOM = 64
"""positions by which the buffers of keys and values grow, at least; a multiple of 16, as kernels want their masks"""


@dataclass
class Linear:
    """Linear layers that share their input, as one."""

    weight: Tensor
    """`[out, in]`, of which the layers' own weights are parts"""
    bias: Tensor | None
    paths: list[str]
    widths: list[int]
    """out features of each layer"""


@dataclass
class Block:
    """One decoder layer."""

    norm_in: Tensor
    norm_mlp: Tensor
    mixer: Mixer
    linears: list[Linear]
    """as of `GROUPS`"""


@dataclass
class Adapters:
    """The adapters of a batch in the linear layers of one group, as `decode_ops` reads them."""

    down: Tensor
    """`[K, layers, P, in]`"""
    up: Tensor
    """`[K, out, P]`"""
    scale: Tensor
    """`[K, layers]` float32"""


Pair = tuple[Tensor | None, Tensor | None]
"""both, or neither where no adapter acts"""


class LeanModel(DecodeModel):
    """The weights of a Llama-like model as decoding reads them; ValueError for a model that it does not cover."""

    name = "lean"
    compact_at = 1 / 2  # a step is recorded anew then, and a finished row costs a GPU little

    def __init__(self, base: SharedBase) -> None:
        super().__init__(base)
        config, inner = base.config, base.inner
        if config.model_type not in MODEL_TYPES or not hasattr(inner, "layers"):
            raise ValueError(f"model type {config.model_type}")
        self.stateful = config.model_type in HYBRIDS
        kinds = {"full_attention", "linear_attention"} if self.stateful else {"full_attention"}
        windows = set(getattr(config, "layer_types", None) or ()) - kinds
        if windows or (config.model_type == "mistral" and config.sliding_window is not None):
            raise ValueError("attention in windows")
        if getattr(inner.rotary_emb, "rope_type", "default") not in ("default", "linear", "llama3", "yarn"):
            raise ValueError("a rotary embedding that changes with the length")
        self.eps = float(config.rms_norm_eps)
        paths = {module: path for path, module in base.model.named_modules()}
        self.blocks = [self._block(layer, paths) for layer in inner.layers]
        self.norm = factors(inner.norm, self.stateful)
        whole = {block.mixer.rotated for block in self.blocks} - {None}
        if whole - {self.rotary(1)[0].shape[-1]}:
            raise ValueError("a rotary embedding of a part of each head")
        self._watched = [p for layer in inner.layers for p in layer.parameters() if not p.requires_grad]
        self._seen = self._stamp()
        self.recorder = Recorder(base.device) if base.device.type == "cuda" else None
        self._adapters: tuple[object, list[list[Adapters | None]]] | None = None

    def _block(self, layer: Any, paths: dict[nn.Module, str]) -> Block:
        linears: list[Linear] = []
        kind: type[Mixer] = Attention
        if self.stateful:
            kind = GatedDelta if hasattr(layer, GatedDelta.holder) else GatedAttention
        for holder, names in ((kind.holder, kind.into), (kind.holder, kind.out), *MLP):
            parent = getattr(layer, holder)
            # Below an adapter's wrapper: what adapters add is computed for all layers of the group.
            parts = [getattr(getattr(parent, name), "base_layer", getattr(parent, name)) for name in names]
            if any(type(part) is not nn.Linear for part in parts):
                raise ValueError("linear layers of its own kind")
            bias = None
            if any(part.bias is not None for part in parts):
                # Qwen 2 has biases in some of these layers only; zeros stand for the others.
                bias = torch.cat([p.weight.new_zeros(len(p.weight)) if p.bias is None else p.bias for p in parts])
            widths = [len(part.weight) for part in parts]
            linears.append(Linear(_as_one(parts), bias, [f"{paths[parent]}.{name}" for name in names], widths))
        if not _is_silu(layer.mlp.act_fn):
            raise ValueError("an activation that is not SiLU")
        mixer = kind(getattr(layer, kind.holder), linears[0].widths, self.eps)
        before, between = layer.input_layernorm, layer.post_attention_layernorm
        return Block(factors(before, self.stateful), factors(between, self.stateful), mixer, linears)

    def _stamp(self) -> int:
        # Torch counts the writes to a tensor, so that a change shows without a comparison of weights.
        return sum(weight._version for weight in self._watched)

    @property
    def stale(self) -> bool:  # type: ignore[override]
        return self._stamp() != self._seen

    def rotary(self, positions: int) -> tuple[Tensor, Tensor]:
        """Tables `[positions, D]`: cos, and sin with the sign that `x cos + roll(x) sin` needs."""
        inner = self.base.inner
        ids = torch.arange(positions, device=self.base.device).unsqueeze(0)
        if hasattr(inner.rotary_emb, "mrope_section"):  # of time, height and width, which older versions want told
            ids = ids.expand(3, 1, -1)
        cos, sin = inner.rotary_emb(inner.norm.weight.new_empty(1, 1, 1), ids)
        half = cos.shape[-1] // 2
        return cos[0], torch.cat((-sin[0, :, :half], sin[0, :, half:]), 1)

    def adapters(self, names: Sequence[str]) -> list[list[Adapters | None]]:
        """By block and group, None where no adapter acts; laid out anew when one of them has changed."""
        writes = tuple(sum(p._version for p in self.base.adapter_parameters(name)) for name in names)
        key = (tuple(names), tuple(self.base.versions[name] for name in names), writes)
        if self._adapters is None or self._adapters[0] != key:
            self._adapters = None  # let go before the others are made
            self._adapters = (key, self._laid_out(names))
        return self._adapters[1]

    def _laid_out(self, names: Sequence[str]) -> list[list[Adapters | None]]:
        numbers = [self.base.adapter_index(name) for name in names]
        into, source = list[Tensor](), list[Tensor]()
        made, scales = list[list[Adapters | None]](), list[Tensor]()
        for block in self.blocks:
            made.append([])
            for linear in block.linears:
                layers = [self.base.adapted_layers.get(path) for path in linear.paths]
                acting = [
                    (n, m, layer, k)
                    for n, k in enumerate(numbers)
                    for m, layer in enumerate(layers)
                    if layer is not None and k in layer.pairs
                ]
                if not acting:
                    made[-1].append(None)
                    continue
                ranks = {layer.ranks[k] for _, _, layer, k in acting}
                space = -(-max(ranks) // decode_ops.STEP) * decode_ops.STEP
                full = ranks == {space} and len(acting) == len(numbers) * len(layers)
                empty = linear.weight.new_empty if full else linear.weight.new_zeros
                down = empty(len(numbers), len(layers), space, linear.weight.shape[1])
                up = empty(len(numbers), len(linear.weight), space)
                scale = torch.zeros(len(numbers), len(layers))
                for n, m, layer, k in acting:
                    first = sum(linear.widths[:m])
                    into += [down[n, m, : layer.ranks[k]], up[n, first : first + linear.widths[m], : layer.ranks[k]]]
                    source += [side.detach() for side in layer.pairs[k]]
                    scale[n, m] = layer.scalings[k]
                scales.append(scale)
                made[-1].append(Adapters(down, up, scale))
        if into:
            torch._foreach_copy_(into, source)
            there = iter(moved(scales, into[0].device))
            for adapters in (one for groups in made for one in groups if one is not None):
                adapters.scale = next(there)
        return made

    def prefill(self, prompts: Sequence[Sequence[int]], adapters: Sequence[int]) -> PromptKV:
        """Prompts as `decoder` takes them."""
        if self.stateful:
            return StatePrompts(self.base).prefill(prompts, adapters, [0] * len(prompts))[1]
        return prefill(self.base, prompts, adapters)[1]

    def decoder(
        self, prompts: PromptKV, owner: Sequence[int], adapters: Sequence[str | None], steps: int
    ) -> FoldingDecoder:
        return LeanDecoder(self, prompts, owner, adapters, steps)


class LeanDecoder:
    """One batch in the middle of its generation; arguments as of `DecodeModel.decoder`."""

    def __init__(
        self,
        model: LeanModel,
        prompts: PromptKV,
        owner: Sequence[int],
        adapters: Sequence[str | None],
        steps: int,
    ) -> None:
        self.model = model
        device = model.base.device
        names = [name for name in dict.fromkeys(adapters) if name is not None]
        none: list[Adapters | None] = [None] * GROUPS
        self._layers = model.adapters(names) if names else [none] * len(model.blocks)
        number = {name: n for n, name in enumerate(names)}
        self._lengths = prompts.lengths[list(owner)]
        """tokens of every row so far, on the host"""
        index = torch.tensor([-1 if name is None else number[name] for name in adapters])
        # All that the device needs to know of the rows in one transfer.
        self._position, self._index, places = moved([self._lengths, index, torch.tensor(owner)], device)
        self._last = int(self._lengths.max()) + steps
        self._rows = torch.arange(len(owner), device=device)
        self._even = bool((self._lengths == self._lengths[0]).all())
        """whether all rows are at the same position, so that nothing has to be masked"""
        plain = list(owner) == list(range(len(prompts.lengths)))
        capacity = _rounded(prompts.longest + min(steps, ROOM))
        self._keys, self._values = list[Tensor](), list[Tensor]()
        while prompts.keys:
            for buffers, given in ((self._keys, prompts.keys.pop(0)), (self._values, prompts.values.pop(0))):
                buffers.append(_grown(given if plain else given.index_select(0, places), capacity))
        self._states = [
            tuple(state if plain else state.index_select(0, places) for state in layer) for layer in prompts.states
        ]
        self._cos, self._sin = model.rotary(self._last + 1)
        self._tokens = torch.empty_like(self._position)
        """the tokens that a recorded step is fed"""
        self._look()

    def _look(self) -> None:
        """Make anew what depends on the rows and on the capacity."""
        self._steps = 0
        self._recorded: Callable[[], Tensor] | None = None
        capacity = self._keys[0].shape[2]
        dtype = self._keys[0].dtype
        # Numbers to add to the scores; a step opens one more position of each row.
        hidden = torch.arange(capacity, device=self._rows.device) >= self._position.unsqueeze(1)
        self._bias = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, -torch.inf)

    def step(self, tokens: Tensor) -> Tensor:
        """Feed one token per row `[rows]`; returns the hidden states `[rows, d]` after it, after the final norm.

        They are to be used before the next step, which may write others in their place.
        """
        used, even = int(self._lengths.max()) + 1, self._even
        if used > self._keys[0].shape[2]:
            self._grow()
        self._lengths = self._lengths + 1
        recorder = self.model.recorder
        if recorder is not None and recorder.works and self._steps in (RECORD_AFTER - 1, RECORD_AFTER):
            self._open()
            # The first of these is launched as it is, so that its kernels are there when the second is recorded.
            used, even = self._keys[0].shape[2], False
            if self._steps == RECORD_AFTER and min(used, self._last) - int(self._lengths.max()) >= WORTH:
                self._recorded = recorder.record(lambda: self._forward(self._tokens, used, even=False))
        self._steps += 1
        if self._recorded is not None:
            self._tokens.copy_(tokens)
            return self._recorded()
        return self._forward(tokens, used, even=even)

    def _forward(self, tokens: Tensor, used: int, *, even: bool) -> Tensor:
        """A step over the first `used` positions of the buffers; `even`: none of them is hidden from any row."""
        model, at = self.model, self._position
        x = F.embedding(tokens, model.base.inner.embed_tokens.weight)
        bias = None
        if not even:
            self._bias.scatter_(1, at.unsqueeze(1), 0.0)
            bias = self._bias[:, None, None, :used]
        rows = Rows(self._index, at, self._cos.index_select(0, at), self._sin.index_select(0, at), bias, used)
        low: Pair = (None, None)
        keys, states = zip(self._keys, self._values, strict=True), iter(self._states)
        for block, groups in zip(model.blocks, self._layers, strict=True):
            x, low = self._block(block, groups, x, low, rows, next(states if block.mixer.recurrent else keys))
        h: Tensor = decode_ops.normed(x, *low, self._index, model.norm, model.eps, None, None)[1]
        at.add_(1)
        return h

    def _open(self) -> None:
        """Show in the mask what steps without one have filled."""
        places = torch.arange(self._bias.shape[1], device=self._bias.device)
        self._bias.masked_fill_(places < self._position.unsqueeze(1), 0.0)

    def _block(
        self,
        block: Block,
        groups: Sequence[Adapters | None],
        x: Tensor,
        low: Pair,
        rows: Rows,
        cache: tuple[Tensor, ...],
    ) -> tuple[Tensor, Pair]:
        """The residual without what the adapters of its last layer add, and that, which the next norm takes in."""
        model, index = self.model, self._index
        into, out, gate_up, down = block.linears
        of_in, of_out, of_gate_up, of_down = groups
        x, h, inner = decode_ops.normed(x, *low, index, block.norm_in, model.eps, *_read(of_in))
        h = block.mixer(F.linear(h, into.weight, into.bias), *_added(inner, of_in), rows, cache)
        inner = None if of_out is None else decode_ops.lowered(h, index, *_read(of_out))
        x, low = _onto(x, h, out), _added(inner, of_out)
        x, h, inner = decode_ops.normed(x, *low, index, block.norm_mlp, model.eps, *_read(of_gate_up))
        h = F.linear(h, gate_up.weight, gate_up.bias)
        h, inner = decode_ops.gated(h, *_added(inner, of_gate_up), index, *_read(of_down))
        return _onto(x, h, down), _added(inner, of_down)

    def _grow(self) -> None:
        """A quarter more positions, layer by layer."""
        used = int(self._lengths.max()) + 1
        capacity = _rounded(min(self._last, used + max(ROOM, used // 4)))
        for buffers in (self._keys, self._values):
            for number in range(len(buffers)):
                buffers[number] = _grown(buffers[number], capacity)
        self._look()

    def folded(self) -> PromptKV:
        """Keys and values of every row, own tokens included, as prompts of their own: one for each row."""
        longest = int(self._lengths.max())
        keys, values = ([t[:, :, :longest] for t in buffers] for buffers in (self._keys, self._values))
        self._keys, self._values = [], []
        return PromptKV(keys, values, self._lengths, self._states)

    def keep(self, rows: Tensor) -> None:
        """Leave only the given rows `[kept]`, in order, in the batch."""
        for buffers in (self._keys, self._values):
            for number in range(len(buffers)):
                buffers[number] = buffers[number].index_select(0, rows)
        self._states = [tuple(state.index_select(0, rows) for state in layer) for layer in self._states]
        self._lengths = self._lengths[rows.cpu()]
        self._even = bool((self._lengths == self._lengths[0]).all())
        self._position, self._index = self._position[rows], self._index[rows]
        self._tokens = torch.empty_like(self._position)
        self._rows = self._rows[: len(rows)]
        self._look()


def _read(adapters: Adapters | None) -> Pair:
    """What takes the inner product."""
    return (None, None) if adapters is None else (adapters.down, adapters.scale)


def _added(inner: Tensor | None, adapters: Adapters | None) -> Pair:
    """The inner product and what adds it to the layers' outputs."""
    return (None, None) if adapters is None else (inner, adapters.up)


def _onto(x: Tensor, h: Tensor, linear: Linear) -> Tensor:
    """The residual, in place, with a layer's output."""
    x.addmm_(h, linear.weight.t())
    return x if linear.bias is None else x.add_(linear.bias)


def _as_one(parts: Sequence[Any]) -> Tensor:
    """The weights of layers as one matrix, whose parts are the layers' own from now on, so that none is held twice."""
    weights = [part.weight for part in parts]
    if len(weights) == 1:
        return cast(Tensor, weights[0].detach())
    first, begins = weights[0], weights[0].storage_offset()
    for weight in weights:
        same = weight.untyped_storage()._cdata == first.untyped_storage()._cdata
        if not same or weight.storage_offset() != begins or not weight.is_contiguous():
            break
        begins += weight.numel()
    else:
        rows = sum(len(weight) for weight in weights)
        return cast(Tensor, first.detach().as_strided((rows, first.shape[1]), (first.shape[1], 1)))
    whole = torch.cat([weight.detach() for weight in weights])
    for part, part_weight in zip(parts, whole.split([len(weight) for weight in weights]), strict=True):
        part.weight = nn.Parameter(part_weight, requires_grad=False)
    return whole


def _grown(buffer: Tensor, capacity: int) -> Tensor:
    """`[rows, kv heads, capacity, D]`; zeros and not unfilled, since what is masked is still multiplied by zero."""
    grown = buffer.new_zeros(*buffer.shape[:2], capacity, buffer.shape[3])
    grown[:, :, : buffer.shape[2]] = buffer
    return grown


def _rounded(positions: int) -> int:
    return -(-positions // 16) * 16


def _is_silu(act: Any) -> bool:
    probe = torch.linspace(-4, 4, 33)
    return isinstance(act, nn.SiLU) or torch.allclose(act(probe), F.silu(probe), atol=1e-6)


def decode_model(base: SharedBase) -> DecodeModel:
    """The lean form where it covers a model and agrees with it, else the reference."""
    return where_it_agrees(base, LeanModel, agrees)


def agrees(model: LeanModel, steps: int = 2) -> bool:
    """Whether it computes what the model's own forward computes, for the bare base and two adapters.

    In half precision rounding alone reaches several percent after tens of layers; a wrong rotation or mask shows as
    tens of percent.
    """
    base = model.base
    names: list[str | None] = [*list(base.adapters)[:2], None]
    tokens = torch.arange(7, 7 + 8 + steps) % base.config.vocab_size
    prompts = [tokens[: 6 - number].tolist() for number in range(len(names))]
    owner = [number for number in range(len(names)) for _ in range(2)]
    rows = [names[number] for number in owner]
    index = [base.adapter_index(name) for name in names]
    lean = model.decoder(model.prefill(prompts, index), owner, rows, steps)
    whole = torch.stack([torch.cat((tokens[: 6 - number], tokens[:steps], tokens[:number])) for number in owner])
    expected = base.forward(whole.to(base.device), None, torch.tensor([index[number] for number in owner]))
    ends = torch.tensor([5 - number for number in owner], device=base.device)
    limit = 1e-3 if base.model.dtype in (torch.float32, torch.float64) else 0.15
    for number in range(steps):
        fed = tokens[number : number + 1].expand(len(owner)).to(base.device)
        ours = lean.step(fed).float()
        theirs = expected[torch.arange(len(owner), device=base.device), ends + number + 1].float()
        if not bool(((ours - theirs).norm(dim=1) <= limit * theirs.norm(dim=1)).all()):
            return False
    return True
