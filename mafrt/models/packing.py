"""Batches without padding, in which rows that begin alike compute their common beginning once.

The real tokens of a padded batch become one long row. Rows of one adapter that share at least half of their tokens (the
samples of one prompt, or prompts with a common transcript) form a family: its prefix stands once, followed by the rest
of each row, and a mask lets every token see the prefix and its own row only. Hidden states and gradients are those of
row-by-row passes up to rounding, since a causal model's states at the prefix do not depend on what follows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

LEAST_SHARED = 16
"""tokens of the shortest prefix that is worth a mask"""
MOST_TOKENS = 2048
"""of a family, whose mask has the square of that many entries"""


@dataclass(frozen=True)
class Packing:
    """The tokens to compute of a padded `[B, T]` batch, as one long row of N tokens.

    Rows are sorted by adapter, so that the tokens of each adapter are one segment.
    """

    take: Tensor
    """`[N]`: position in the flattened batch that each token is read from"""
    index: Tensor
    """`[N]` on the CPU: adapter of each token"""
    blocks: tuple[tuple[int, int, Tensor | None], ...]
    """consecutive (rows, length, mask): rows of equal length without a mask, or one family with a mask `[length,
    length]` that is True where a token (first axis) may attend to another"""
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
        ids: `[B, T]` token ids; given, and with one adapter per row, common beginnings are computed once.
        least_shared: tokens of the shortest prefix that is shared.
    """
    lengths = [int(length) for length in real.sum(1).tolist()]
    owner = [int(adapter) for adapter in (index if index.dim() == 1 else index.amax(1)).tolist()]
    steps = real.shape[1]
    columns = [row.nonzero().squeeze(1).tolist() for row in real]
    families = [[row] for row in range(len(lengths)) if lengths[row]]
    prefix: dict[int, int] = {}
    if ids is not None and index.dim() == 1:
        tokens = [[row[c] for c in own] for row, own in zip(ids.tolist(), columns, strict=True)]
        families, prefix = _families(tokens, owner, least_shared)
    # Families first within an adapter, then single rows by length: rows of equal length are one block.
    families.sort(key=lambda rows: (owner[rows[0]], len(rows) == 1, lengths[rows[0]] if len(rows) == 1 else 0, rows[0]))
    take: list[int] = []
    places: list[int] = []
    source: list[int] = []
    adapters: list[int] = []
    blocks: list[tuple[int, int, Tensor | None]] = []
    for rows in families:
        shared = prefix.get(rows[0], 0) if len(rows) > 1 else 0
        first, sizes = len(take), [shared]
        for number, row in enumerate(rows):
            flat = [row * steps + column for column in columns[row]]
            own = flat if number == 0 else flat[shared:]
            places += flat
            source += range(first, first + shared)
            start = len(take) + (shared if number == 0 else 0)
            source += range(start, start + len(flat) - shared)
            take += own
            adapters += [int(index[row])] * len(own) if index.dim() == 1 else index[row, columns[row]].tolist()
            sizes.append(len(flat) - shared)
        if len(rows) > 1:
            blocks.append((1, len(take) - first, _mask(sizes).to(device)))
        elif blocks and blocks[-1][2] is None and blocks[-1][1] == lengths[rows[0]]:
            blocks[-1] = (blocks[-1][0] + 1, lengths[rows[0]], None)
        else:
            blocks.append((1, lengths[rows[0]], None))
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


def _mask(sizes: Sequence[int]) -> Tensor:
    """Who sees whom in a family: `sizes` are the tokens of the prefix (first) and of each row's rest."""
    part = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    seen = (part.unsqueeze(0) == 0) | (part.unsqueeze(0) == part.unsqueeze(1))
    return seen & torch.ones(len(part), len(part), dtype=torch.bool).tril()


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
    sizes = [count * length for count, length, _ in packing.blocks]
    out = []
    parts_of = (t.split(sizes, 2) for t in (query, key, value))
    for (count, length, mask), *parts in zip(packing.blocks, *parts_of, strict=True):
        q, k, v = (part[0].unflatten(1, (count, length)).transpose(0, 1) for part in parts)
        own = None if mask is None else mask[None, None]
        out.append(sdpa_attention_forward(module, q, k, v, own, **kwargs)[0].flatten(0, 1))
    return torch.cat(out).unsqueeze(0), None
