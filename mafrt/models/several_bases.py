"""Several frozen bases in one team: one copy of each base however many agents sit on it.

An agent and its adapter belong to one base for the whole run, so rows of different bases never meet in a forward: the
engine, the learner and the critic each work base by base (`mafrt.engines.several`, `mafrt.training.several`). This
module says how: `base_by_base` for rows, `by_adapter` for what is done with one adapter. `SeveralBases` has the part of
`SharedBase` that code outside of those needs, and finds the base of an agent or an adapter.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeAlias, TypeVar

from mafrt.core.distributed import Processes
from mafrt.core.errors import ConfigError
from mafrt.models.adapted_model import Adapter
from mafrt.models.shared_base import SharedBase

Part = TypeVar("Part")
Item = TypeVar("Item")
Result = TypeVar("Result")
Arguments = ParamSpec("Arguments")


def by_adapter(
    method: Callable[Concatenate[Part, str, Arguments], Result],
) -> Callable[Concatenate[Any, str, Arguments], Result]:
    """The method of a class that has `of_adapter`: `method` of the part to which its first argument belongs."""

    @wraps(method)
    def call(self: Any, adapter: str, /, *args: Arguments.args, **settings: Arguments.kwargs) -> Result:
        result: Result = getattr(self.of_adapter(adapter), method.__name__)(adapter, *args, **settings)
        return result

    return call


def base_by_base(
    parts: Mapping[str, Part],
    bases: Sequence[str],
    items: Sequence[Item],
    compute: Callable[[Part, list[Item]], Sequence[Result]],
) -> list[Result]:
    """One result per item, in their order: each part (name of the base -> part) computes those of its own base.

    `bases` has the name of each item's base.
    """
    results: dict[int, Result] = {}
    for name, part in parts.items():
        if places := [place for place, base in enumerate(bases) if base == name]:
            results |= zip(places, compute(part, [items[place] for place in places]), strict=True)
    return [results[place] for place in range(len(items))]


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
        """Name of the base that holds an adapter, or will; the main one without an adapter."""
        holder = next((name for name, part in self.parts.items() if adapter in part.records), None)
        return holder or self._adapters.get(adapter or "", next(iter(self.parts)))

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
        agents_of = {name: [agent for agent, base in self._agents.items() if base == name] for name in self.parts}
        parts = [(part.fingerprint(), agents_of[name]) for name, part in self.parts.items()]
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:12]

    @property
    def records(self) -> dict[str, Adapter]:
        """Records of the adapters of all bases; an `index` counts on its own base."""
        return {name: record for part in self.parts.values() for name, record in part.records.items()}

    @property
    def adapters(self) -> dict[str, int]:
        """Adapter name -> index on its own base."""
        return {name: record.index for name, record in self.records.items()}

    add_adapter = by_adapter(SharedBase.add_adapter)
    copy_adapter = by_adapter(SharedBase.copy_adapter)
    adapter_parameters = by_adapter(SharedBase.adapter_parameters)
    adapter_state = by_adapter(SharedBase.adapter_state)
    load_adapter_state = by_adapter(SharedBase.load_adapter_state)
    save_adapter = by_adapter(SharedBase.save_adapter)
    load_adapter = by_adapter(SharedBase.load_adapter)
    targets_of = by_adapter(SharedBase.targets_of)
    bump = by_adapter(SharedBase.bump)


Bases: TypeAlias = SharedBase | SeveralBases
"""The base of a team, or its bases."""
