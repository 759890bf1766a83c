"""Batches without padding, in which rows that begin alike compute their common beginning once.

The real tokens of a padded batch become one long row. Rows that share at least half of their tokens, and the adapter on
each of these (the samples of one prompt, or prompts with a common transcript), form a family: its prefix stands once,
followed by the rest of each row, and every token sees the prefix and its own row only. Hidden states and gradients are
those of row-by-row passes up to rounding, since a causal model's states at the prefix do not depend on what follows.

Tokens before a row's first one with an adapter (adapters of scope `action`) need no gradient. `SharedPrefixes` are
these, each sequence once: computed in a pass of its own that records nothing, they give the rest of every row their
keys and values as constants, so that the backward pass has the rests only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor

from mafrt.models.tensors import integers, moved

T = TypeVar("T")

LEAST_SHARED = 16
"""tokens of the shortest prefix that is shared"""
MOST_TOKENS = 8192
"""of a family whose rows are copied together to the length of the longest, each with the beginning"""

KeptKV: TypeAlias = "dict[int, tuple[Tensor, Tensor]]"
"""layer -> keys and values `[kv heads, N, head_dim]` of a pass over N tokens"""


@dataclass(frozen=True)
class Family:
    """Rows with a common beginning, as `shared` tokens followed by the rest of each row."""

    shared: int
    """tokens of the beginning"""
    rests: Tensor
    """`[rows, longest]`: place of each token of the rests, counted from the end of the beginning; rows that are shorter
    repeat a token"""
    real: Tensor
    """`[rows, longest]` bool on the CPU: False for the repeated ones"""
    order: Tensor
    """`[tokens of all rests]`: place of each in the flattened `[rows, longest]`"""
    even: bool
    """whether all rests are equally long, so that no token is repeated"""
    past: Tensor | None = None
    """`[shared]`: the tokens of the pass before this one that are the beginning; None: they are part of this pass"""

    @classmethod
    def of(cls, shared: int, sizes: Sequence[int], device: torch.device, past: Tensor | None = None) -> Family:
        """From the number of shared tokens and of each row's further ones."""
        steps, lengths = torch.arange(max(sizes)), torch.tensor(sizes)
        rests = (lengths.cumsum(0) - lengths).unsqueeze(1) + torch.minimum(steps, lengths.unsqueeze(1) - 1)
        real = steps < lengths.unsqueeze(1)
        order = real.flatten().nonzero().squeeze(1)
        family = cls(shared, rests, real, order, min(sizes) == max(sizes), past)
        return family if device.type == "cpu" else family.with_places(moved(family.places(), device))

    def places(self) -> list[Tensor]:
        """What is needed on the device of the pass."""
        return [self.rests, self.order] if self.past is None else [self.rests, self.order, self.past]

    def with_places(self, moved: Sequence[Tensor]) -> Family:
        """The same with `places` on another device."""
        rests, order, *past = moved
        return replace(self, rests=rests, order=order, past=past[0] if past else None)

    @cached_property
    def mask(self) -> Tensor:
        """`[longest, shared + longest]`: which of the beginning and of its own rest each token of a rest attends to."""
        longest = self.rests.shape[1]
        ones = torch.ones(longest, self.shared + longest, dtype=torch.bool, device=self.rests.device)
        return ones.tril(self.shared)


@dataclass(frozen=True)
class TokenBlock:
    """Consecutive tokens: `rows` of equal `length`, or one family of `length` tokens."""

    rows: int
    length: int
    family: Family | None = None

    @property
    def longest(self) -> int:
        """Tokens of its longest row, with the beginning."""
        return self.length if self.family is None else self.family.shared + self.family.rests.shape[1]


@dataclass(frozen=True)
class Packing:
    """The tokens to compute of a padded `[B, T]` batch, as one long row of N tokens.

    Rows are sorted by adapter, so that the tokens of each adapter are one segment.
    """

    take: Tensor
    """`[N]`: position in the flattened batch that each token is read from"""
    index: Tensor
    """`[N]` on the CPU: adapter of each token"""
    blocks: tuple[TokenBlock, ...]
    places: Tensor
    """`[M]`: the real positions of the flattened batch"""
    source: Tensor
    """`[M]`: the token whose hidden state each of them takes"""
    in_order: bool = False
    """whether these are all tokens, one after the other"""
    kept: KeptKV | None = None
    """filled by the pass with its keys and values; None: they are not kept"""
    past: KeptKV | None = None
    """those of the pass before this one, in which the families begin"""
    _derived: dict[object, Any] = field(default_factory=dict, init=False, compare=False, repr=False)

    def to(self, device: torch.device) -> Packing:
        """This packing, made on the CPU, on the device of its pass: in one transfer, since each would be waited for."""
        if device.type == "cpu":
            return self
        families = [block.family for block in self.blocks if block.family is not None]
        there = [self.take, self.places, self.source, *(t for family in families for t in family.places())]
        take, places, source, *rest = moved(there, device)
        blocks = []
        for block in self.blocks:
            if block.family is not None:
                count = len(block.family.places())
                block, rest = replace(block, family=block.family.with_places(rest[:count])), rest[count:]
            blocks.append(block)
        return replace(self, take=take, places=places, source=source, blocks=tuple(blocks))

    def once(self, derive: Callable[[Packing], T]) -> T:
        """What a function makes of this packing, made when the first layer asks."""
        if derive not in self._derived:
            self._derived[derive] = derive(self)
        made: T = self._derived[derive]
        return made


