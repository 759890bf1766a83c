"""Decoding with the cache that a model makes for itself, or with none: of any causal language model.

Recurrent and convolution states, compressed keys and whatever comes next year have no common layout, so rows are kept
together only while they are equally long: prompts of one length are read in one pass, without padding or masks, and the
rows that continue them have one cache. A model whose cache cannot be taken apart reads its rows anew for every token.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mafrt.engines.local.transcript_cache import TranscriptCache
from mafrt.models.decoder import ExpandedDecoder
from mafrt.models.family_checks import KNOWN, close, tokens_seen
from mafrt.models.kv_cache import PREFILL_TOKENS

if TYPE_CHECKING:
    from mafrt.models.shared_base import SharedBase

log = logging.getLogger(__name__)


@dataclass
class Part:
    """Rows of one length."""

    rows: list[int]
    length: int
    cache: Any
    """the model's; None: `ids` are read anew"""
    ids: Tensor
    """`[rows, length]`"""
    index: Tensor
    """`[rows, length]`: adapter of each token"""


class ModelCachePrompts:
    """Prompts that a model has read.

    Args:
        base: the model and its adapters.
        cached: whether its cache is kept; else rows are read anew.
    """

    def __init__(self, base: SharedBase, cached: bool) -> None:
        self.base, self.cached = base, cached
        self.parts: list[Part] = []

    def prefill(
        self, prompts: Sequence[Sequence[int]], adapters: Sequence[int], starts: Sequence[int]
    ) -> tuple[Tensor, ModelCachePrompts]:
        """Hidden states after each prompt's last token `[prompts, d]`, and the prompts read, in an object of their own.

        Args:
            prompts: token ids.
            adapters: index of each prompt's adapter.
            starts: position from which it acts.
        """
        read, states = ModelCachePrompts(self.base, self.cached), dict[int, Tensor]()
        for places in _of_one_length(prompts, PREFILL_TOKENS.get(self.base.device.type, 16384)):
            ids = torch.tensor([list(prompts[place]) for place in places], device=self.base.device)
            index = torch.tensor([[adapters[place]] * ids.shape[1] for place in places])
            for row, place in enumerate(places):
                index[row, : starts[place]] = -1
            hidden, cache = self._read(ids, index)
            states |= {place: hidden[row, -1] for row, place in enumerate(places)}
            read.parts.append(Part(places, ids.shape[1], cache, ids, index))
        return torch.stack([states[place] for place in range(len(prompts))]), read

    def _read(self, ids: Tensor, index: Tensor) -> tuple[Tensor, Any]:
        if self.cached:
            return self.base.read(ids, index)
        return self.base.forward(ids, None, index), None

    def decoder(self, owner: Sequence[int]) -> ModelCacheDecoder:
        """Rows that go on from these prompts; row n from prompt `owner[n]`."""
        parts = []
        for part in self.parts:
            rows = [row for row, prompt in enumerate(owner) if prompt in part.rows]
            take = torch.tensor([part.rows.index(owner[row]) for row in rows], dtype=torch.long)
            parts.append(_select(copy.copy(part), take, rows))
        return ModelCacheDecoder(self.base, parts)


class ModelCacheDecoder:
    """One batch in the middle of its generation."""

    def __init__(self, base: SharedBase, parts: Sequence[Part]) -> None:
        self.base, self.parts = base, [part for part in parts if part.rows]

    def step(self, tokens: Tensor) -> Tensor:
        """Feed one token per row `[rows]`; returns the hidden states `[rows, d]` after it."""
        states: dict[int, Tensor] = {}
        for part in self.parts:
            new, part.index = tokens[part.rows].unsqueeze(1), torch.cat((part.index, part.index[:, -1:]), 1)
            if part.cache is None:
                part.ids = torch.cat((part.ids, new), 1)
                hidden = self.base.forward(part.ids, None, part.index)
            else:
                hidden, part.cache = self.base.read(new, part.index, part.cache, part.length)
            part.length += 1
            states |= {place: hidden[row, -1] for row, place in enumerate(part.rows)}
        return torch.stack([states[place] for place in range(len(tokens))])

    def keep(self, rows: Tensor) -> None:
        """Leave only the given rows `[kept]` in the batch."""
        place = {row: number for number, row in enumerate(rows.tolist())}
        for part in self.parts:
            take = [number for number, row in enumerate(part.rows) if row in place]
            _select(part, torch.tensor(take, dtype=torch.long), [place[part.rows[number]] for number in take])
        self.parts = [part for part in self.parts if part.rows]


