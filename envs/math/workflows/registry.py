"""Workflows by name or path: small classes of pure functions for the order of turns and the observations."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

from mafrt.config.resolve import Registry, user_line
from mafrt.config.team import Team
from mafrt.core.errors import ConfigError, MafrtError
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
    "register_workflow",
    "transcript",
]


class Workflows(Registry):
    """Names of workflows; `WORKFLOWS["blind"] = Blind` registers one too."""

    __setitem__ = Registry.register

    def __iter__(self) -> Iterator[str]:
        return iter(self.names())


WORKFLOWS = Workflows(
    "workflow",
    {
        "chain": "mafrt.envs.math.workflows.chain:Chain",
        "mathchat": "mafrt.envs.math.workflows.mathchat:MathChat",
        "solver_verifier": "mafrt.envs.math.workflows.solver_verifier:SolverVerifier",
    },
)
"""By name. A class or function is called with team, horizon, judge_lines, and the options that were given."""
SHIPPED = WORKFLOWS.names()
METHODS = ("observations", "advance", "answers", "judged")
"""Every workflow has them, and `max_steps`."""


def register_workflow(name: str, factory: Callable[..., Workflow]) -> None:
    """Make `factory` available as `--workflow name`. Raises ConfigError for a name that is taken."""
    if not callable(factory):
        raise ConfigError(f"the factory of workflow {name!r} must be a class or function, found {factory!r}")
    WORKFLOWS.register(name, factory)


def make_workflow(name: str, team: Team, horizon: int, judge_lines: bool, **options: Any) -> Workflow:
    """The workflow called `name`, or that `package.module:Class` names, checked against the team.

    Options that are None are left to the workflow.

    Raises:
        ConfigError: no such workflow, a team or an option that it does not take, or a class that is no workflow.
    """
    factory = WORKFLOWS.resolve(str(name))
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
    takes = inspect.signature(factory).parameters
    for option in given:
        if option not in takes:
            raise ConfigError(f"workflow {name!r} has no setting {option}; leave it out, or take 'mathchat'")
    try:
        workflow = factory(team, horizon, judge_lines, **given)
    except MafrtError:
        raise
    except Exception as error:
        raise ConfigError(
            f"workflow {name!r} could not be built: {type(error).__name__}: {error}{user_line(error)}"
        ) from error
    missing = [method for method in METHODS if not callable(getattr(workflow, method, None))]
    if missing or not isinstance(getattr(workflow, "max_steps", None), int):
        raise ConfigError(
            f"{name!r} made a {type(workflow).__name__}, which is no workflow: it lacks "
            f"{', '.join(missing or ['max_steps'])}; see mafrt.envs.math.workflows.base.Workflow"
        )
    return workflow
