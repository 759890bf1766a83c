"""Collation of turns into padded batches. The only module that turns `Turn`s into tensors.

A row is a turn: its prompt, then its action. A chat that only grows gives its agent one prompt after another, each with
the agent's last answer in it; a causal model's states at a turn's tokens do not depend on what follows, so turns that
begin a longer one are read off its row (`join`).

Rows are padded on the right: under a causal mask real tokens never attend to the padding, so no attention mask is
needed. The hidden state that predicts action token t is at position t - 1; `Batch.predict` holds these positions of all
turns as flat indices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from mafrt.core.types import Turn
from mafrt.models.packing import LEAST_SHARED
from mafrt.models.tensors import floats, integers, moved

if TYPE_CHECKING:
    from mafrt.models.shared_base import SharedBase


def join(turns: Sequence[Turn], owners: Sequence[Any]) -> list[list[int]]:
    """Which turns share a row: indices into `turns`, the shortest first; the last one has the row's tokens.

    `owners`: of each turn what those of one row have in common, such as the adapter; comparable with `<`.
    """
    tokens = [(*turn.prompt_ids, *turn.action_ids) for turn in turns]
    joined: list[list[int]] = []
    after: int | None = None
    # In lexical order a sequence is followed by those that begin with it.
    for n in sorted(range(len(turns)), key=lambda n: (owners[n], tokens[n], n), reverse=True):
        begins = after is not None and owners[after] == owners[n] and tokens[after][: len(tokens[n])] == tokens[n]
        if begins:
            joined[-1].append(n)
        else:
            joined.append([n])
        after = n
    return sorted((row[::-1] for row in joined), key=lambda row: row[-1])


MOST_PADDED = 4
"""positions of a padded micro-batch, for each token that it computes"""


@dataclass(frozen=True)
class Batch:
    """Some turns, padded to one length.

    `B` rows, at most as many as turns, `T` positions, `N` action tokens of all turns, in their order.
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
    turn: Tensor
    """[N] int64: turn of each action token"""

    def gather(self, lists: Iterable[Sequence[float] | None]) -> Tensor:
        """One value per action token, [N] float32, from one list per turn. A None becomes NaN."""
        return self.gather_all({"values": lists})["values"]

    def gather_all(self, several: Mapping[str, Iterable[Sequence[float] | None]]) -> dict[str, Tensor]:
        """`gather` of several kinds of values by name, in one transfer."""
        flat: list[float] = []
        for lists in several.values():
            for turn, values in zip(self.turns, lists, strict=True):
                flat += [float("nan")] * len(turn.action_ids) if values is None else values
        every = floats(flat).to(self.input_ids.device)
        return dict(zip(several, every.view(len(several), -1), strict=True))

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
    """Pad `turns`, of at least one action token each, into one batch; `active_from` as of `SharedBase`."""
    owners = [(adapter_index(turn), active_from(turn)) for turn in turns]
    joined = join(turns, owners)
    lengths = [_length(turns[turn_numbers[-1]]) for turn_numbers in joined]
    width = max(lengths)
    row_of = {turn: row for row, turn_numbers in enumerate(joined) for turn in turn_numbers}
    # As plain lists, each made into a tensor once: small tensor operations for every turn would take longer.
    ids, predict, targets, number = list[int](), list[int](), list[int](), list[int]()
    for turn_numbers in joined:
        longest = turns[turn_numbers[-1]]
        ids += [*longest.prompt_ids, *longest.action_ids, *[pad_id] * (width - _length(longest))]
    for index, turn in enumerate(turns):
        # The hidden state at the last prompt token predicts the first action token.
        first = row_of[index] * width + len(turn.prompt_ids) - 1
        predict += range(first, first + len(turn.action_ids))
        targets += turn.action_ids
        number += [index] * len(turn.action_ids)
    adapters, starts = torch.tensor([owners[turn_numbers[-1]] for turn_numbers in joined]).unbind(1)
    if bool(starts.any()):
        adapters = torch.where(torch.arange(width) < starts.unsqueeze(1), -1, adapters.unsqueeze(1))
    real = (torch.arange(width) < torch.tensor(lengths).unsqueeze(1)).long()
    there = [integers(ids).view(len(joined), width), real, *map(integers, (predict, targets, number))]
    input_ids, attention_mask, *rest = moved(there, device)
    return Batch(list(turns), input_ids, attention_mask, adapters, *rest)


