"""Several frozen bases in one team: one copy of each base however many agents sit on it.

An agent and its adapter belong to one base for the whole run, so rows of different bases never meet in a forward: the
engine, the learner and the critic each work base by base (`mafrt.engines.several`, `mafrt.training.several`). This
class has the part of `SharedBase` that code outside of those needs, and finds the base of an agent or an adapter.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TypeAlias

from torch import Tensor, nn

from mafrt.config.agent import LoraSpec
from mafrt.core.distributed import Processes
from mafrt.core.errors import ConfigError
from mafrt.models.adapted_model import Adapter
from mafrt.models.shared_base import SharedBase


class SeveralBases:
    """The bases of a team, with the adapters of each.

    Args:
        parts: name -> base; the first is the main one, which serves the coach and rows without an adapter.
        agents: agent -> name of its base.
        adapters: adapter -> name of its base.

    Raises:
        ConfigError: a base is missing, or there is only one.
    """

    def __init__(self, parts: Mapping[str, SharedBase], agents: Mapping[str, str], adapters: Mapping[str, str]) -> None:
        if len(parts) < 2:
            raise ConfigError(f"found {len(parts)} base, expected two or more; use SharedBase for one")
        for name in (*agents.values(), *adapters.values()):
            if name not in parts:
                raise ConfigError(f"found no base {name!r}, expected one of {', '.join(parts)}")
        self.parts = dict(parts)
        self._agents, self._adapters = dict(agents), dict(adapters)
        self.versions: dict[str, int] = {}
        """adapter -> number of changes, of all bases"""
        for part in self.parts.values():
            self.versions |= part.versions
            # One dictionary for all: adapters have unique names, so a version is found and set without its base.
            part.versions = self.versions

    @property
    def main(self) -> SharedBase:
        """The base that serves the coach and rows without an adapter."""
        return next(iter(self.parts.values()))

    @property
    def name(self) -> str:
        return self.main.name

    def of_agent(self, agent: str) -> SharedBase:
        """The base that an agent sits on; the main one for a name that is not in the team."""
        return self.parts[self.part_of(agent)]

    def of_adapter(self, adapter: str) -> SharedBase:
        """The base that an adapter belongs to; the main one for an adapter that is not the team's."""
        return self.parts[self.part_of_adapter(adapter)]

    def part_of(self, agent: str) -> str:
        """Name of the base that an agent sits on."""
        return self._agents.get(agent, next(iter(self.parts)))

    def part_of_adapter(self, adapter: str | None) -> str:
        """Name of the base that an adapter belongs to; the main one without an adapter."""
        return self._adapters.get(adapter or "", next(iter(self.parts)))

    @property
    def processes(self) -> Processes:
        """The processes of the run, the same for every base."""
        return self.main.processes

    @property
    def sharded(self) -> bool:
        return any(part.sharded for part in self.parts.values())

    @property
    def quantised(self) -> bool:
        return any(part.quantised for part in self.parts.values())

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Context for play; see `SharedBase.whole`."""
        with ExitStack() as stack:
            for part in self.parts.values():
                stack.enter_context(part.whole())
            yield

    def fingerprint(self) -> str:
        """12 hex digits of all bases with their agents."""
        parts = [(part.fingerprint(), [a for a, own in self._agents.items() if own == n]) for n, part in self._items()]
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:12]

    def _items(self) -> Sequence[tuple[str, SharedBase]]:
        return list(self.parts.items())

    # ----------------------------------------------------------------------------------------------------- adapters

    @property
    def records(self) -> dict[str, Adapter]:
        """Records of the adapters of all bases; an `index` counts on its own base."""
        return {name: record for part in self.parts.values() for name, record in part.records.items()}

    @property
    def adapters(self) -> dict[str, int]:
        """Adapter name -> index on its own base."""
        return {name: record.index for name, record in self.records.items()}

    def add_adapter(self, name: str, spec: LoraSpec, *, seed: int) -> None:
        self.of_adapter(name).add_adapter(name, spec, seed=seed)

    def copy_adapter(self, name: str, copy: str) -> None:
        """Add an adapter `copy` of the shape of `name`, on the same base."""
        self.of_adapter(name).copy_adapter(name, copy)
        self._adapters[copy] = self._adapters[name]

    def adapter_parameters(self, name: str) -> list[nn.Parameter]:
        return self.of_adapter(name).adapter_parameters(name)

    def adapter_state(self, name: str) -> dict[str, Tensor]:
        return self.of_adapter(name).adapter_state(name)

    def load_adapter_state(self, name: str, state: Mapping[str, Tensor]) -> None:
        self.of_adapter(name).load_adapter_state(name, state)

    def save_adapter(self, name: str, folder: str | Path) -> None:
        self.of_adapter(name).save_adapter(name, folder)

    def finite(self, name: str) -> bool:
        return self.of_adapter(name).finite(name)

    def load_adapter(self, name: str, folder: str | Path) -> None:
        self.of_adapter(name).load_adapter(name, folder)

    def bump(self, name: str) -> None:
        self.of_adapter(name).bump(name)


Bases: TypeAlias = SharedBase | SeveralBases
"""The base of a team, or its bases."""