@dataclass(frozen=True)
class SharedPrefixes:
    """The tokens of each row before the first one with an adapter, and their pass, in which equal ones stand once."""

    packing: Packing
    of_row: dict[int, Tensor]
    """row -> token of the pass for each token of its beginning, on the CPU; rows without a beginning are absent"""
    rest: Tensor
    """`[B, T]` bool: the real tokens of the batch that belong to no beginning"""

    @classmethod
    def of(cls, real: Tensor, index: Tensor, ids: Tensor, device: torch.device) -> SharedPrefixes | None:
        """Arguments as of `pack`, `index` `[B, T]`; None where no row has a beginning of `LEAST_SHARED` tokens."""
        steps = real.shape[1]
        fixed = real & ((index >= 0) & real).int().cumsum(1).eq(0)
        # Short beginnings stay with their rows, since a pass of their own would cost more than it saves.
        fixed &= fixed.sum(1, keepdim=True) >= LEAST_SHARED
        rows = fixed.any(1).nonzero().squeeze(1).tolist()
        if not rows:
            return None
        # Equal beginnings are found by their tokens, because rows of one prompt need not be neighbours in a shuffled
        # mini-batch.
        first: dict[tuple[int, ...], int] = {}
        same = {row: first.setdefault(tuple(ids[row, fixed[row]].tolist()), row) for row in rows}
        once = torch.zeros_like(fixed)
        once[list(first.values())] = fixed[list(first.values())]
        packing = pack(once, torch.full((len(real),), -1), torch.device("cpu"), ids)
        token = torch.full((real.numel(),), -1)
        token[packing.places] = packing.source
        columns = {row: fixed[row].nonzero().squeeze(1) for row in rows}
        of_row = {row: token[column * steps + columns[column]] for row, column in same.items()}
        places = torch.cat([row * steps + columns[row] for row in rows])
        source = torch.cat([of_row[row] for row in rows])
        packing = replace(packing, places=places, source=source, in_order=False, kept={}).to(device)
        return cls(packing, of_row, real & ~fixed)


def pack(
    real: Tensor,
    index: Tensor,
    device: torch.device,
    ids: Tensor | None = None,
    least_shared: int = LEAST_SHARED,
    beginnings: SharedPrefixes | None = None,
    most: int | None = None,
) -> Packing:
    """Lay a batch out for one pass without padding.

    Args:
        real: `[B, T]` bool on the CPU, True for a real token.
        index: `[B]` or `[B, T]` on the CPU: the adapter of each row or token, -1 for none.
        device: of the result.
        ids: `[B, T]` token ids; given, beginnings that rows have in common, in tokens and adapters, are computed once.
        least_shared: tokens of the shortest prefix that is shared; `most`: of a family, None: `MOST_TOKENS`.
        beginnings: of the rows; their pass comes first, and this one has the other tokens.
    """
    real, past = (real, {}) if beginnings is None else (beginnings.rest, beginnings.of_row)
    lengths = [int(length) for length in real.sum(1).tolist()]
    # A row has one adapter, and -1 where it does not act yet, so the maximum is the adapter.
    owner = [int(adapter) for adapter in (index if index.dim() == 1 else index.amax(1)).tolist()]
    steps = real.shape[1]
    columns = [row.nonzero().squeeze(1).tolist() for row in real]
    # Everything below is plain lists on the host: thousands of small tensor operations would cost more than the pass.
    most = MOST_TOKENS if most is None else most
    families, prefix = ordered_families(columns, index, ids, owner, past, least_shared, most)
    take: list[int] = []
    places: list[int] = []
    source: list[int] = []
    adapters: list[int] = []
    blocks: list[TokenBlock] = []
    for rows in families:
        shared = prefix.get(rows[0], 0) if len(rows) > 1 else 0
        first, sizes = len(take), list[int]()
        for number, row in enumerate(rows):
            flat = [row * steps + column for column in columns[row]]
            at = flat if number == 0 else flat[shared:]
            places += flat
            source += range(first, first + shared)
            start = len(take) + (shared if number == 0 else 0)
            source += range(start, start + len(flat) - shared)
            take += at
            each = [int(index[row])] * len(at) if index.dim() == 1 else index[row, columns[row]].tolist()[-len(at) :]
            adapters += each
            sizes.append(len(flat) - shared)
        if len(rows) > 1 or rows[0] in past:
            own_past = past.get(rows[0])
            family = Family.of(shared if own_past is None else len(own_past), sizes, real.device, own_past)
            blocks.append(TokenBlock(1, len(take) - first, family))
        # Neighbours of one length are one block, so that attention runs once over a rectangle and not row by row.
        elif blocks and blocks[-1].family is None and blocks[-1].length == lengths[rows[0]]:
            blocks[-1] = TokenBlock(blocks[-1].rows + 1, lengths[rows[0]])
        else:
            blocks.append(TokenBlock(1, lengths[rows[0]]))
    return Packing(
        *(integers(take), integers(adapters), tuple(blocks), integers(places), integers(source)),
        in_order=len(source) == len(take),  # only a shared beginning is taken more than once
        past=None if beginnings is None else beginnings.packing.kept,
    ).to(device)


