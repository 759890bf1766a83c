"""Batches without padding, in which rows that begin alike compute their common beginning once.

The real tokens of a padded batch become one long row. Rows that share at least half of their tokens, and the adapter on
each of these (the samples of one prompt, or prompts with a common transcript), form a family: its prefix stands once,
followed by the rest of each row, and every token sees the prefix and its own row only. Hidden states and gradients are
those of row-by-row passes up to rounding, since a causal model's states at the prefix do not depend on what follows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

LEAST_SHARED = 16
"""tokens of the shortest prefix that is shared"""
MOST_TOKENS = 8192
"""of a family, whose rows are copied together to the length of the longest"""


@dataclass(frozen=True)
class Family:
    """Rows with a common beginning, as `shared` tokens followed by the rest of each row."""

    shared: int
    """tokens of the beginning"""
    rests: Tensor
    """`[rows, longest]`: place of each token of the rests, counted from the end of the beginning; rows that are shorter
    repeat a token"""
    real: Tensor
    """`[rows, longest]` bool: False for the repeated ones"""
    mask: Tensor
    """`[longest, shared + longest]`: which of the beginning and of its own rest each token of a rest may attend to"""

    @classmethod
    def of(cls, shared: int, sizes: Sequence[int], device: torch.device) -> Family:
        """From the number of shared tokens and of each row's further ones."""
        steps, lengths = torch.arange(max(sizes)), torch.tensor(sizes)
        rests = (lengths.cumsum(0) - lengths).unsqueeze(1) + torch.minimum(steps, lengths.unsqueeze(1) - 1)
        mask = torch.ones(len(steps), shared + len(steps), dtype=torch.bool).tril(shared)
        return cls(shared, rests.to(device), (steps < lengths.unsqueeze(1)).to(device), mask.to(device))


@dataclass(frozen=True)
class TokenBlock:
    """Consecutive tokens: `rows` of equal `length`, or one family of `length` tokens."""

    rows: int
    length: int
    family: Family | None = None


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


def pack(
    real: Tensor, index: Tensor, device: torch.device, ids: Tensor | None = None, least_shared: int = LEAST_SHARED
) -> Packing:
    """Lay a batch out for one pass without padding.

    Args:
        real: `[B, T]` bool on the CPU, True for a real token.
        index: `[B]` or `[B, T]` on the CPU: the adapter of each row or token, -1 for none.
        device: of the result.
        ids: `[B, T]` token ids; given, beginnings that rows have in common, in tokens and adapters, are computed once.
        least_shared: tokens of the shortest prefix that is shared.
    """
    lengths = [int(length) for length in real.sum(1).tolist()]
    owner = [int(adapter) for adapter in (index if index.dim() == 1 else index.amax(1)).tolist()]
    steps = real.shape[1]
    columns = [row.nonzero().squeeze(1).tolist() for row in real]
    families = [[row] for row in range(len(lengths)) if lengths[row]]
    prefix: dict[int, int] = {}
    if ids is not None:
        # With an adapter per token, rows of different adapters may begin alike: with tokens that have none.
        keys, groups = ids, owner
        if index.dim() == 2:
            keys, groups = ids * (max(owner, default=0) + 2) + index + 1, [0] * len(owner)
        tokens = [[row[c] for c in own] for row, own in zip(keys.tolist(), columns, strict=True)]
        families, prefix = _families(tokens, groups, least_shared)
    # Families first within an adapter, then single rows by length: rows of equal length are one block.
    families.sort(key=lambda rows: (owner[rows[0]], len(rows) == 1, lengths[rows[0]] if len(rows) == 1 else 0, rows[0]))
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
            own = flat if number == 0 else flat[shared:]
            places += flat
            source += range(first, first + shared)
            start = len(take) + (shared if number == 0 else 0)
            source += range(start, start + len(flat) - shared)
            take += own
            each = [int(index[row])] * len(own) if index.dim() == 1 else index[row, columns[row]].tolist()[-len(own) :]
            adapters += each
            sizes.append(len(flat) - shared)
        if len(rows) > 1:
            blocks.append(TokenBlock(1, len(take) - first, Family.of(shared, sizes, device)))
        elif blocks and blocks[-1].family is None and blocks[-1].length == lengths[rows[0]]:
            blocks[-1] = TokenBlock(blocks[-1].rows + 1, lengths[rows[0]])
        else:
            blocks.append(TokenBlock(1, lengths[rows[0]]))
    return Packing(
        torch.tensor(take, dtype=torch.int64, device=device),
        torch.tensor(adapters, dtype=torch.int64),
        tuple(blocks),
        torch.tensor(places, dtype=torch.int64, device=device),
        torch.tensor(source, dtype=torch.int64, device=device),
    )


