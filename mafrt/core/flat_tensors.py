"""States of many small tensors as a few large ones, since reading each tensor of a file costs as much as a thousand
numbers: an optimizer has three tensors for every weight of an adapter.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

MARK = "\0tensor "
"""Begins the text that stands for a tensor; its number follows."""
CONTENT, TENSORS, PLACES = "\0content", "\0tensors", "\0places"


def flattened(state: Any) -> Any:
    """A state with its plain tensors laid end to end, one tensor for each type of number, on the CPU.

    Args:
        state: dictionaries, lists and tuples of tensors and plain values. Other kinds of tensors stay as they are.
    """
    import torch

    found: list[Tensor] = []

    def take(value: Any) -> Any:
        if type(value) is torch.Tensor and value.layout == torch.strided and not value.is_quantized:
            found.append(value.detach().cpu())
            return f"{MARK}{len(found) - 1}"
        return value

    content = _mapped(state, take)
    parts: dict[torch.dtype, list[Tensor]] = {}
    ends: dict[torch.dtype, int] = {}
    places = []
    for tensor in found:
        first = ends.get(tensor.dtype, 0)
        parts.setdefault(tensor.dtype, []).append(tensor.reshape(-1))
        ends[tensor.dtype] = first + tensor.numel()
        places.append((list(parts).index(tensor.dtype), first, list(tensor.shape)))
    # One text, since a weights-only reader takes every number of a list by itself.
    return {CONTENT: content, TENSORS: [torch.cat(some) for some in parts.values()], PLACES: json.dumps(places)}


def restored(loaded: Any) -> Any:
    """The inverse of `flattened`; anything else is returned as it is."""
    if not isinstance(loaded, dict) or loaded.keys() != {CONTENT, TENSORS, PLACES}:
        return loaded
    tensors, places = loaded[TENSORS], json.loads(loaded[PLACES])

    def give(value: Any) -> Any:
        if not isinstance(value, str) or not value.startswith(MARK):
            return value
        number, first, shape = places[int(value[len(MARK) :])]
        size = 1
        for axis in shape:
            size *= axis
        # A copy: an optimizer may hold one of them longer than the others.
        return tensors[number].narrow(0, first, size).view(shape).clone()

    return _mapped(loaded[CONTENT], give)


def _mapped(value: Any, leaf: Callable[[Any], Any]) -> Any:
    """The same containers with `leaf` of everything in them."""
    if isinstance(value, dict):
        return type(value)((key, _mapped(item, leaf)) for key, item in value.items())
    if type(value) in (list, tuple):
        return type(value)(_mapped(item, leaf) for item in value)
    return leaf(value)