def ordered_families(
    columns: Sequence[Sequence[int]],
    index: Tensor,
    ids: Tensor | None,
    owner: Sequence[int],
    past: Mapping[int, Tensor],
    least_shared: int,
    most: int,
) -> tuple[list[list[int]], dict[int, int]]:
    """The rows of each family or block in the order of the packing, and the shared tokens by a family's first row."""
    lengths = [len(row_columns) for row_columns in columns]
    families = [[row] for row in range(len(lengths)) if lengths[row]]
    prefix: dict[int, int] = {}
    if ids is not None:
        # With an adapter per token, rows of different adapters may begin alike: with tokens that have none.
        keys, groups = ids, owner
        if index.dim() == 2:
            # One number for token and adapter: rows are then compared as plain lists.
            keys, groups = ids * (max(owner, default=0) + 2) + index + 1, [0] * len(owner)
        tokens = [[row[c] for c in row_columns] for row, row_columns in zip(keys.tolist(), columns, strict=True)]
        fresh = [[] if n in past else row for n, row in enumerate(tokens)]
        families, prefix = _families(fresh, groups, least_shared, most)
        if past:
            families += _with_one_past(past, owner, lengths, most)
    # Families first within an adapter, then single rows by length: rows of equal length are one block.
    families.sort(key=lambda rows: (owner[rows[0]], len(rows) == 1, lengths[rows[0]] if len(rows) == 1 else 0, rows[0]))
    return families, prefix


def _with_one_past(
    past: Mapping[int, Tensor], owner: Sequence[int], lengths: Sequence[int], most: int
) -> list[list[int]]:
    """Rows that continue the same tokens of the pass before with the same adapter, at most `most` tokens together."""
    together: dict[tuple[int, int, int], list[list[int]]] = {}
    for row, tokens in past.items():
        if not lengths[row]:
            continue
        # Equal beginnings are one sequence of the pass, so its last token tells them apart.
        groups = together.setdefault((owner[row], len(tokens), int(tokens[-1])), [])
        if not groups or len(tokens) + lengths[row] + sum(lengths[r] for r in groups[-1]) > most:
            groups.append([])
        groups[-1].append(row)
    return [rows for groups in together.values() for rows in groups]


def _families(
    tokens: Sequence[list[int]], owner: Sequence[int], least: int, most: int
) -> tuple[list[list[int]], dict[int, int]]:
    """Rows that share a beginning, and its length by the first row of each family."""
    # In lexical order the rows that share the longest beginning are neighbours.
    order = sorted((row for row in range(len(tokens)) if tokens[row]), key=lambda row: (owner[row], tokens[row]))
    families: list[list[int]] = []
    prefix: dict[int, int] = {}
    size = 0
    for row in order:
        last = families[-1][-1] if families else None
        if last is not None and owner[last] == owner[row]:
            # The last token of a row stays its own, so that no row is without a suffix.
            longest = min(len(tokens[row]), len(tokens[last])) - 1
            pairs = enumerate(zip(tokens[last], tokens[row], strict=False))
            common = next((place for place, (a, b) in pairs if a != b), longest)
            # The prefix of a family only shrinks as rows join it.
            both = min(common, longest, prefix.get(families[-1][0], longest))
            grown = size + len(tokens[row]) - both
            if both >= max(least, min(len(tokens[last]), len(tokens[row])) / 2) and grown <= most:
                families[-1].append(row)
                prefix[families[-1][0]] = both
                size = grown
                continue
        families.append([row])
        size = len(tokens[row])
    return families, prefix
