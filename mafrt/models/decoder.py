"""Decoding step by step on a model's own forward pass: the reference, for any device and any Hugging Face causal LM."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol, TypeVar

import torch
from torch import Tensor

from mafrt.core.text import error_line
from mafrt.models.kv_cache import KVCache, KVLayer, PromptKV
from mafrt.models.out_of_memory import out_of_memory

if TYPE_CHECKING:
    from mafrt.models.shared_base import SharedBase

log = logging.getLogger(__name__)


class RowDecoder(Protocol):
    """One batch in the middle of its generation."""

    def step(self, tokens: Tensor) -> Tensor:
        """Feed one token per row `[rows]`; returns the hidden states `[rows, d]` after it, after the final norm."""

    def keep(self, rows: Tensor) -> None:
        """Leave only the given rows `[kept]`, in order, in the batch."""


class FoldingDecoder(RowDecoder, Protocol):
    """One whose rows can be taken up by another."""

    def folded(self) -> PromptKV:
        """Keys and values of every row, own tokens included, as prompts of their own: one for each row.

        The decoder is at its end then.
        """


class DecodeModel:
    """The weights as decoding reads them: as they are."""

    name = "expanded"
    stale = False
    """whether the frozen weights were written to since they were copied"""
    stateful = False
    """whether prompts have states beside keys and values (`mafrt.models.state_prompts`)"""
    compact_at = 1 / 4
    """Share of finished rows in a batch at which they are taken out of it. Taking out copies the others' own keys and
    values, about the price of one step; leaving them in costs their share of every step."""

    def __init__(self, base: SharedBase, reason: str = "this device has none") -> None:
        self.base = base
        self.reason = reason
        """why no faster form decodes"""

    def decoder(
        self, prompts: PromptKV, owner: Sequence[int], adapters: Sequence[str | None], steps: int
    ) -> FoldingDecoder:
        """Decoding of a batch, in which at most `steps` tokens are fed to a row.

        `prompts` are taken over, and not to be used again. `owner`: which prompt each row goes on from; `adapters`:
        adapter name of each row. Rows of one prompt and of one adapter lie side by side, those of None last.
        """
        index = torch.tensor([self.base.adapter_index(name) for name in adapters])
        return ExpandedDecoder(self.base, prompts, torch.tensor(owner), index)


class ExpandedDecoder:
    """One batch in which every row has a copy of its prompt's keys and values.

    Args:
        base: the model.
        prompts: keys and values of the prompts, which are let go layer by layer.
        owner: `[rows]`, which prompt each row goes on from.
        adapters: `[rows]`, adapter index of each row, on the host.
    """

    def __init__(self, base: SharedBase, prompts: PromptKV, owner: Tensor, adapters: Tensor) -> None:
        self.base = base
        self.adapters = adapters
        device = base.device
        span = prompts.longest
        # Known on the host; a mask that hides nothing would cost the faster kernels of a GPU.
        self._padded = int(prompts.lengths[owner].min()) < span
        owner = owner.to(device)
        lengths = prompts.lengths.to(device)[owner]
        # Prompts end at the same position (padding on the left), so that distances between positions are right for
        # models with sliding windows too.
        source = torch.arange(span, device=device) - (span - lengths).unsqueeze(1)
        self._real = source >= 0
        self._position = lengths
        source = source.clamp_(min=0)
        self._cache = KVCache()
        while prompts.keys:
            layer = KVLayer(span + 32)
            both = (prompts.keys.pop(0), prompts.values.pop(0))
            layer.update(*(t[owner.unsqueeze(1), :, source].transpose(1, 2) for t in both))
            self._cache.layers.append(layer)

    def step(self, tokens: Tensor) -> Tensor:
        """Feed one token per row `[rows]`; returns the hidden states `[rows, d]` after it."""
        self._real = torch.cat((self._real, self._real.new_ones(len(tokens), 1)), 1)
        hidden = self.base.forward(
            tokens.unsqueeze(1),
            self._real.long() if self._padded else None,
            self.adapters,
            position_ids=self._position.unsqueeze(1),
            past_key_values=self._cache,
        )
        self._position = self._position + 1
        return hidden[:, 0]

    def folded(self) -> PromptKV:
        """Keys and values of every row, own tokens included, as prompts of their own: one for each row.

        This decoder is at its end then: its layers are let go one by one.
        """
        used, lengths = self._real.shape[1], self._position
        # From padding on the left to padding on the right, which repeats a row's last token.
        source = torch.arange(int(lengths.max()), device=lengths.device) + (used - lengths).unsqueeze(1)
        source = source.clamp_(max=used - 1)
        rows = torch.arange(len(lengths), device=lengths.device).unsqueeze(1)
        folded = PromptKV([], [], lengths.cpu())
        while self._cache.layers:
            layer = self._cache.layers.pop(0)
            folded.keys.append(layer.keys[rows, :, source].transpose(1, 2))
            folded.values.append(layer.values[rows, :, source].transpose(1, 2))
        return folded

    def keep(self, rows: Tensor) -> None:
        """Leave only the given rows `[kept]` in the batch."""
        self._cache.keep(rows)
        self._real, self._position = self._real[rows], self._position[rows]
        self.adapters = self.adapters[rows.cpu()]


T = TypeVar("T", bound=DecodeModel)


def where_it_agrees(base: SharedBase, make: Callable[[SharedBase], T], agrees: Callable[[T], bool]) -> DecodeModel:
    """A faster form, made by `make`, where it covers the model and computes what the reference does; else that.

    `make` raises ValueError with the reason for a model that it does not cover.
    """
    try:
        with torch.no_grad():
            lean = make(base)
            if agrees(lean):
                return lean
            reason = "its results differ from the model's"
    except ValueError as error:
        reason = f"it does not cover {error}"
    except Exception as error:  # what a family or version that is new raises means that it is not covered
        if out_of_memory(error):
            raise
        reason = f"its check ended in {type(error).__name__}: {error_line(error)}"
    log.info("decoding %s through its own forward: the lean decoder is not used, %s", base.name, reason)
    return DecodeModel(base, reason)
