"""Rows of the caches that models make for themselves, put side by side.

Keys and values of attention, in a sliding window or not, and the states of convolutions and recurrences are all that is
known here. Rows end together: keys and values of shorter ones are padded on the left, and a recurrence has no padding.
For learning, states are replaced and never written to, so that a gradient passes through them.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import cache_utils
from transformers.cache_utils import (
    DynamicCache,
    DynamicLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionLayer,
)

KNOWN = ("DynamicLayer", "DynamicSlidingWindowLayer", "LinearAttentionLayer", "LinearAttentionAndFullAttentionLayer")
"""classes of a cache's layers"""


class _Replaced:
    """States of a convolution and of a recurrence, each kept as the model has made it."""

    conv_states: dict[int, Any]
    recurrent_states: dict[int, Any]

    def update_conv_state(
        self, conv_states: Tensor, state_idx: int = 0, conv_kernel_size: int | None = None, **given: Any
    ) -> Tensor:
        """What the convolution reads: the new inputs `[rows, channels, T]` behind those that were kept."""
        layer: Any = self
        before = self.conv_states[state_idx]
        if before is None:
            layer.conv_kernel_size[state_idx] = conv_kernel_size or conv_states.shape[-1]
            layer.device, layer.dtype = conv_states.device, conv_states.dtype
        if before is None:
            full = conv_states
        else:  # with the channels of a token side by side, as layers write and read them
            full = torch.cat((before.transpose(1, 2), conv_states.transpose(1, 2)), 1).transpose(1, 2)
        width = layer.conv_kernel_size[state_idx]
        full = functional.pad(full, (max(0, width - full.shape[-1]), 0))
        self.conv_states[state_idx] = full[..., -width:]
        layer.is_conv_states_initialized[state_idx] = layer.has_previous_state[state_idx] = True
        return full

    def update_recurrent_state(self, recurrent_states: Tensor, state_idx: int = 0, **given: Any) -> Tensor:
        """Keep a state."""
        layer: Any = self
        self.recurrent_states[state_idx] = recurrent_states
        layer.is_recurrent_states_initialized[state_idx] = True
        layer.device = recurrent_states.device
        return recurrent_states


class ReplacedStates(_Replaced, LinearAttentionLayer):
    """Of a layer that has no attention."""


class ReplacedStatesAndKeys(_Replaced, LinearAttentionAndFullAttentionLayer):  # type: ignore[misc, override]
    """Of a layer that has attention beside them."""


def check(cache: Any) -> None:
    """Raise TypeError for a cache whose rows are not known here."""
    known = [*(getattr(cache_utils, name, None) for name in KNOWN), ReplacedStates, ReplacedStatesAndKeys]
    if type(cache) is not DynamicCache or any(type(layer) not in known for layer in cache.layers):
        kinds = {type(layer).__name__ for layer in getattr(cache, "layers", ())}
        raise TypeError(f"found a {type(cache).__name__} of {', '.join(sorted(kinds))}, expected one of {KNOWN}")


def new_cache(config: Any) -> Any:
    """An empty cache through which gradients pass. Raises TypeError for a model whose cache is not known."""
    cache: Any = DynamicCache(config=config)
    check(cache)
    instead: dict[Any, Any] = {
        LinearAttentionLayer: ReplacedStates,
        LinearAttentionAndFullAttentionLayer: ReplacedStatesAndKeys,
    }
    cache.layers = [
        instead[type(layer)](number_of_states=layer.number_of_states) if type(layer) in instead else layer
        for layer in cache.layers
    ]
    return cache


def keeps_states(config: Any) -> bool:
    """Whether a model has recurrences or convolutions, by the cache that transformers makes for its configuration."""
    return any(isinstance(layer, LinearAttentionLayer) for layer in DynamicCache(config=config).layers)


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
        layers = [cache.layers[number] for cache in caches]
        if isinstance(layer, DynamicLayer):
            layer.keys, layer.values = (
                _ending_together([getattr(o, name) for o in layers]) for name in ("keys", "values")
            )
        if isinstance(layer, LinearAttentionLayer):
            for name in ("conv_states", "recurrent_states"):
                states = {key: [getattr(o, name)[key] for o in layers] for key in getattr(layer, name)}
                setattr(layer, name, {key: None if s[0] is None else torch.cat(s) for key, s in states.items()})
    return made


def _ending_together(parts: Sequence[Tensor]) -> Tensor:
    """`[rows, heads, tokens, width]` each, padded on the left to the longest."""
    span = max(part.shape[2] for part in parts)
    return torch.cat([functional.pad(part, (0, 0, span - part.shape[2], 0)) for part in parts])
