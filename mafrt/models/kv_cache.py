"""Keys and values: buffers that grow in place, and the prefill that fills those of the prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers.cache_utils import Cache, CacheLayerMixin

if TYPE_CHECKING:
    from mafrt.models.shared_base import SharedBase

PREFILL_TOKENS = {"cpu": 1024, "cuda": 16384}
"""Padded tokens in one prefill forward, by device type. Small enough that prompts of like length go together and
little is padded; large enough that the matrix products run at full speed."""

_FIRST_CAPACITY = 32


class KVLayer(CacheLayerMixin):
    """One layer's keys and values `[rows, kv heads, capacity, head dim]`, of which `used` positions are filled.

    `update` returns views; a step copies the new positions only. The capacity doubles when it runs out. They are kept
    as `dtype`, by default that of the first.

    Written against the interface that models and mask functions call, which is the same in transformers 4.57 and 5.x
    but for the argument of `get_mask_sizes`; no tensor of theirs is inherited.
    """

    is_sliding = False
    is_compileable = False
    is_croppable = False

    keys: Any
    values: Any

    def __init__(self, capacity: int = _FIRST_CAPACITY, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.capacity = capacity
        self.dtype = dtype
        self.used = 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor | None = None) -> None:
        """Nothing to do: buffers are made by the first `update`."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append `[rows, kv heads, steps, head dim]`; returns everything stored so far, as views."""
        steps = key_states.shape[2]
        if self.keys is None and steps == self.capacity and self.dtype in (None, key_states.dtype):
            # A prefill fills its cache in one go: keep the model's tensors.
            self.keys, self.values = key_states, value_states
        else:
            if self.keys is None or self.used + steps > self.capacity:
                # Doubling keeps all copies of a generation together proportional to its length.
                self.capacity = max(self.used + steps, self.capacity if self.keys is None else 2 * self.capacity)
                self.keys, self.values = self._room(key_states, self.keys), self._room(value_states, self.values)
            self.keys[:, :, self.used : self.used + steps] = key_states
            self.values[:, :, self.used : self.used + steps] = value_states
        self.is_initialized = True
        self.used += steps
        return self.keys[:, :, : self.used], self.values[:, :, : self.used]

    def _room(self, like: Tensor, held: Tensor | None) -> Tensor:
        """Room for `capacity` steps of rows as in `like`, with what is held; unfilled beyond, which nothing reads."""
        room = like.new_empty(like.shape[0], like.shape[1], self.capacity, like.shape[3], dtype=self.dtype)
        if held is not None:
            room[:, :, : self.used] = held[:, :, : self.used]
        return room

    def keep(self, rows: Tensor) -> None:
        """Leave only the given rows `[kept]`."""
        if self.keys is not None:
            remaining = (whole[:, :, : self.used].index_select(0, rows) for whole in (self.keys, self.values))
            self.keys, self.values = (self._room(buffer, buffer) for buffer in remaining)

    def get_seq_length(self, *args: Any) -> int:
        return self.used

    def get_mask_sizes(self, query: int | Tensor) -> tuple[int, int]:
        """(length, offset) of the keys that the next queries see; `query` is their number, or 4.57's positions."""
        return self.used + (query if isinstance(query, int) else query.shape[0]), 0

    def get_max_length(self) -> int:
        return -1

    get_max_cache_shape = get_max_length


class KVCache(Cache):
    """A Hugging Face cache of `KVLayer`s, made as the model asks for them."""

    layers: list[Any]

    def __init__(self, capacity: int = _FIRST_CAPACITY) -> None:
        make: Any = partial(KVLayer, capacity)
        super().__init__(layer_class_to_replicate=make)

    def keep(self, rows: Tensor) -> None:
        for layer in self.layers:
            layer.keep(rows)