class MicroBatch(NamedTuple):
    """Rows of one forward and backward pass."""

    rows: list[int]
    """indices into the turns"""
    dummy: bool = False
    """True: the pass only keeps a sharded base's collectives matched; its results must be discarded"""


Rows = Sequence[list[int]]
"""indices of the turns that each row has, the longest last"""


def split(
    turns: Sequence[Turn], max_tokens: int, rows: Rows | None = None, *, packs: bool = False, shares: bool = False
) -> list[list[int]]:
    """Groups of indices into `turns`, at most `max_tokens` computed tokens (or a single row) per group.

    `packs`: a pass leaves out padding and computes a common prompt once; `shares`: it computes that once, and pads.
    """
    rows = joined_by_agent(turns) if rows is None else rows
    return _by_prompt(turns, max_tokens, rows, packs) if packs or shares else _by_width(turns, max_tokens, rows)


def joined_by_agent(turns: Sequence[Turn]) -> list[list[int]]:
    return join(turns, [turn.agent for turn in turns])


def _by_width(turns: Sequence[Turn], max_tokens: int, rows: Rows) -> list[list[int]]:
    groups: list[list[int]] = []
    count = 0
    for row in by_length(turns, rows):
        width = _length(turns[row[-1]])
        # Shortest first, so the row that joins is the longest of its group and sets the padded width.
        if groups and (count + 1) * width <= max_tokens:
            groups[-1] += row
            count += 1
        else:
            groups.append(list(row))
            count = 1
    return groups


def _by_prompt(turns: Sequence[Turn], max_tokens: int, rows: Rows, packs: bool) -> list[list[int]]:
    groups: list[list[int]] = []
    begun = rests = longest = width = count = 0
    last: Turn | None = None
    # The prompt before the agent, since agents of scope `action` share what all of them read.
    first = [(len(t.prompt_ids), t.prompt_ids, t.agent, len(t.action_ids)) for t in (turns[row[0]] for row in rows)]
    for _, _, row in sorted((key, row[0], row) for key, row in zip(first, rows, strict=True)):
        turn, length = turns[row[0]], _length(turns[row[-1]])
        prompt = len(turn.prompt_ids)
        again = last is not None and last.agent == turn.agent and last.prompt_ids == turn.prompt_ids
        # What `mafrt.models.packing` shares at least.
        shared = again and prompt >= max(LEAST_SHARED, length / 2)
        more, rest = 0 if shared else prompt, length - prompt
        computed = begun + more + (rests + rest if packs else (count + 1) * max(longest, rest))
        # Hidden states are laid out with padding in the end, one vector a position.
        if groups and computed <= max_tokens and (count + 1) * max(width, length) <= MOST_PADDED * max_tokens:
            groups[-1] += row
        else:
            groups.append(list(row))
            begun = rests = longest = width = count = 0
            more = prompt
        begun, rests, count = begun + more, rests + rest, count + 1
        longest, width = max(longest, rest), max(width, length)
        last = turn
    return groups


def _length(turn: Turn) -> int:
    return len(turn.prompt_ids) + len(turn.action_ids)


def by_length(turns: Sequence[Turn], rows: Iterable[list[int]]) -> list[list[int]]:
    """Rows (indices of their turns, of which the last has all tokens), the shortest first."""
    return sorted(rows, key=lambda row: (_length(turns[row[-1]]), row[-1]))


def micro_batches(turns: Sequence[Turn], max_tokens: int, base: SharedBase) -> list[MicroBatch]:
    """Micro-batches of this process's share of `turns`; a sharded base's passes are collective, so some are dummies."""
    # An adapter of scope `action` has read each turn's prompt as the base does, its own earlier answers too.
    rows = [[turn] for turn in range(len(turns))] if base.activated else joined_by_agent(turns)
    if base.processes.size > 1:
        rows = base.processes.share(by_length(turns, rows))
    parts = [MicroBatch(part) for part in split(turns, max_tokens, rows, packs=base.packs, shares=base.shares)]
    if base.sharded and turns:
        parts += [MicroBatch([0], dummy=True)] * (base.processes.most(len(parts)) - len(parts))
    return parts
