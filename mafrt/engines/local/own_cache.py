"""Decoding with the cache that a model makes for itself, or with none: of any causal language model.

Where a cache's layers are known (`mafrt.models.cache_rows`), rows of any length are one batch, padded on the left.
Whatever comes next year has no layout known here: rows are then kept together only while they are equally long, without
padding or masks. A model whose cache cannot be taken apart reads its rows anew for every token.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional

from mafrt.engines.local.transcript_cache import TranscriptCache
from mafrt.models import delta_rule
from mafrt.models.cache_rows import side_by_side
from mafrt.models.decoder import ExpandedDecoder
from mafrt.models.family_checks import KNOWN, close, tokens_seen
from mafrt.models.kv_cache import PREFILL_TOKENS, chunked
from mafrt.models.state_prompts import ending_together

if TYPE_CHECKING:
    from mafrt.models.shared_base import SharedBase

log = logging.getLogger(__name__)


@dataclass
class Part:
    """Rows that one pass reads. They end together, the shorter ones with padding on the left."""

    rows: list[int]
    ids: Tensor
    """`[rows, span]`"""
    index: Tensor
    """`[rows, span]` on the CPU: adapter of each token"""
    lengths: Tensor
    """`[rows]`: tokens of each"""
    real: Tensor | None
    """`[rows, span]`: 1 where there is no padding; None: there is none"""
    cache: Any
    """the model's; None: `ids` are read anew"""

    @property
    def span(self) -> int:
        return int(self.index.shape[1])


class ModelCachePrompts:
    """Prompts that a model has read.

    Args:
        base: the model and its adapters.
        cached: whether its cache is kept; else rows are read anew.
        aligned: whether rows of different length are read together, which needs a cache that is known
            (`mafrt.models.cache_rows`).
    """

    def __init__(self, base: SharedBase, cached: bool, aligned: bool = False) -> None:
        self.base, self.cached, self.aligned = base, cached, aligned
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
        base, read = self.base, ModelCachePrompts(self.base, self.cached, self.aligned)
        states = dict[int, Tensor]()
        budget = PREFILL_TOKENS.get(base.device.type, 16384)
        sizes = [len(prompt) for prompt in prompts]
        for places in chunked(sizes, budget) if self.aligned else _of_one_length(prompts, budget):
            ids, index, lengths, real = ending_together(base, prompts, adapters, starts, places)
            if self.cached:
                hidden, cache = base.read(ids, index, real=real)
            else:
                hidden, cache = base.forward(ids, None, index), None
            states |= {place: hidden[row, -1] for row, place in enumerate(places)}
            read.parts.append(Part(places, ids, index, lengths.to(base.device), real, cache))
        return torch.stack([states[place] for place in range(len(prompts))]), read

    def decoder(self, owner: Sequence[int]) -> ModelCacheDecoder:
        """Rows that go on from these prompts; row n from prompt `owner[n]`."""
        parts = []
        for part in self.parts:
            rows = [row for row, prompt in enumerate(owner) if prompt in part.rows]
            take = torch.tensor([part.rows.index(owner[row]) for row in rows], dtype=torch.long)
            if rows:
                parts.append(_select(copy.copy(part), take, rows))
        return ModelCacheDecoder(self.base, [_together(parts)] if self.aligned else parts, self)

    def with_others(self, others: ModelCachePrompts) -> ModelCachePrompts:
        """The prompts of both, those of `others` counted on."""
        both, before = copy.copy(self), sum(len(part.rows) for part in self.parts)
        counted = [replace(part, rows=[before + row for row in part.rows]) for part in others.parts]
        both.parts = [*self.parts, *counted]
        return both


class ModelCacheDecoder:
    """One batch in the middle of its generation."""

    def __init__(self, base: SharedBase, parts: Sequence[Part], prompts: ModelCachePrompts) -> None:
        self.base, self.parts, self._prompts = base, list(parts), prompts
        self._look()

    def _look(self) -> None:
        """Note where the rows of the batch lie in the parts; None: where they lie in the batch."""
        order = torch.tensor([row for part in self.parts for row in part.rows], dtype=torch.long)
        plain = bool((order[1:] > order[:-1]).all())
        # In one transfer, as each waits for the device.
        self._order = None if plain else torch.stack((order, order.argsort())).to(self.base.device)

    def step(self, tokens: Tensor) -> Tensor:
        """Feed one token per row `[rows]`; returns the hidden states `[rows, d]` after it."""
        states = list[Tensor]()
        fed = tokens if self._order is None else tokens[self._order[0]]
        for part, new in zip(self.parts, fed.unsqueeze(1).split([len(part.rows) for part in self.parts]), strict=True):
            part.index = torch.cat((part.index, part.index[:, -1:]), 1)
            if part.cache is None:
                part.ids = torch.cat((part.ids, new), 1)
                hidden = self.base.forward(part.ids, None, part.index)
            else:
                if part.real is not None:
                    part.real = functional.pad(part.real, (0, 1), value=1)
                at = part.lengths.unsqueeze(1)
                # A cache that is known copies each new state over the one before.
                with delta_rule.overwritten() if self._prompts.aligned else nullcontext():
                    hidden, part.cache = self.base.read(new, part.index, part.cache, at, part.real)
            part.lengths = part.lengths + 1
            states.append(hidden[:, -1])
        made = states[0] if len(states) == 1 else torch.cat(states)
        return made if self._order is None else made[self._order[1]]

    def keep(self, rows: Tensor) -> None:
        """Leave only the given rows `[kept]` in the batch."""
        place = {row: number for number, row in enumerate(rows.tolist())}
        for part in self.parts:
            take = [number for number, row in enumerate(part.rows) if row in place]
            _select(part, torch.tensor(take, dtype=torch.long), [place[part.rows[number]] for number in take])
        self.parts = [part for part in self.parts if part.rows]
        self._look()

    def folded(self) -> ModelCachePrompts:
        """Every row, own tokens included, as a prompt of its own. This decoder is at its end then."""
        folded = copy.copy(self._prompts)
        folded.parts = self.parts
        return folded


@torch.no_grad()
def way_of(base: SharedBase) -> TranscriptCache | ModelCachePrompts:
    """The first way of reading prompts and going on from them that computes what the model computes on whole rows.

    Keys and values in a common layout; the model's own cache, of rows of any length, or of one; every row anew.
    """
    common = TranscriptCache(base)
    if base.config.model_type in KNOWN:
        return common
    for way in (common, ModelCachePrompts(base, True, True), ModelCachePrompts(base, True)):
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
    there = take.to(part.ids.device)
    if part.cache is not None and len(take):
        part.cache.reorder_cache(there)
    part.rows, part.index = rows, part.index[take]
    part.ids, part.lengths = part.ids[there], part.lengths[there]
    part.real = None if part.real is None else part.real[there]
    return part


def _together(parts: Sequence[Part]) -> Part:
    """The rows of all parts in one."""
    if len(parts) == 1:
        return parts[0]
    span = max(part.span for part in parts)
    real = [part.ids.new_ones(part.index.shape) if part.real is None else part.real for part in parts]
    return Part(
        [row for part in parts for row in part.rows],
        torch.cat([part.ids[:, -1:] for part in parts]),  # those before are in the cache
        torch.cat([functional.pad(part.index, (span - part.span, 0), value=-1) for part in parts]),
        torch.cat([part.lengths for part in parts]),
        torch.cat([functional.pad(each, (span - each.shape[1], 0)) for each in real]),
        side_by_side([part.cache for part in parts], [part.span for part in parts]),
    )


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
