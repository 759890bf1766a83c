"""Decoding with any Hugging Face causal LM: every row has a copy of its prompt's keys and values.

The slower of the two decoders; `lean.py` has the one for Llama-like models, which reads shared prompts once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mafrt.engines.local.kv_cache import KVCache, KVLayer, PromptKV

if TYPE_CHECKING:
    from mafrt.models.shared_base import SharedBase


class ExpandedDecoder:
    """One batch in the middle of its generation, on `SharedBase.forward`.

    Args:
        base: the model.
        prompts: keys and values of the prompts.
        owner: `[rows]`, which prompt each row goes on from.
        adapters: `[rows]`, adapter index of each row, on the host.
    """

    def __init__(self, base: SharedBase, prompts: PromptKV, owner: Tensor, adapters: Tensor) -> None:
        self.base = base
        self.adapters = adapters
        device = base.device
        owner = owner.to(device)
        lengths = prompts.lengths.to(device)[owner]
        span = prompts.longest
        # Prompts end at the same position (padding on the left), so that distances between positions are right for
        # models with sliding windows too.
        source = torch.arange(span, device=device) - (span - lengths).unsqueeze(1)
        self._real = source >= 0
        self._position = lengths
        source = source.clamp_(min=0)
        self._cache = KVCache()
        for keys, values in zip(prompts.keys, prompts.values, strict=True):
            layer = KVLayer(span + 32)
            layer.update(*(t[owner.unsqueeze(1), :, source].transpose(1, 2) for t in (keys, values)))
            self._cache.layers.append(layer)

    def step(self, tokens: Tensor) -> Tensor:
        """Feed one token per row `[rows]`; returns the hidden states `[rows, d]` after it."""
        self._real = torch.cat((self._real, self._real.new_ones(len(tokens), 1)), 1)
        hidden = self.base.forward(
            tokens.unsqueeze(1),
            self._real.long(),
            self.adapters,
            position_ids=self._position.unsqueeze(1),
            past_key_values=self._cache,
        )
        self._position = self._position + 1
        return hidden[:, 0]

    def keep(self, rows: Tensor) -> None:
        """Leave only the given rows `[kept]` in the batch."""
        self._cache.keep(rows)
        self._real, self._position = self._real[rows], self._position[rows]
        self.adapters = self.adapters[rows.cpu()]
