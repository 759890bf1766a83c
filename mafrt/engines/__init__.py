"""Engines: token ids in; token ids, log-probabilities and stop reasons out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from mafrt.core.types import Completion, Request


class Engine(Protocol):
    """Anything that can sample for the team.

    `generate` returns one completion per request, in the order of the requests. Equal requests (same prompt,
    adapter, version, sampling, seed) give equal tokens in any batch, up to floating-point ties.

    Four members may be left out: `foreign`, True where another implementation than the trainer's computes the
    log-probabilities, which therefore recomputes them; `rest()`, to give memory back until the next call; `forget()`,
    called before a batch of episodes, to drop caches of earlier ones, so that a resumed run samples the same;
    `close()`.
    """

    def generate(self, requests: Sequence[Request]) -> list[Completion]: ...


def is_foreign(engine: Engine) -> bool:
    """Whether the engine's log-probabilities are another implementation's than the trainer's."""
    return bool(getattr(engine, "foreign", False))


def rest(engine: Engine) -> None:
    """Have the engine give its memory back until it is asked again, if it can."""
    getattr(engine, "rest", _nothing)()


def forget(engine: Engine) -> None:
    """Have the engine drop what it keeps of earlier calls, if anything."""
    getattr(engine, "forget", _nothing)()


def close(engine: Engine) -> None:
    """End the processes that the engine has started, if any."""
    getattr(engine, "close", _nothing)()


def _nothing() -> None:
    pass
