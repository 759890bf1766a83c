"""Engines: token ids in; token ids, log-probabilities and stop reasons out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from mafrt.types import Completion, Request


class Engine(Protocol):
    """Anything that can sample for the team.

    `generate` returns one completion per request, in the order of the requests. Equal requests (same prompt,
    adapter, version, sampling, seed) give equal tokens whatever else is in the batch, up to floating-point ties.
    """

    def generate(self, requests: Sequence[Request]) -> list[Completion]: ...
