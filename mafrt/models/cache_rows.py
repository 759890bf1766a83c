"""Rows of the caches that models make for themselves, put side by side.

Keys and values of attention, in a sliding window or not, and the states of convolutions and recurrences are all that is
known here. Rows end together: shorter ones have padding on the left of their keys and values, and a recurrence has none.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import cache_utils
from transformers.cache_utils import DynamicCache, DynamicLayer, LinearAttentionLayer

KNOWN = ("DynamicLayer", "DynamicSlidingWindowLayer", "LinearAttentionLayer", "LinearAttentionAndFullAttentionLayer")
"""classes of a cache's layers"""


def check(cache: Any) -> None:
    """Raise TypeError for a cache whose rows are not known here."""
    known = [getattr(cache_utils, name, None) for name in KNOWN]
    if type(cache) is not DynamicCache or any(type(layer) not in known for layer in cache.layers):
        kinds = {type(layer).__name__ for layer in getattr(cache, "layers", ())}
        raise TypeError(f"found a {type(cache).__name__} of {', '.join(sorted(kinds))}, expected one of {KNOWN}")


def side_by_side(caches: Sequence[Any], lengths: Sequence[int]) -> Any:
    """One cache with the rows of all.

    Args:
        caches: of one model.
        lengths: tokens of each, padding included.

    Raises:
        TypeError: see `check`.
    """
    longest = caches[lengths.index(max(lengths))]
    check(longest)
    # What a layer knows beside its tensors, such as the tokens that a window has seen, is that of the longest rows.
    made = copy.copy(longest)
    made.layers = [copy.copy(layer) for layer in longest.layers]
    for number, layer in enumerate(made.layers):
        own = [cache.layers[number] for cache in caches]
        if isinstance(layer, DynamicLayer):
            layer.keys, layer.values = (_ending_together([getattr(o, name) for o in own]) for name in ("keys", "values"))
        if isinstance(layer, LinearAttentionLayer):
            for name in ("conv_states", "recurrent_states"):
                states = {key: [getattr(o, name)[key] for o in own] for key in getattr(layer, name)}
                setattr(layer, name, {key: None if s[0] is None else torch.cat(s) for key, s in states.items()})
    return made


def _ending_together(parts: Sequence[Tensor]) -> Tensor:
    """`[rows, heads, tokens, width]` each, padded on the left to the longest."""
    span = max(part.shape[2] for part in parts)
    return torch.cat([functional.pad(part, (0, 0, span - part.shape[2], 0)) for part in parts])