@dataclass
class PromptKV:
    """Keys and values of prompts: per layer `[prompts, kv heads, longest, head dim]`, filled from position 0 on.

    Beyond a prompt's own length lies padding (finite numbers that must be masked). `lengths` `[prompts]`, on the
    host.
    """

    keys: list[Tensor]
    values: list[Tensor]
    lengths: Tensor
    states: list[tuple[Tensor, ...]] = field(default_factory=list)
    """of layers that have no keys and values, `[prompts, ...]` each"""

    @property
    def longest(self) -> int:
        return int(self.keys[0].shape[2])

    def select(self, prompts: Tensor) -> PromptKV:
        """The given prompts only `[selected]` (with repetition, if asked for); unused positions are cut."""
        lengths = self.lengths[prompts.cpu()]
        span = int(lengths.max())
        keys, values = ([t[:, :, :span].index_select(0, prompts) for t in ts] for ts in (self.keys, self.values))
        return PromptKV(keys, values, lengths)


def joined(first: PromptKV, second: PromptKV) -> PromptKV:
    """The prompts of both, padded to the longer; their own keys and values are let go layer by layer."""
    span = max(first.longest, second.longest)

    def both(some: list[Tensor], others: list[Tensor]) -> list[Tensor]:
        made = []
        while some:
            pair = some.pop(0), others.pop(0)
            made.append(torch.cat([functional.pad(t, (0, 0, 0, span - t.shape[2])) for t in pair]))
        return made

    lengths = torch.cat((first.lengths, second.lengths))
    pairs = (zip(*layers, strict=True) for layers in zip(first.states, second.states, strict=True))
    states = [tuple(torch.cat(pair) for pair in layer) for layer in pairs]
    return PromptKV(both(first.keys, second.keys), both(first.values, second.values), lengths, states)


def prefill(base: SharedBase, prompts: Sequence[Sequence[int]], adapters: Sequence[int]) -> tuple[Tensor, PromptKV]:
    """Hidden states after each prompt's last token `[prompts, d]`, and keys and values of all of it."""
    device = base.device
    last: Tensor | None = None
    kv: PromptKV | None = None
    for chunk in chunked([len(p) for p in prompts], PREFILL_TOKENS.get(device.type, 16384)):
        # Padded on the right, since causal attention needs no mask then; each adapter's tokens are one run.
        chunk.sort(key=lambda i: adapters[i])
        lengths = torch.tensor([len(prompts[i]) for i in chunk])
        span = int(lengths.max())
        ids = torch.full((len(chunk), span), base.pad_id)
        for row, i in enumerate(chunk):
            ids[row, : len(prompts[i])] = torch.as_tensor(prompts[i])
        cache = KVCache(span)
        index = torch.tensor([adapters[i] for i in chunk])
        hidden = base.forward(ids.to(device), None, index, past_key_values=cache)
        ends = hidden[torch.arange(len(chunk), device=device), lengths.to(device) - 1]
        if last is None or kv is None:
            if chunk == list(range(len(prompts))):
                return ends, PromptKV([c.keys for c in cache.layers], [c.values for c in cache.layers], lengths)
            last = ends.new_empty(len(prompts), ends.shape[1])
            kv = _empty_like(cache, len(prompts), max(len(p) for p in prompts))
        where = torch.tensor(chunk, device=device)
        last[where] = ends
        kv.lengths[torch.tensor(chunk)] = lengths
        for layer, source in enumerate(cache.layers):
            kv.keys[layer][:, :, :span].index_copy_(0, where, source.keys)
            kv.values[layer][:, :, :span].index_copy_(0, where, source.values)
    assert last is not None and kv is not None
    return last, kv


def _empty_like(cache: KVCache, prompts: int, span: int) -> PromptKV:
    # Zeros, and not uninitialised memory: masked values are still multiplied by zero, and zero times NaN is NaN.
    keys, values = (
        [t.new_zeros(prompts, t.shape[1], span, t.shape[3]) for t in ts]
        for ts in ([layer.keys for layer in cache.layers], [layer.values for layer in cache.layers])
    )
    return PromptKV(keys, values, torch.zeros(prompts, dtype=torch.long))


def chunked(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Positions sorted by length and cut where a chunk, padded to its longest, would exceed `budget` tokens."""
    chunks: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lengths.__getitem__):
        if not chunks or (len(chunks[-1]) + 1) * lengths[i] > budget:
            chunks.append([])
        chunks[-1].append(i)
    return chunks
