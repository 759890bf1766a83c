"""Beginnings that rows share, computed once where rows are not packed: recurrences, convolutions, windows.

Beginnings of one length are one pass with the model's own cache; the rest of each row goes on from a copy of their
states, padded on the right. States are replaced and never written to, so that a gradient passes through them to the
beginnings. Hidden states and gradients are those of whole rows up to rounding.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from mafrt.models import cache_rows
from mafrt.models.packing import LEAST_SHARED, ordered_families


def forward(
    base: Any, ids: Tensor, real: Tensor, index: Tensor, learn: frozenset[int] | None, least: int = LEAST_SHARED
) -> Tensor | None:
    """Hidden states `[B, T, d]`, zero in the padding; None where no rows share a beginning.

    Args:
        base: a SharedBase, whose module imports this one.
        ids: `[B, T]`.
        real: `[B, T]` bool on the CPU; padding stands on the right.
        index: `[B]` or `[B, T]` on the CPU: adapter of each row or token.
        learn: adapters that get gradients; None: all.
        least: tokens of the shortest beginning that is shared.
    """
    owner = [int(adapter) for adapter in (index if index.dim() == 1 else index.amax(1)).tolist()]
    lengths = [int(length) for length in real.sum(1).tolist()]
    columns = [list(range(length)) for length in lengths]
    families, prefix = ordered_families(columns, index, ids.cpu(), owner, {}, least, 2**62)
    shared = sorted((rows for rows in families if prefix.get(rows[0], 0)), key=lambda rows: prefix[rows[0]])
    if not shared:
        return None
    adapters = (index.unsqueeze(1) if index.dim() == 1 else index).expand(ids.shape)
    device, sizes = ids.device, [prefix[rows[0]] for rows in shared]
    parts, caches, begun = list[Tensor](), list[Any](), list[Tensor]()
    # Those of one length together: a row that sees nothing but padding has no gradient that is a number.
    for size in dict.fromkeys(sizes):
        first = torch.tensor([rows[0] for rows, length in zip(shared, sizes, strict=True) if length == size])
        states, cache = base.read(
            ids[first.to(device), :size], adapters[first, :size], cache_rows.new_cache(base.config), learn=learn
        )
        parts.append(states.flatten(0, 1))
        caches.append(cache)
        begun.append(functional.pad(adapters[first, :size], (sizes[-1] - size, 0), value=-1))
    cache = caches[0] if len(caches) == 1 else cache_rows.side_by_side(caches, [*dict.fromkeys(sizes)])
    family = torch.tensor([number for number, rows in enumerate(shared) for _ in rows])
    cache.reorder_cache(family.to(device))
    # The rest of each row is padded on the right, where nothing that is read sees the padding.
    rows = torch.tensor([row for rows in shared for row in rows])
    before = torch.tensor(sizes)[family].unsqueeze(1)
    left = torch.tensor(lengths)[rows].unsqueeze(1) - before
    steps = torch.arange(int(left.max()))
    where = before + torch.minimum(steps, left - 1)
    mask = torch.arange(sizes[-1] + len(steps)) >= sizes[-1] - before
    states, _ = base.read(
        ids[rows.to(device).unsqueeze(1), where.to(device)],
        torch.cat((torch.cat(begun)[family], adapters[rows.unsqueeze(1), where]), 1),
        cache,
        (before + steps).to(device),
        None if len(caches) == 1 else mask.long().to(device),
        learn=learn,
    )
    parts.append(states.flatten(0, 1))
    alone = [members[0] for members in families if not prefix.get(members[0], 0)]
    longest = max((lengths[row] for row in alone), default=0)
    if alone:
        only = torch.tensor(alone)
        parts.append(base.padded(ids[only.to(device), :longest], adapters[only, :longest], learn).flatten(0, 1))
    # Where each token of the batch lies in these passes.
    source, target, width = list[int](), list[int](), ids.shape[1]
    starts, after = [sum(sizes[:number]) for number in range(len(sizes) + 1)], 0
    for number, members in enumerate(shared):
        for row in members:
            place = starts[-1] + after * len(steps)
            source += range(starts[number], starts[number + 1])
            source += range(place, place + lengths[row] - sizes[number])
            target += range(row * width, row * width + lengths[row])
            after += 1
    for number, row in enumerate(alone):
        place = starts[-1] + after * len(steps) + number * longest
        source += range(place, place + lengths[row])
        target += range(row * width, row * width + lengths[row])
    states = torch.cat(parts)[torch.tensor(source, device=device)]
    laid = states.new_zeros(len(ids) * width, states.shape[-1])
    return laid.index_copy(0, torch.tensor(target, device=device), states).view(*ids.shape, -1)
