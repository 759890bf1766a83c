"""States of many small tensors as a few large ones, since reading each tensor of a file costs as much as a thousand
numbers: an optimizer has three tensors for every weight of an adapter.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Sequence
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
            found.append(value.detach())
            return f"{MARK}{len(found) - 1}"
        return value

    content: Any = _mapped(state, take)
    found = on_cpu(found)
    # As one text where it is plain: the weights-only reader is written in Python and takes every key by itself.
    with contextlib.suppress(TypeError):
        content = json.dumps(_tagged(content))
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


def on_cpu(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Each on the CPU; those of a GPU come in one transfer for each type of number, since every one is waited for."""
    import torch

    found = [tensor.detach() for tensor in tensors]
    kinds: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for place, tensor in enumerate(found):
        if tensor.device.type != "cpu":
            kinds.setdefault((tensor.device, tensor.dtype), []).append(place)
    for places in kinds.values():
        whole = torch.cat([found[place].reshape(-1) for place in places]).cpu()
        for place, part in zip(places, whole.split([found[place].numel() for place in places]), strict=True):
            found[place] = part.view(found[place].shape)
    return found


def restored(loaded: Any) -> Any:
    """The inverse of `flattened`; anything else is returned as it is."""
    if not isinstance(loaded, dict) or loaded.keys() != {CONTENT, TENSORS, PLACES}:
        return loaded
    places = json.loads(loaded[PLACES])
    # They lie one behind the other, so that one call per type of number finds all of them.
    sizes: list[list[int]] = [[] for _ in loaded[TENSORS]]
    ends = [0] * len(sizes)
    for number, first, shape in places:
        if first != ends[number]:
            raise ValueError(f"found a tensor at {first}, expected it at {ends[number]}, where the one before ends")
        sizes[number].append(math.prod(shape))
        ends[number] += sizes[number][-1]
    parts = [iter(whole.split(sizes_of_one)) for whole, sizes_of_one in zip(loaded[TENSORS], sizes, strict=True)]
    views = [next(parts[number]).view(shape) for number, _, shape in places]

    def give(value: Any) -> Any:
        if not isinstance(value, str) or not value.startswith(MARK):
            return value
        # A copy: an optimizer may hold one of them longer than the others.
        return views[int(value[len(MARK) :])].clone()

    content = loaded[CONTENT]
    return _untagged(json.loads(content), give) if isinstance(content, str) else _mapped(content, give)


def _tagged(value: Any) -> Any:
    """Containers as lists that begin with their kind, for JSON. Raises TypeError for anything that it would change."""
    if type(value) is dict:
        if not all(type(key) in (str, int) for key in value):
            raise TypeError("a key that is neither text nor an integer")
        return ["d", list(value), [_tagged(item) for item in value.values()]]
    if type(value) in (list, tuple):
        return ["l" if type(value) is list else "t", *map(_tagged, value)]
    if value is not None and type(value) not in (bool, int, float, str):
        raise TypeError(f"a {type(value).__name__}")
    return value


def _untagged(value: Any, leaf: Callable[[Any], Any]) -> Any:
    """The inverse of `_tagged`, with `leaf` of everything in the containers."""
    if type(value) is not list:
        return leaf(value)
    kind, *items = value
    if kind == "d":
        return {key: _untagged(item, leaf) for key, item in zip(*items, strict=True)}
    inside = [_untagged(item, leaf) for item in items]
    return inside if kind == "l" else tuple(inside)


def _mapped(value: Any, leaf: Callable[[Any], Any]) -> Any:
    """The same containers with `leaf` of everything in them."""
    if isinstance(value, dict):
        return type(value)((key, _mapped(item, leaf)) for key, item in value.items())
    if type(value) in (list, tuple):
        return type(value)(_mapped(item, leaf) for item in value)
    return leaf(value)
