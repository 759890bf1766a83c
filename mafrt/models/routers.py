"""Routers: the layers of a block that choose experts, known by what they are, since families name them anew.

`output_gate` is a linear layer of MiniMax's attention and `per_layer_input_gate` one of Gemma 4's, but `classifier` is
a router of LongCat's.
"""

from __future__ import annotations

from typing import Any

from torch import nn


def routers(block: nn.Module) -> list[str]:
    """Paths within a module of the children that choose experts, or weigh one that every token goes through.

    These stand beside experts and give a number for each of them, at most half as many more (for shared experts, or for
    none); or a single one.
    """
    found = []
    for path, holder in block.named_modules():
        children = dict(holder.named_children())
        counts = {count for child in children.values() for count in _experts_of(child)}
        for name, child in children.items() if counts else ():
            out = 0 if isinstance(child, nn.ModuleList) else _outputs(child)
            if out == 1 or any(count <= out <= count + count // 2 for count in counts):
                found.append(f"{path}.{name}" if path else name)
    return found


def _experts_of(module: nn.Module) -> set[int]:
    """Numbers of experts that a module holds, as matrices in one parameter or as modules in a list."""
    if isinstance(module, nn.ModuleList):
        listed = len(module) > 1 and all(_outputs(child) > 1 for child in module)
        return {len(module)} if listed else set()
    if hasattr(module, "kernel_size"):  # of a convolution
        return set()
    every = [parameter for _, parameter in module.named_parameters(recurse=False) if parameter.dim() == 3]
    # A projection to heads may have three dimensions too, and as many rows as numbers in each.
    return {len(p) for p in every if min(p.shape) > 1 and len(p) < p[0].numel()}


def _outputs(module: nn.Module) -> int:
    """Numbers that the last matrix of a module gives; 0: it has none."""
    out = 0
    for child in module.modules():
        part: Any = child
        if isinstance(size := getattr(part, "out_features", None), int):
            out = size
            continue
        weight: Any = getattr(part, "weight", None)
        if getattr(weight, "ndim", 0) == 2 and not isinstance(part, nn.Embedding):
            out = getattr(part, "nf", None) or len(weight)
    return out
