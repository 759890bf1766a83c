"""Agents by name, for the key `agent` of team files: functions that make one, registered or as `module:function`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from mafrt.config.agent import AgentSpec
from mafrt.config.resolve import Registry, user_line
from mafrt.core.errors import ConfigError, MafrtError
from mafrt.core.text import error_line

AGENTS = Registry("agent")

F = TypeVar("F", bound=Callable[..., Any])


def register_agent(name: str) -> Callable[[F], F]:
    """Decorator: make a function available as `agent: NAME` in team files.

    The function takes no arguments and returns an `AgentSpec`, or a dictionary with the keys of a team file.

    Raises:
        ConfigError: the name is taken or is no text, or the object cannot be called.

    >>> @mafrt.register_agent("careful")
    ... def careful():
    ...     return {"prompt": "You check every step.", "temperature": 0.5}
    >>> mafrt.Team.parse([{"role": "checker", "agent": "careful"}]).agent("checker").temperature
    0.5
    """

    def register(make: F) -> F:
        if not callable(make):
            raise ConfigError(f"agent {name!r} must be a function that returns an AgentSpec, found {make!r}")
        AGENTS.register(name, make)
        return make

    return register


def registered_agent(name_or_path: object) -> AgentSpec | dict[str, Any]:
    """The agent that a name or a `package.module:function` makes.

    Raises:
        ConfigError: there is none, it raised, or it returned something else.
    """
    if not isinstance(name_or_path, str):
        raise ConfigError(f"agent must be a registered name or package.module:function, found {name_or_path!r}")
    make = AGENTS.resolve(name_or_path)
    try:
        made = make()
    except MafrtError:
        raise
    except Exception as error:
        raise ConfigError(
            f"agent {name_or_path} could not be made: {type(error).__name__}: {error_line(error)}{user_line(error)}"
        ) from error
    if isinstance(made, AgentSpec):
        return made
    if isinstance(made, Mapping):
        return dict(made)
    raise ConfigError(
        f"agent {name_or_path} returned a {type(made).__name__}; expected an AgentSpec, or a dictionary with the keys "
        "of a team file"
    )
