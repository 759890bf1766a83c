"""Who speaks next and what it sees. A workflow is a small class of pure functions on an immutable state."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from mafrt.config.schema import unknown
from mafrt.config.team import Team
from mafrt.core.errors import ConfigError
from mafrt.envs.math.workflows.base import INCORRECT, JUDGE, SEES, SPEAKS_AS, MathState, Workflow, transcript
from mafrt.envs.math.workflows.chain import Chain
from mafrt.envs.math.workflows.mathchat import MathChat
from mafrt.envs.math.workflows.solver_verifier import SolverVerifier

__all__ = [
    "INCORRECT",
    "JUDGE",
    "WORKFLOWS",
    "Chain",
    "MathChat",
    "MathState",
    "SolverVerifier",
    "Workflow",
    "make_workflow",
    "transcript",
]

WORKFLOWS: dict[str, Callable[..., Workflow]] = {
    "chain": Chain,
    "mathchat": MathChat,
    "solver_verifier": SolverVerifier,
}
"""By name; a workflow is added here. Called with team, horizon, judge_lines, and the options that were given."""


def make_workflow(name: str, team: Team, horizon: int, judge_lines: bool, **options: Any) -> Workflow:
    """The workflow called `name`, checked against the team. Options that are None are left to the workflow."""
    if name not in WORKFLOWS:
        raise ConfigError(unknown("workflow", str(name), WORKFLOWS))
    if isinstance(horizon, bool) or not isinstance(horizon, int) or horizon < 1:
        raise ConfigError(f"horizon must be a whole number of rounds, at least 1, found {horizon!r}")
    for reserved in SPEAKS_AS:
        if reserved in team.names:
            raise ConfigError(f"no agent may be called {reserved!r}: the environment speaks under that name")
    if not any(a.with_answer for a in team.agents):
        raise ConfigError(
            f"no agent of the team ({', '.join(team.names)}) has with_answer: true; "
            "set it for the one whose \\boxed{} answer counts"
        )
    given = {option: value for option, value in options.items() if value is not None}
    if given.get("sees", "all") not in SEES:
        raise ConfigError(f"sees is {given['sees']!r}; choose one of {', '.join(SEES)}")
    takes = inspect.signature(WORKFLOWS[name]).parameters
    for option in given:
        if option not in takes:
            raise ConfigError(f"workflow {name!r} has no setting {option}; leave it out, or take 'mathchat'")
    return WORKFLOWS[name](team, horizon, judge_lines, **given)