def _families(
    tokens: Sequence[Sequence[int]], owner: Sequence[int], least: int
) -> tuple[list[list[int]], dict[int, int]]:
    """Rows that share a beginning, and its length by the first row of each family."""
    order = sorted((row for row in range(len(tokens)) if tokens[row]), key=lambda row: (owner[row], tokens[row]))
    families: list[list[int]] = []
    prefix: dict[int, int] = {}
    size = 0
    for row in order:
        last = families[-1][-1] if families else None
        if last is not None and owner[last] == owner[row]:
            # The last token of a row stays its own, so that no row is without a suffix.
            both = min(_common(tokens[last], tokens[row]), len(tokens[row]) - 1, len(tokens[last]) - 1)
            both = min(both, prefix.get(families[-1][0], both))
            grown = size + len(tokens[row]) - both
            if both >= max(least, min(len(tokens[last]), len(tokens[row])) / 2) and grown <= MOST_TOKENS:
                families[-1].append(row)
                prefix[families[-1][0]] = both
                size = grown
                continue
        families.append([row])
        size = len(tokens[row])
    return families, prefix


def _common(left: Sequence[int], right: Sequence[int]) -> int:
    """Length of the common beginning."""
    for place, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return place
    return min(len(left), len(right))


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    packing: Packing | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Hugging Face's `sdpa` attention, block by block where the batch is packed.

    `query` `[1, heads, N, head_dim]`, `key` and `value` with their own heads; returns `[1, N, heads, head_dim]`.
    """
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if packing is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    sizes = [block.rows * block.length for block in packing.blocks]

    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        return sdpa_attention_forward(module, q, k, v, None if mask is None else mask[None, None], **kwargs)[0]

    out = []
    for block, *parts in zip(packing.blocks, *(t[0].split(sizes, 1) for t in (query, key, value)), strict=True):
        if block.family is not None:
            out.append(_within_family(block.family, parts, attend))
            continue
        q, k, v = (part.unflatten(1, (block.rows, block.length)).transpose(0, 1) for part in parts)
        out.append(attend(q, k, v, None).flatten(0, 1))
    return torch.cat(out).unsqueeze(0), None


def _within_family(family: Family, parts: Sequence[Tensor], attend: Callable[..., Tensor]) -> Tensor:
    """Attention of a family's queries, keys and values, `[heads, N, head_dim]` each: `[N, heads, head_dim]`.

    The beginning attends to itself. Each rest attends to the beginning and to itself, all rests at once.
    """
    beginning, rest = [part[:, : family.shared] for part in parts], [part[:, family.shared :] for part in parts]
    first = attend(*(part.unsqueeze(0) for part in beginning), None)[0]
    # [heads, rows, longest, head_dim] -> [rows, heads, ...]
    queries, *others = (part[:, family.rests].transpose(0, 1) for part in rest)
    keys, values = (
        torch.cat((part.unsqueeze(0).expand(len(own), -1, -1, -1), own), 2)
        for part, own in zip(beginning[1:], others, strict=True)
    )
    return torch.cat((first, attend(queries, keys, values, family.mask)[family.real]))
