"""Prefill for adapters that begin with the action: transcripts are fed once, by the base, for all agents.

The keys and values of a transcript are the base's own (`mafrt.models.invocation`), so they serve every agent, and they
stay valid while adapters learn. A prompt is split at its invocation. The part before it is looked up: the longest
beginning that was fed before is reused, in this call or in an earlier one, and only the tokens after it are computed.
The invocation is then fed with the agent's adapter. T agents over one growing transcript of c tokens so compute c
tokens and the T invocations, where adapters on the whole prompt compute the transcript T times.

What is shared ends at the first difference: prompts that begin with a role prompt of their own share nothing.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mafrt.models.kv_cache import PREFILL_TOKENS, KVCache, KVLayer, PromptKV, chunked, joined, prefill

if TYPE_CHECKING:
    from mafrt.models.shared_base import SharedBase

CACHE_BYTES = 2**29
"""Keys and values kept between calls; the transcripts that were read longest ago go first."""
LEAST_SHARED = 16
"""Tokens of the shortest common beginning that is fed by itself."""


@dataclass(frozen=True)
class SequenceKV:
    """Keys and values of one sequence: per layer `[kv heads, tokens, head dim]`."""

    keys: list[Tensor]
    values: list[Tensor]

    @property
    def bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (*self.keys, *self.values))


class TranscriptCache:
    """The transcripts that the base has read.

    Args:
        base: without its adapters.
        max_bytes: of the keys and values that are kept.
    """

    def __init__(self, base: SharedBase, max_bytes: int = CACHE_BYTES) -> None:
        self.base, self.max_bytes = base, max_bytes
        self.computed = 0
        """tokens that were fed to the model, by the base or with an adapter"""
        self._fed: OrderedDict[tuple[int, ...], SequenceKV] = OrderedDict()
        self._sorted: list[tuple[int, ...]] = []
        """the same sequences, in the order of their tokens"""

    def clear(self) -> None:
        """Forget all transcripts."""
        self._fed.clear()
        self._sorted.clear()

    def prefill(
        self, prompts: Sequence[Sequence[int]], adapters: Sequence[int], starts: Sequence[int]
    ) -> tuple[Tensor, PromptKV]:
        """As `kv_cache.prefill`: hidden states after the last token of each prompt `[prompts, d]`, keys and values.

        `starts` is the position in each prompt from which its adapter acts; the tokens before it are the base's.
        """
        apart = [place for place, start in enumerate(starts) if start]
        if not apart:
            return prefill(self.base, prompts, adapters)
        if len(apart) < len(starts):
            return self._mixed(prompts, adapters, starts, apart)
        whole = [tuple(prompt) for prompt in prompts]
        read = sorted({prompt[:start] for prompt, start in zip(whole, starts, strict=True)})
        # Beginnings that several transcripts share are fed first, so that the rest of each continues from there.
        self._feed(_stems(read, [self._known(ids)[1] for ids in read]))
        self._feed(read)
        past = [(prompt[:start], start) for prompt, start in zip(whole, starts, strict=True)]
        rests = [prompt[start:] for prompt, start in zip(whole, starts, strict=True)]
        states, fed = self._extend(past, rests, adapters)
        self._trim()
        return states, _stacked(fed)

    def _mixed(
        self, prompts: Sequence[Sequence[int]], adapters: Sequence[int], starts: Sequence[int], apart: Sequence[int]
    ) -> tuple[Tensor, PromptKV]:
        """`prefill` of some prompts whose adapters act on all tokens, and of those at `apart`, where they do not."""
        rest = [place for place in range(len(prompts)) if not starts[place]]
        some, kv = prefill(self.base, [prompts[place] for place in rest], [adapters[place] for place in rest])
        others, more = self.prefill(
            [prompts[place] for place in apart],
            [adapters[place] for place in apart],
            [starts[place] for place in apart],
        )
        order = torch.tensor([*rest, *apart], device=self.base.device).argsort()
        return torch.cat((some, others))[order], joined(kv, more).select(order)

    def _known(self, ids: tuple[int, ...]) -> tuple[tuple[int, ...], int]:
        """The sequence that shares the longest beginning with `ids`, and the length of that beginning."""
        # In sorted order it is one of the two neighbours.
        place = bisect_left(self._sorted, ids)
        near = self._sorted[max(place - 1, 0) : place + 1]
        return max(((past, _common(past, ids)) for past in near), key=lambda candidate: candidate[1], default=((), 0))

    def _put(self, ids: tuple[int, ...], fed: SequenceKV) -> None:
        if ids not in self._fed:
            insort(self._sorted, ids)
        self._fed[ids] = fed

    def _drop(self, ids: tuple[int, ...]) -> None:
        if self._fed.pop(ids, None) is not None:
            del self._sorted[bisect_left(self._sorted, ids)]

    def _feed(self, sequences: Sequence[tuple[int, ...]]) -> None:
        """Have the base read the sequences that it has not read yet."""
        fresh: list[tuple[int, ...]] = []
        past: list[tuple[tuple[int, ...], int]] = []
        for ids in sequences:
            longest, length = self._known(ids)
            if longest:
                self._fed.move_to_end(longest)
            if length < len(ids):
                fresh.append(ids)
                past.append((longest, length))
        if not fresh:
            return
        rests = [ids[length:] for ids, (_, length) in zip(fresh, past, strict=True)]
        _, fed = self._extend(past, rests, [-1] * len(fresh))
        for ids, result, (longest, length) in zip(fresh, fed, past, strict=True):
            if length == len(longest):  # the longer sequence holds everything of the shorter one
                self._drop(longest)
            self._put(ids, result)

    def _trim(self) -> None:
        total = sum(fed.bytes for fed in self._fed.values())
        while total > self.max_bytes and self._fed:
            oldest, fed = next(iter(self._fed.items()))
            total -= fed.bytes
            self._drop(oldest)

    def _extend(
        self, past: Sequence[tuple[tuple[int, ...], int]], rests: Sequence[tuple[int, ...]], adapters: Sequence[int]
    ) -> tuple[Tensor, list[SequenceKV]]:
        """Feed `rests` after the first tokens of sequences that were fed before.

        Args:
            past: a sequence that begins with these tokens, and their number.
            rests: at least one token each.
            adapters: index of the adapter that reads each rest.

        Returns:
            Hidden states after the last token of each `[rows, d]`, keys and values of past and rest.
        """
        computed: dict[int, tuple[Tensor, SequenceKV]] = {}
        held = [self._held(*one) for one in past]
        budget = PREFILL_TOKENS.get(self.base.device.type, 16384)
        # Rows of like rests go together; rows of long pasts in smaller numbers, since they are copied.
        for chunk in chunked([len(rest) + length // 16 for rest, (_, length) in zip(rests, past, strict=True)], budget):
            chunk.sort(key=lambda i: adapters[i])
            lengths = [past[i][1] for i in chunk]
            states, fed = self._pass(
                [held[i] for i in chunk], lengths, [rests[i] for i in chunk], [adapters[i] for i in chunk]
            )
            computed |= {i: (states[row], fed[row]) for row, i in enumerate(chunk)}
            self.computed += sum(len(rests[i]) for i in chunk)
        order = range(len(rests))
        return torch.stack([computed[i][0] for i in order]), [computed[i][1] for i in order]

    def _held(self, ids: tuple[int, ...], length: int) -> SequenceKV | None:
        if not length:
            return None
        # The sequence itself may have become the beginning of a longer one.
        fed = self._fed.get(ids) or self._fed[self._known(ids[:length])[0]]
        return SequenceKV([t[:, :length] for t in fed.keys], [t[:, :length] for t in fed.values])

    def _pass(
        self,
        held: Sequence[SequenceKV | None],
        lengths: Sequence[int],
        rests: Sequence[tuple[int, ...]],
        adapters: Sequence[int],
    ) -> tuple[Tensor, list[SequenceKV]]:
        """One forward. Pasts end at one position (padding on the left), rests begin there (padding on the right)."""
        base, device = self.base, self.base.device
        span, steps = max(lengths), max(len(rest) for rest in rests)
        ids = torch.full((len(rests), steps), base.pad_id)
        for row, rest in enumerate(rests):
            ids[row, : len(rest)] = torch.tensor(rest)
        cache, start = KVCache(span + steps), torch.tensor(lengths)
        example = next((fed for fed in held if fed is not None), None)
        if example is not None:
            for number in range(len(example.keys)):
                layer = KVLayer(span + steps)
                layer.update(
                    *(
                        _aligned([None if fed is None else getattr(fed, kind)[number] for fed in held], span)
                        for kind in ("keys", "values")
                    )
                )
                cache.layers.append(layer)
        mask = None
        if min(lengths) < span:
            mask = (torch.arange(span + steps) >= span - start.unsqueeze(1)).long().to(device)
        positions = (start.unsqueeze(1) + torch.arange(steps)).to(device)
        hidden = base.forward(
            ids.to(device), mask, torch.tensor(list(adapters)), position_ids=positions, past_key_values=cache
        )
        last = torch.tensor([len(rest) - 1 for rest in rests], device=device)
        states = hidden[torch.arange(len(rests), device=device), last]
        fed = []
        for row, (length, rest) in enumerate(zip(lengths, rests, strict=True)):
            real = slice(span - length, span + len(rest))
            # Copies: a view would keep the whole batch alive.
            keys, values = (
                [getattr(layer, kind)[row, :, real].clone() for layer in cache.layers] for kind in ("keys", "values")
            )
            fed.append(SequenceKV(keys, values))
        return states, fed


def _aligned(rows: Sequence[Tensor | None], span: int) -> Tensor:
    """Rows `[kv heads, tokens, head dim]` as `[rows, kv heads, span, head dim]`, their ends at one position."""
    like = next(row for row in rows if row is not None)
    out = like.new_zeros(len(rows), like.shape[0], span, like.shape[2])
    for number, row in enumerate(rows):
        if row is not None:
            out[number, :, span - row.shape[1] :] = row
    return out


def _stacked(fed: Sequence[SequenceKV]) -> PromptKV:
    """Keys and values of all prompts, padded on the right."""
    lengths = torch.tensor([part.keys[0].shape[1] for part in fed])
    span = int(lengths.max())

    def stack(rows: Sequence[Tensor]) -> Tensor:
        out = rows[0].new_zeros(len(rows), rows[0].shape[0], span, rows[0].shape[2])
        for number, row in enumerate(rows):
            out[number, :, : row.shape[1]] = row
        return out

    layers = range(len(fed[0].keys))
    keys, values = ([stack([getattr(part, kind)[n] for part in fed]) for n in layers] for kind in ("keys", "values"))
    return PromptKV(keys, values, lengths)


def _stems(sequences: Sequence[tuple[int, ...]], known: Sequence[int]) -> list[tuple[int, ...]]:
    """Common beginnings of sorted sequences that are long enough and longer than the part known already."""
    stems: list[tuple[int, ...]] = []
    stem: tuple[int, ...] = ()
    for number in range(1, len(sequences)):
        both = _common(sequences[number - 1], sequences[number])
        if both >= max(known[number - 1 : number + 1]) + LEAST_SHARED:
            if stem and _common(stem, sequences[number]) >= min(len(stem), both):
                stem = stem[:both]
                stems[-1] = stem
            else:
                stem = sequences[number][:both]
                stems.append(stem)
        else:
            stem = ()
    return stems


def _common(left: tuple[int, ...], right: tuple[int, ...]) -> int:
    """Length of the common beginning; a few comparisons of slices."""
    low, high = 0, min(len(left), len(right))
    while low < high:
        middle = (low + high + 1) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
