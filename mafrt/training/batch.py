"""Collation of turns into padded batches. The only module that turns `Turn`s into tensors.

A row is a turn: its prompt, then its action. Rows are padded on the right: under a causal mask real tokens never attend
to the padding, so no attention mask is needed. The hidden state that predicts action token t is at position t - 1;
`Batch.predict` holds these positions of all rows as flat indices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from mafrt.core.types import Turn

if TYPE_CHECKING:
    from mafrt.models.shared_base import SharedBase


@dataclass(frozen=True)
class Batch:
    """Some turns, padded to one length.

    `B` rows, `T` positions, `N` action tokens of all rows, in row order.
    """

    turns: Sequence[Turn]
    input_ids: Tensor
    """[B, T] int64"""
    attention_mask: Tensor
    """[B, T] int64, 1 for a real token and 0 for padding, which stands on the right"""
    adapter_index: Tensor
    """[B] or [B, T] int64 on the CPU, -1 for none"""
    predict: Tensor
    """[N] int64: index into the flattened [B*T] positions of the hidden state that predicts each action token"""
    targets: Tensor
    """[N] int64: the action tokens"""
    row: Tensor
    """[N] int64: row of each action token"""

    def gather(self, lists: Iterable[Sequence[float] | None]) -> Tensor:
        """One value per action token, [N] float32, from one list per turn. A None becomes NaN."""
        flat: list[float] = []
        for turn, values in zip(self.turns, lists, strict=True):
            flat += [float("nan")] * len(turn.action_ids) if values is None else values
        return torch.tensor(flat, dtype=torch.float32, device=self.input_ids.device)

    def scatter(self, values: Tensor) -> list[list[float]]:
        """The inverse of `gather`: one list per turn from [N]."""
        # One transfer for all rows: each would make the host wait for the device.
        return [part.tolist() for part in values.detach().float().cpu().split([len(t.action_ids) for t in self.turns])]


def collate(
    turns: Sequence[Turn],
    adapter_index: Callable[[Turn], int],
    pad_id: int,
    device: torch.device,
    active_from: Callable[[Turn], int] = lambda _: 0,
) -> Batch:
    """Pad `turns` into one batch on `device`. Every turn must have at least one action token.

    `active_from` gives the position of the first token on which a turn's adapter acts (`SharedBase.active_from`).
    """
    lengths = [len(turn.prompt_ids) + len(turn.action_ids) for turn in turns]
    width = max(lengths)
    ids = torch.full((len(turns), width), pad_id, dtype=torch.int64)
    predict, targets, row = [], [], []
    for index, turn in enumerate(turns):
        ids[index, : lengths[index]] = torch.tensor([*turn.prompt_ids, *turn.action_ids])
        # The hidden state at the last prompt token predicts the first action token.
        first = index * width + len(turn.prompt_ids) - 1
        predict.append(torch.arange(first, first + len(turn.action_ids)))
        targets.append(torch.tensor(turn.action_ids))
        row.append(torch.full((len(turn.action_ids),), index))
    owners = torch.tensor([adapter_index(turn) for turn in turns])
    starts = torch.tensor([active_from(turn) for turn in turns])
    if bool(starts.any()):
        owners = torch.where(torch.arange(width) < starts.unsqueeze(1), -1, owners.unsqueeze(1))
    return Batch(
        turns=list(turns),
        input_ids=ids.to(device),
        attention_mask=(torch.arange(width) < torch.tensor(lengths).unsqueeze(1)).long().to(device),
        adapter_index=owners,
        predict=torch.cat(predict).to(device),
        targets=torch.cat(targets).to(device),
        row=torch.cat(row).to(device),
    )


class MicroBatch(NamedTuple):
    """Rows of one forward and backward pass."""

    rows: list[int]
    """indices into the turns"""
    dummy: bool = False
    """True: the pass only keeps a sharded base's collectives matched; its results must be discarded"""


def split(turns: Sequence[Turn], max_tokens: int, rows: Iterable[int] | None = None) -> list[list[int]]:
    """Group turns of similar length, at most `max_tokens` padded tokens (or a single turn) per group.

    Args:
        turns: the batch.
        max_tokens: of a group, padding included.
        rows: indices of the turns to group; None: all.

    Returns:
        Groups of indices into `turns`, shortest turns first.
    """
    groups: list[list[int]] = []
    for row in by_length(turns, rows):
        width = len(turns[row].prompt_ids) + len(turns[row].action_ids)
        # Shortest first, so the turn that joins is the longest of its group and sets the padded width.
        if groups and (len(groups[-1]) + 1) * width <= max_tokens:
            groups[-1].append(row)
        else:
            groups.append([row])
    return groups


def by_length(turns: Sequence[Turn], rows: Iterable[int] | None = None) -> list[int]:
    """Indices of the turns (None: of all), sorted by length, shortest first."""
    rows = range(len(turns)) if rows is None else rows
    return sorted(rows, key=lambda row: (len(turns[row].prompt_ids) + len(turns[row].action_ids), row))


def micro_batches(turns: Sequence[Turn], max_tokens: int, base: SharedBase) -> list[MicroBatch]:
    """Micro-batches of this process's share of `turns`; token counts are balanced over the processes.

    A forward of a sharded base is collective, so all processes must run equally many: those with fewer micro-batches
    append dummy ones.
    """
    own = None if base.processes.size == 1 else base.processes.share(by_length(turns))
    parts = [MicroBatch(rows) for rows in split(turns, max_tokens, own)]
    if base.sharded and turns:
        parts += [MicroBatch([0], dummy=True)] * (base.processes.most(len(parts)) - len(parts))
    return parts
