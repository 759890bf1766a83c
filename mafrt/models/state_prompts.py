"""Prompts of models that have recurrences beside attention, read for a lean decoder: keys, values and states."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer

from mafrt.models.cache_rows import check, side_by_side
from mafrt.models.kv_cache import PREFILL_TOKENS, PromptKV, chunked

if TYPE_CHECKING:
    from mafrt.models.shared_base import SharedBase


class StatePrompts:
    """Reads prompts on a base.

    Args:
        base: without its adapters.
    """

    def __init__(self, base: SharedBase) -> None:
        self.base = base

    def prefill(
        self, prompts: Sequence[Sequence[int]], adapters: Sequence[int], starts: Sequence[int]
    ) -> tuple[Tensor, PromptKV]:
        """As `kv_cache.prefill`; `starts` is the position in each prompt from which its adapter acts."""
        base = self.base
        ends, caches, spans, order = list[Tensor](), list[Any](), list[int](), list[int]()
        for places in chunked([len(prompt) for prompt in prompts], PREFILL_TOKENS.get(base.device.type, 16384)):
            ids, index, _, real = ending_together(base, prompts, adapters, starts, places)
            hidden, cache = base.read(ids, index, real=real)
            ends.append(hidden[:, -1])
            caches.append(cache)
            spans.append(ids.shape[1])
            order += places
        cache = caches[0] if len(caches) == 1 else side_by_side(caches, spans)
        check(cache)
        lengths = torch.tensor([len(prompt) for prompt in prompts])
        place = torch.tensor(order, device=base.device).argsort()
        # From padding on the left to padding on the right, which repeats a prompt's last token.
        source = (torch.arange(max(spans)) + (max(spans) - lengths).unsqueeze(1)).clamp_(max=max(spans) - 1)
        rows, source = place.unsqueeze(1), source.to(base.device)
        made = PromptKV([], [], lengths)
        for layer in cache.layers:
            if isinstance(layer, DynamicLayer):
                both = (made.keys, layer.keys), (made.values, layer.values)
                for into, cached in cast("tuple[tuple[list[Tensor], Tensor], ...]", both):
                    into.append(cached[rows, :, source].transpose(1, 2))
            else:
                states = layer.conv_states[0], layer.recurrent_states[0]
                made.states.append(tuple(state.index_select(0, place) for state in states))
        return torch.cat(ends)[place], made


def ending_together(
    base: SharedBase,
    prompts: Sequence[Sequence[int]],
    adapters: Sequence[int],
    starts: Sequence[int],
    places: Sequence[int],
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """What `SharedBase.read` takes to read the prompts at `places` in one pass, padded on the left.

    Returns:
        ids `[rows, span]`; index `[rows, span]` on the CPU, where each prompt's adapter acts from its position in
        `starts` on; lengths `[rows]` on the CPU; real `[rows, span]`, or None without padding.
    """
    lengths = torch.tensor([len(prompts[place]) for place in places])
    span = int(lengths.max())
    ids, index = torch.full((len(places), span), base.pad_id), torch.full((len(places), span), -1)
    for row, place in enumerate(places):
        first = span - len(prompts[place])
        ids[row, first:] = torch.tensor(list(prompts[place]))
        index[row, first + starts[place] :] = adapters[place]
    real = None
    if int(lengths.min()) < span:
        real = (torch.arange(span) >= (span - lengths).unsqueeze(1)).long().to(base.device)
    return ids.to(base.device), index, lengths, real
