"""Places for adapters on the base, each of one shape, which training clients and samplers take and give back.

A place that is given back keeps its shape and takes the weights of the next one; where all are taken, an idle one of
another shape is made anew.
"""

from __future__ import annotations

import itertools
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mafrt.models.multi_lora import initial_a
from mafrt.models.peft_format import keys
from mafrt.sandbox.fair_semaphore import Slots
from mafrt.scripts.tinker_server.limits import Limits, refused

if TYPE_CHECKING:
    from torch import Tensor

    from mafrt.models.shared_base import SharedBase

ALPHA = 32.0
"""of every adapter, as the API has it"""


@dataclass(frozen=True)
class Shape:
    """Rank and kinds of layers of an adapter."""

    rank: int
    attention: bool
    mlp: bool


@dataclass(eq=False)
class Sampler:
    """Weights that are sampled from: a snapshot or a checkpoint, in a place while they are used."""

    shape: Shape
    folder: Path
    """PEFT folder of the weights, written at the latest when they lose their place"""
    slot: str | None = None
    users: int = 0
    """requests that sample from it now"""
    saved: bool = True
    """whether the folder holds the weights"""


class AdapterSlots:
    """Hands out adapters of the base by name.

    Args:
        base: holds the adapters.
        limits: bound the number of places.
    """

    def __init__(self, base: SharedBase, limits: Limits) -> None:
        self.base, self.limits = base, limits
        self.sampling, self.training = Slots(1), Slots(1)
        """held for a decode step, and for a micro-batch; whoever changes a place holds both"""
        self._lock = threading.RLock()
        self._free: dict[Shape, list[str]] = {}
        self._resident: list[Sampler] = []
        """samplers with a place, the least recently used first"""
        self._layers: dict[tuple[bool, bool], list[str]] = {}
        self._numbers = itertools.count()

    @contextmanager
    def changing(self) -> Iterator[None]:
        """While neither a decode step nor a micro-batch runs."""
        with self.training, self.sampling:
            yield

    def layers(self, shape: Shape) -> list[str]:
        """Paths of the linear layers of a shape. Raises RefusedError if there are none."""
        key = (shape.attention, shape.mlp)
        if key not in self._layers:
            every = self.base.match_targets("client", ("all-linear",))
            # Whatever mixes tokens is attention here, recurrences too.
            mixing = {path for path in every if any(part in path.lower() for part in ("attn", "attention", "mixer"))}
            self._layers[key] = [path for path in every if (shape.attention if path in mixing else shape.mlp)]
        if not self._layers[key]:
            raise refused("the adapter would have no layers; set train_attn or train_mlp")
        return self._layers[key]

    def take(self, shape: Shape) -> str:
        """A place of this shape; its weights are those of whoever had it before.

        Raises:
            RefusedError: all places are taken (429), or the shape has no layers (400).
        """
        with self._lock:
            layers = self.layers(shape)
            full = len(self.base.records) >= self.limits.slots
            if full and not any(self._free.values()):
                self._evict(shape)
            if free := self._free.get(shape):
                return free.pop()
            spare = next(filter(None, self._free.values()), None) if full else None
            if full and spare is None:
                raise refused(
                    "all places for adapters are taken; end a session, or start the server with more --slots", 429
                )
            # A name of its own, for what is cached by names.
            name = f"slot{next(self._numbers)}"
            with self.changing():
                if spare is not None:
                    self.base.remove_adapter(spare.pop())
                scaling = ALPHA / shape.rank
                self.base.place_adapter(name, shape.rank, ALPHA, dict.fromkeys(layers, (shape.rank, scaling)), seed=0)
            return name

    def give(self, shape: Shape, slot: str) -> None:
        """Give a place back."""
        with self._lock:
            self._free.setdefault(shape, []).append(slot)

    def begin(self, slot: str, seed: str) -> None:
        """Weights of a new adapter, a function of the seed: B is 0."""
        import torch

        state: dict[str, Tensor] = {}
        for path, (a, b) in self.base.stored_layers(slot).items():  # experts have their A in one matrix
            name_a, name_b = keys(path)
            state[name_a], state[name_b] = initial_a(a.shape[0], a.shape[1], f"{seed}/{path}"), torch.zeros(b.shape)
        self.load(slot, state)

    def load(self, slot: str, state: dict[str, Tensor]) -> None:
        with self.changing():
            self.base.load_adapter_state(slot, state)

    def read(self, slot: str, folder: Path) -> None:
        """Read a PEFT folder of the place's shape. Raises CheckpointError."""
        with self.changing():
            self.base.load_adapter(slot, folder)

    # ------------------------------------------------------------------------------------------------------ samplers

    def snapshot(self, slot: str, shape: Shape, folder: Path) -> Sampler:
        """A sampler with the present weights of a place."""
        import torch

        sampler = Sampler(shape, folder, self.take(shape), saved=False)
        with self.changing(), torch.no_grad():
            assert sampler.slot is not None
            for parameter, trained in zip(
                self.base.adapter_parameters(sampler.slot), self.base.adapter_parameters(slot), strict=True
            ):
                parameter.copy_(trained)
            self.base.bump(sampler.slot)
        with self._lock:
            self._resident.append(sampler)
        return sampler

    def hold(self, sampler: Sampler) -> str:
        """The place of a sampler, which it keeps until `release`. Raises RefusedError and CheckpointError."""
        with self._lock:
            if sampler.slot is None:
                slot = self.take(sampler.shape)
                try:
                    self.read(slot, sampler.folder)
                except BaseException:
                    self.give(sampler.shape, slot)
                    raise
                sampler.slot = slot
            else:
                self._resident.remove(sampler)
            self._resident.append(sampler)
            sampler.users += 1
            return sampler.slot

    def release(self, sampler: Sampler) -> None:
        with self._lock:
            sampler.users -= 1

    def drop(self, sampler: Sampler) -> None:
        """A snapshot is not used any more; its place is free once its last request ends."""
        with self._lock:
            shutil.rmtree(sampler.folder, ignore_errors=True)
            if sampler.slot is not None and not sampler.users:
                self._resident.remove(sampler)
                self.give(sampler.shape, sampler.slot)
                sampler.slot = None
            else:
                sampler.saved = True  # nothing is written when it is evicted

    def _evict(self, shape: Shape) -> None:
        """Take the place of the sampler that was not used for the longest time, of this shape if there is one."""
        idle = [each for each in self._resident if not each.users]
        if not idle:
            return
        sampler = min(idle, key=lambda each: each.shape != shape)  # the first of these
        assert sampler.slot is not None
        if not sampler.saved:
            self.base.save_adapter(sampler.slot, sampler.folder)
            sampler.saved = True
        self._resident.remove(sampler)
        self.give(sampler.shape, sampler.slot)
        sampler.slot = None
