"""One engine for each base of a team; every request goes to the engine of its adapter's base."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from mafrt import engines
from mafrt.core.types import Completion, Request
from mafrt.engines import Engine
from mafrt.models.several_bases import base_by_base


class SeveralEngines:
    """The engines of a team on several bases.

    Args:
        parts: name of the base -> its engine; the first serves requests without an adapter.
        part_of: adapter -> name of its base.
    """

    def __init__(self, parts: Mapping[str, Engine], part_of: Callable[[str | None], str]) -> None:
        self.parts, self.part_of = dict(parts), part_of
        self.foreign = any(engines.is_foreign(engine) for engine in self.parts.values())

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """One completion per request, in their order."""
        bases = [self.part_of(request.adapter) for request in requests]
        return base_by_base(self.parts, bases, requests, lambda engine, own: engine.generate(own))

    def rest(self) -> None:
        for engine in self.parts.values():
            engines.rest(engine)

    def forget(self) -> None:
        for engine in self.parts.values():
            engines.forget(engine)

    def close(self) -> None:
        for engine in self.parts.values():
            engines.close(engine)