@torch.no_grad()
def way_of(base: SharedBase) -> TranscriptCache | ModelCachePrompts:
    """The first way of reading prompts and going on from them that computes what the model computes on whole rows.

    Keys and values in a common layout; else the model's own cache; else every row anew.
    """
    common = TranscriptCache(base)
    if base.config.model_type in KNOWN:
        return common
    for way in (common, ModelCachePrompts(base, cached=True)):
        try:
            if _agrees(base, way):
                return way
            reason = "its results differ from the model's"
        except Exception as error:  # whatever a new family raises means that it does not work this way
            reason = f"{type(error).__name__}: {error}"
        log.debug("decoding %s by %s: %s", base.name, type(way).__name__, reason)
    log.warning("The cache of %s cannot be kept, so that each token reads its row anew: exact, and slow.", base.name)
    return ModelCachePrompts(base, cached=False)


def _agrees(base: SharedBase, way: TranscriptCache | ModelCachePrompts, steps: int = 3) -> bool:
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(min(base.head_size, 1000), (2, 6 + steps), generator=draw)
    prompts, owner = [ids[0, :6].tolist(), ids[1, :3].tolist()], [0, 0, 1]
    rows, lengths = ids[owner].to(base.device), torch.tensor([6, 6, 3])
    expected = torch.cat([base.forward(row.unsqueeze(0), None, torch.tensor([-1])) for row in rows])
    _, read = way.prefill(prompts, [-1, -1], [0, 0])
    if isinstance(read, ModelCachePrompts):
        decoder: ModelCacheDecoder | ExpandedDecoder = read.decoder(owner)
    else:
        decoder = ExpandedDecoder(base, read, torch.tensor(owner), torch.tensor([-1] * 3))
    for step in range(steps):
        if step == 2:  # a row leaves
            decoder.keep(torch.tensor([1, 2], device=base.device))
            rows, lengths, expected = rows[1:], lengths[1:], expected[1:]
        each = torch.arange(len(rows))
        with tokens_seen(base) as seen:
            found = decoder.step(rows[each, lengths + step])
        # Layers that read compressed keys anew need the adapter of every token that was there before.
        if isinstance(decoder, ExpandedDecoder) and any(max(calls) > len(rows) for calls in seen.values()):
            return False
        if not close(found, expected[each, lengths + step]):
            return False
    return True


def _select(part: Part, take: Tensor, rows: list[int]) -> Part:
    """Leave the rows `take` of a part (with repetition, if asked for), as `rows` of the batch."""
    if part.cache is not None and len(take):
        part.cache.reorder_cache(take.to(part.ids.device))
    part.rows, part.index = rows, part.index[take]
    part.ids = part.ids[take.to(part.ids.device)]
    return part


def _of_one_length(prompts: Sequence[Sequence[int]], budget: int) -> list[list[int]]:
    """Places of prompts of one length together, at most `budget` tokens of them."""
    lengths: dict[int, list[int]] = {}
    for place, prompt in enumerate(prompts):
        lengths.setdefault(len(prompt), []).append(place)
    most = {length: max(1, budget // length) for length in lengths}
    return [
        places[at : at + most[length]]
        for length, places in lengths.items()
        for at in range(0, len(places), most[length])
    ]
