"""The environment and team that a training script has built from its settings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mafrt.config.team import Team
    from mafrt.environment.base import Env


@dataclass(frozen=True)
class PreparedRun:
    """Parts of a run that are built and checked before a model is loaded."""

    env: Env
    eval_env: Env | None
    team: Team
    name: str
    """names the default run directory"""
    notes: tuple[str, ...] = ()
    """lines for the person at the terminal"""
