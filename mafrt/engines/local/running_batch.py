"""A batch in the middle of its generation: one step samples a token for every row, and further requests may join.

Joining keeps the rows that are there: the keys and values of their own tokens become a part of their prompts, so that
rows of any age continue side by side in one decoder.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from mafrt.core.types import Completion, Request, Stop
from mafrt.engines.local.own_cache import ModelCachePrompts
from mafrt.engines.local.sampler import Sampler
from mafrt.engines.local.stop_strings import StopStrings
from mafrt.engines.local.transcript_cache import TranscriptCache
from mafrt.models.decoder import DecodeModel, FoldingDecoder, RowDecoder
from mafrt.models.kv_cache import PromptKV, joined
from mafrt.models.outside_text import answer_text
from mafrt.models.state_prompts import StatePrompts

if TYPE_CHECKING:
    from mafrt.engines.local.grammar import Grammar
    from mafrt.engines.local.thoughts import Thought
    from mafrt.models.shared_base import SharedBase


@dataclass(frozen=True)
class SamplingGroup:
    """Requests with the same prompt and adapter."""

    adapter: str | None
    prompt: tuple[int, ...]
    members: tuple[int, ...]
    """their numbers"""


@dataclass
class SamplingRow:
    """One request while it is being sampled."""

    member: int
    request: Request
    limit: int
    ends: frozenset[int]
    """tokens that end it"""
    stops: StopStrings | None
    grammar: Grammar | None = None
    thought: Thought | None = None
    forced: list[int] = field(default_factory=list)
    """places of ids that were put in"""
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    stop: Stop | None = None

    def think(self, thought: Thought) -> None:
        """Note whether the newest token was put in, and look at it."""
        if thought.next is not None:
            self.forced.append(len(self.ids) - 1)
        thought.take(self.ids)

    @property
    def order(self) -> tuple[bool, str]:
        """Rows of one adapter lie side by side and those of the bare base last, as the decoder wants them."""
        return self.request.adapter is None, self.request.adapter or ""


@dataclass(frozen=True)
class EngineParts:
    """What all batches of an engine share."""

    base: SharedBase
    model: DecodeModel
    eos: frozenset[int]
    watch: Callable[[tuple[str, ...]], StopStrings | None]
    grammar: Callable[[str, frozenset[int]], Grammar]
    thought: Callable[[Request], Thought | None]
    transcripts: TranscriptCache | ModelCachePrompts | StatePrompts


class RunningBatch:
    """Sampling of some requests.

    Args:
        parts: the engine's.
        groups: the requests by prompt and adapter; those of one adapter side by side, those of None last.
        requests: the requests by number.
    """

    def __init__(self, parts: EngineParts, groups: Sequence[SamplingGroup], requests: Mapping[int, Request]) -> None:
        self._parts = parts
        self._decoder: RowDecoder | None = None
        self._prompts: PromptKV | ModelCachePrompts | None
        self.rows, self._owner, self._prompts, self._logits = self._prefilled(groups, requests)
        self._live = list(range(len(self.rows)))
        self._sampler = self._new_sampler()
        self._step = 0
        """of the sampler"""

    @property
    def live(self) -> int:
        """Rows that are being sampled."""
        return len(self._live)

    def step(self) -> list[SamplingRow]:
        """Sample one token for every live row; returns the rows that this has ended."""
        for place in self._live:
            if (grammar := self.rows[place].grammar) is not None:
                grammar.bar(self._logits[place])
        ids, logprobs, totals = self._sampler.drawn(self._logits, self._step)
        self._step += 1
        for place in self._live:
            if (thought := self.rows[place].thought) is not None and thought.next is not None:
                ids[place], logprobs[place] = thought.next, 0.0
        # All that the host needs of a step in one transfer, since each waits for the device. Doubles hold them exactly.
        tokens, scores, sums = torch.stack([part.double() for part in (ids, logprobs, totals)]).tolist()
        self._sampler.check(sums)
        ended = self._take([int(token) for token in tokens], scores)
        # The last forward is saved: nothing would be sampled from it.
        if not self._live:
            return ended
        decoder = self._made_decoder()
        if len(self._live) <= (1 - self._parts.model.compact_at) * len(self.rows):
            ids = ids[self._compact()]
        self._logits = self._parts.base.logits(decoder.step(ids))
        return ended

    def join(self, groups: Sequence[SamplingGroup], requests: Mapping[int, Request]) -> None:
        """Add requests to the batch."""
        rows, owner, prompts, logits = self._prefilled(groups, requests)
        decoder = self._made_decoder()
        if len(self._live) < len(self.rows):
            self._logits = self._logits[self._compact()]
        # Layer by layer from one form into the next, so that keys and values are hardly ever held twice.
        before_it = cast(FoldingDecoder, decoder).folded()
        if isinstance(prompts, ModelCachePrompts):
            prompts = cast(ModelCachePrompts, before_it).with_others(prompts)
        else:
            prompts = joined(before_it, prompts)
        before = len(self.rows)
        owner = [*range(before), *(before + number for number in owner)]
        # Sorted anew, since the decoder needs rows of one adapter side by side.
        both = [*self.rows, *rows]
        order = sorted(range(len(both)), key=lambda place: both[place].order)
        self.rows = [both[place] for place in order]
        self._owner, self._prompts = [owner[place] for place in order], prompts
        self._logits = torch.cat((self._logits, logits))[torch.tensor(order, device=logits.device)]
        self._live = list(range(len(self.rows)))
        # The new sampler skips the uniforms that each row has used, so samples do not depend on who joined when.
        self._sampler, self._step = self._new_sampler(), 0
        # Made again at the next step: its buffers are laid out for a fixed number of rows.
        self._decoder = None

    def _prefilled(
        self, groups: Sequence[SamplingGroup], requests: Mapping[int, Request]
    ) -> tuple[list[SamplingRow], list[int], PromptKV | ModelCachePrompts, Tensor]:
        """Rows, the prompt of each, the prompts as they were read, and the logits after the prompt of each row."""
        base, rows, owner = self._parts.base, [], []
        for number, group in enumerate(groups):
            room = base.context_window - len(group.prompt)
            for member in group.members:
                request = requests[member]
                limit = min(request.sampling.max_new_tokens, room)
                ids = request.sampling.stop_ids
                ends = self._parts.eos if ids is None else frozenset(ids)
                row = SamplingRow(member, request, limit, ends, self._parts.watch(request.sampling.stop))
                if request.sampling.schema:  # such an answer has no room for a thought
                    row.grammar = self._parts.grammar(request.sampling.schema, ends)
                elif request.sampling.thinking_budget:
                    row.thought = self._parts.thought(request)
                rows.append(row)
                owner.append(number)
        index = [base.adapter_index(group.adapter) for group in groups]
        starts = [base.active_from(group.adapter, group.prompt) for group in groups]
        hidden, prompts = self._parts.transcripts.prefill([group.prompt for group in groups], index, starts)
        return rows, owner, prompts, base.logits(hidden)[torch.tensor(owner, device=base.device)]

    def _left(self) -> int:
        return max(row.limit - len(row.ids) for row in self.rows)

    def _new_sampler(self) -> Sampler:
        return Sampler(
            [row.request.sampling for row in self.rows],
            [row.request.seed for row in self.rows],
            [row.request.adapter for row in self.rows],
            self._left(),
            self._parts.base.device,
            begun=[len(row.ids) for row in self.rows],
        )

    def _made_decoder(self) -> RowDecoder:
        if self._decoder is None:
            assert self._prompts is not None
            if isinstance(self._prompts, ModelCachePrompts):
                self._decoder = self._prompts.decoder(self._owner)
            else:
                names = [row.request.adapter for row in self.rows]
                self._decoder = self._parts.model.decoder(self._prompts, self._owner, names, self._left())
            self._prompts = None  # the decoder has what it needs of them
        return self._decoder

    def _take(self, ids: list[int], logprobs: list[float]) -> list[SamplingRow]:
        """Give every live row its token; returns the rows that it ended."""
        rows, ended, live = self.rows, [], []
        for place in self._live:
            row, token = rows[place], ids[place]
            row.ids.append(token)
            row.logprobs.append(logprobs[place])
            if row.thought is not None:
                row.think(row.thought)
            if row.grammar is not None:
                row.grammar.take(token)
            # Before the stop strings, so that a turn which ends in both counts as ended by itself.
            if token in row.ends:
                row.stop = "eos"
            elif row.stops is not None and row.stops.hit(row.ids):
                row.stop = "stop"
            elif len(row.ids) == row.limit:
                row.stop = "length"
            if row.stop is None:
                live.append(place)
            else:
                ended.append(row)
        self._live = live
        return ended

    def _compact(self) -> Tensor:
        """Take the ended rows out; returns the places of the others."""
        assert self._decoder is not None
        live_rows = torch.tensor(self._live, device=self._parts.base.device)
        self.rows = [self.rows[place] for place in self._live]
        self._live = list(range(len(self.rows)))
        self._sampler.keep(live_rows)
        self._decoder.keep(live_rows)
        return live_rows


def completion_of(row: SamplingRow, base: SharedBase) -> Completion:
    """The completion of a row that has ended."""
    assert row.stop is not None
    name = row.request.adapter
    return Completion(
        ids=row.ids,
        logprobs=row.logprobs,
        stop=row.stop,
        text=answer_text(base.tokenizer, row.ids, base.eos_ids),
        # Recorded with the turn, since an update may follow before the turn is learnt from.
        adapter_version=0 if name is None else base.versions[name],
        forced=tuple(row.forced),
    )
