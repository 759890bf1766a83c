"""The prompts of a batch in decoding, each stored once for all rows that go on from it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from mafrt.cpu.decode import LANES, FarKeys, NearKeys
from mafrt.models.kv_cache import PromptKV


class SharedPrompts:
    """Keys and values of prompts as the kernels read them.

    Args:
        prompts: of the batch.
        owner: `[rows]`, the prompt of each row.
    """

    def __init__(self, prompts: PromptKV, owner: Tensor) -> None:
        self._set(prompts, owner)

    def _set(self, prompts: PromptKV, owner: Tensor) -> None:
        # With keys and values of a prompt's head side by side, since they are read in every step.
        values = [t.contiguous() for t in prompts.values]
        self._prompts, self._owner = PromptKV(prompts.keys, values, prompts.lengths), owner
        self._columns: dict[int, Tensor] = {}

    def far(self, layer: int) -> FarKeys:
        """Keys of one layer as columns `[prompts, kv heads, D, room]`, with zeros beyond the longest prompt; values."""
        columns = self._columns.get(layer)
        if columns is None:
            keys = self._prompts.keys[layer].transpose(2, 3)
            columns = self._columns[layer] = functional.pad(keys, (0, -keys.shape[3] % LANES)).contiguous()
        return FarKeys(columns, self._prompts.values[layer], self._prompts.lengths, self._owner)

    def keep(self, rows: Tensor) -> None:
        """Leave only the given rows `[kept]`, in order; unused prompts are dropped now and then."""
        owner = self._owner[rows]
        read, places = owner.unique(return_inverse=True)
        if len(read) <= 0.75 * len(self._prompts.lengths):
            self._set(self._prompts.select(read), places)
        else:
            self._owner = owner

    def extended(self, own: Sequence[NearKeys]) -> PromptKV:
        """The prompt of each row followed by the row's own tokens: one prompt for each row."""
        owner, lengths = self._owner, self._prompts.lengths[self._owner]
        used = own[0].used
        rows = torch.arange(len(owner)).unsqueeze(1)
        places = lengths.unsqueeze(1) + torch.arange(used)
        span = int(lengths.max()) + used

        def row_wise(prompts: Tensor, tokens: Tensor) -> Tensor:
            near = prompts[:, :, :span].index_select(0, owner)
            whole = functional.pad(near, (0, 0, 0, span - near.shape[2]))
            whole[rows, :, places] = tokens[:, :, :used].transpose(1, 2)
            return whole

        keys = [row_wise(t, layer.keys) for t, layer in zip(self._prompts.keys, own, strict=True)]
        values = [row_wise(t, layer.values) for t, layer in zip(self._prompts.values, own, strict=True)]
        return PromptKV(keys, values, lengths + used)
