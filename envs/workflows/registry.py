"""Workflows by name or path: small classes of pure functions for the order of turns and the observations."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

from mafrt.config.resolve import Registry, user_line
from mafrt.config.schema import check_number
from mafrt.config.team import Team
from mafrt.core.errors import ConfigError, MafrtError
from mafrt.envs.workflows.chain import Chain
from mafrt.envs.workflows.mathchat import MathChat
from mafrt.envs.workflows.solver_verifier import SolverVerifier
from mafrt.envs.workflows.state import INCORRECT, JUDGE, SPEAKS_AS, TaskState, Workflow, transcript

__all__ = [
    "INCORRECT",
    "JUDGE",
    "WORKFLOWS",
    "Chain",
    "MathChat",
    "SolverVerifier",
    "TaskState",
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

    def all(self) -> Iterator[tuple[str, Any]]:
        """Name and class of all that are registered."""
        return ((name, self.resolve(name)) for name in self.names())


WORKFLOWS = Workflows(
    "workflow",
    {
        "single": "mafrt.envs.workflows.chain:Single",
        "multi_turn": "mafrt.envs.workflows.chain:MultiTurn",
        "chain": "mafrt.envs.workflows.chain:Chain",
        "mathchat": "mafrt.envs.workflows.mathchat:MathChat",
        "solver_verifier": "mafrt.envs.workflows.solver_verifier:SolverVerifier",
        "vote": "mafrt.envs.workflows.simultaneous:Vote",
        "debate": "mafrt.envs.workflows.simultaneous:Debate",
        "pro_con": "mafrt.envs.workflows.pro_con:ProCon",
        "summary": "mafrt.envs.workflows.simultaneous:Summary",
        "mixture": "mafrt.envs.workflows.simultaneous:Mixture",
        "search": "mafrt.envs.search.workflow:SearchWorkflow",
        "tools": "mafrt.envs.tools.workflow:ToolWorkflow",
        "router": "mafrt.envs.workflows.router:Router",
    },
)
"""By name. A class or function is called with team, horizon, judge_lines, and the options that were given."""
RUBRICS = ("chain", "mathchat", "solver_verifier")
"""Workflows with criteria of their own for a coach; the others are judged by the general ones."""


def register_workflow(name: str, factory: Callable[..., Workflow]) -> None:
    """Make `factory` available as `--workflow name`. Raises ConfigError for a name that is taken."""
    if not callable(factory):
        raise ConfigError(f"the factory of workflow {name!r} must be a class or function, found {factory!r}")
    WORKFLOWS.register(name, factory)


def team_file(name: str) -> str | None:
    """The team file that a workflow brings, by its name or `package.module:Class`; None if it brings none."""
    return getattr(WORKFLOWS.resolve(name), "profile", None)


def make_workflow(name: str, team: Team, horizon: int, judge_lines: bool, **options: Any) -> Workflow:
    """The workflow called `name`, or that `package.module:Class` names, checked against the team.

    Options that are None are left to the workflow.

    Raises:
        ConfigError: no such workflow, a team or an option that it does not take, or a class that is no workflow.
    """
    factory = WORKFLOWS.resolve(str(name))
    if isinstance(factory, type) and not issubclass(factory, Workflow):
        raise ConfigError(
            f"{name!r} is a {factory.__name__}, which is no workflow; inherit from "
            "mafrt.envs.workflows.registry.Workflow, and set max_steps"
        )
    check_number("horizon", horizon, least=1, whole=True)
    for reserved in SPEAKS_AS:
        if reserved in team.names:
            raise ConfigError(
                f"no agent may be called {reserved!r}: the environment speaks under that name; give it another one, "
                "such as reviewer"
            )
    if not any(a.with_answer for a in team.agents):
        raise ConfigError(
            f"no agent of the team ({', '.join(team.names)}) has with_answer: true; "
            "set it for the one whose \\boxed{} answer counts"
        )
    given = {option: value for option, value in options.items() if value is not None}
    # Read from the signature, so that a workflow of one's own declares its settings by taking them.
    takes = inspect.signature(factory).parameters
    for option in given:
        if option not in takes:
            users = [other for other, kind in WORKFLOWS.all() if option in inspect.signature(kind).parameters]
            raise ConfigError(
                f"workflow {name!r} has no setting {option}; leave it out, or take one that has: {', '.join(users)}"
            )
    if "sees" not in takes and (agents := [agent.name for agent in team.agents if agent.sees is not None]):
        raise ConfigError(f"agent {agents[0]!r} has a view of its own (sees), which workflow {name!r} does not use")
    if "tools" not in takes and (agents := [agent.name for agent in team.agents if agent.tools is not None]):
        raise ConfigError(
            f"agent {agents[0]!r} has tools of its own, which workflow {name!r} does not use; take the workflow 'tools'"
        )
    try:
        workflow = factory(team, horizon, judge_lines, **given)
    except MafrtError:
        raise
    # The workflow may be the user's own, whose error is shown with its line.
    except Exception as error:
        raise ConfigError(
            f"workflow {name!r} could not be built: {type(error).__name__}: {error}{user_line(error)}"
        ) from error
    if not isinstance(workflow, Workflow) or not isinstance(getattr(workflow, "max_steps", None), int):
        raise ConfigError(
            f"{name!r} made a {type(workflow).__name__}, which is no workflow; inherit from "
            "mafrt.envs.workflows.registry.Workflow, and set max_steps"
        )
    return workflow
