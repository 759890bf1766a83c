"""Which adapter acts on which token of a forward pass. All layers of a base share it through their `LoraContext`."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor

from mafrt.models.tensors import moved

Layout: TypeAlias = "tuple[tuple[int, int, float], ...]"
"""(adapter, rank, scaling) of the batch's adapters that exist in a layer"""


@dataclass
class AdapterRouting:
    """The adapters of one forward pass over a `[rows, steps]` batch."""

    rows: int
    steps: int
    index: Tensor
    """`[rows]` or `[rows, steps]` on the CPU: the adapter of each row or token, -1 for none"""
    train: frozenset[int] | None = None
    """adapters that get gradients; None: all"""
    whole: Tensor | None = None
    """`[rows, tokens]` on the CPU: of the rows up to here, for layers that read anew what a cache has compressed"""
    present: tuple[int, ...] = field(init=False)
    """adapters of the batch, ascending"""
    masks: dict[Layout, Tensor] = field(default_factory=dict)
    """by layout, shared by the layers that have it"""
    derived: dict[object, Any] = field(default_factory=dict)
    """what a faster form derives from this routing once for all layers"""
    _of_last_tokens: dict[int, AdapterRouting] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        self.present = tuple(k for k in torch.unique(self.index).tolist() if k >= 0)

    def learns(self, adapter: int) -> bool:
        return self.train is None or adapter in self.train

    def over(self, tokens: int) -> AdapterRouting:
        """The routing of a layer that sees other tokens than the pass. Raises ValueError where they are not known."""
        steps, rest = divmod(tokens, self.rows)
        if self.whole is None or rest or steps > self.whole.shape[1]:
            raise ValueError(f"found {tokens} tokens in a layer, expected {self.rows} x {self.steps}")
        if steps not in self._of_last_tokens:
            # A sliding window keeps the last ones.
            self._of_last_tokens[steps] = AdapterRouting(self.rows, steps, self.whole[:, -steps:], self.train)
        return self._of_last_tokens[steps]

    def mask(self, layout: Layout, like: Tensor) -> Tensor:
        """`[rows, 1 or steps, sum of ranks]`: an adapter's scaling where a rank is the token's adapter's, else 0."""
        if layout not in self.masks:
            owner = torch.tensor([float(k) for k, rank, _ in layout for _ in range(rank)])
            scale = torch.tensor([s for _, rank, s in layout for _ in range(rank)])
            index, owner, scale = moved([self.index.float(), owner, scale], like.device)
            self.masks[layout] = ((index.reshape(self.rows, -1, 1) == owner) * scale).to(like.dtype)
        return self.masks[layout]


class LoraContext:
    """The routing of the current forward pass, shared by all layers of one base. None: the bare base."""

    def __init__(self) -> None:
        self._routings: dict[int, AdapterRouting | None] = {}
        self.sharded = False
        """whether FSDP or DeepSpeed gathers the frozen weights before a layer's forward and frees them after it"""
        self.device: torch.device | None = None
        """of adapters that are added to a sharded base, whose weights may wait elsewhere; None: where those are"""
        self.packed: Any = None
        """copies of the frozen weights that a faster form has made"""

    @property
    def routing(self) -> AdapterRouting | None:
        """The routing of this thread; one thread may sample while another trains."""
        return self._routings.get(threading.get_ident())

    @contextmanager
    def use(self, routing: AdapterRouting | None) -> Iterator[None]:
        before, thread = self.routing, threading.get_ident()
        self._routings[thread] = routing
        try:
            yield
        finally:
            if before is None:
                del self._routings[thread]
            else:
                self._routings[thread] = before
