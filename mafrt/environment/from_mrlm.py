"""Environments of MRLM: `reset()` returns an `Observation`, `step(Message)` an `(Observation, Reward)`.

They are known by their shape, so a class of one's own with such objects will do. Where MRLM is not installed, a module
that imports it finds the few names of an environment here (`standing_in`).

The agent sees an observation's messages. Those that begin with the agent's own message go on from the ones
before; all others stand for the whole conversation, as in MRLM. The role `environment` is shown as the user's.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from types import ModuleType
from typing import Any

from mafrt.core.errors import EnvError
from mafrt.core.text import brief

PACKAGE = "mrlm"
_ROLES = {"environment": "user"}


class MessageRole(Enum):
    """Who says a message."""

    SYSTEM = "system"
    USER = "user"
    ASSISTANT = "assistant"
    ENVIRONMENT = "environment"


class EnvironmentMode(Enum):
    """Whether an environment is trained, as MRLM's policy is, or only played."""

    SERVER = "server"
    CLIENT = "client"


@dataclass
class Message:
    """A message; `role` may be given as a text."""

    role: Any
    content: str
    metadata: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.role = MessageRole(self.role)


@dataclass
class Observation:
    """The messages that an agent sees, and whether the episode is over."""

    messages: list[Message]
    state: dict[str, Any] | None = None
    done: bool = False
    info: dict[str, Any] = field(default_factory=dict)


@dataclass
class Reward:
    """Pay for a message; `components` are its parts."""

    value: float
    components: dict[str, float] = field(default_factory=dict)
    info: dict[str, Any] = field(default_factory=dict)


class SimulatedEnvironment:
    """Base class of environments that are played and not trained."""

    def __init__(self, mode: EnvironmentMode = EnvironmentMode.CLIENT) -> None:
        self.mode = mode

    def close(self) -> None:
        """Release resources."""


def standing_in(error: BaseException) -> bool:
    """Make the names above importable as MRLM's, if `error` came from an import of MRLM; whether it did."""
    cause = error.__cause__
    if not isinstance(cause, ModuleNotFoundError) or (cause.name or "").partition(".")[0] != PACKAGE:
        return False
    names = (MessageRole, EnvironmentMode, Message, Observation, Reward, SimulatedEnvironment)
    added = False
    for path in ("", ".core", ".core.types", ".core.base", ".core.simulated_environment"):
        if PACKAGE + path not in sys.modules:
            module = sys.modules[PACKAGE + path] = ModuleType(PACKAGE + path, __doc__)
            vars(module).update({kind.__name__: kind for kind in names}, BaseEnvironment=SimulatedEnvironment)
            module.__path__ = []  # a package, so that a part that is not here is an ordinary import error
            added = True
    return added


def is_observation(value: Any) -> bool:
    """Whether a value has the shape of MRLM's observations."""
    return isinstance(getattr(value, "messages", None), Sequence) and not isinstance(value, Mapping)


def chat_of(observation: Any, before: Sequence[dict[str, str]], own_message: str | None) -> list[dict[str, str]]:
    """The chat that an agent sees, after the chat `before` and its own message `own_message`.

    Raises:
        EnvError: a message has no role or no text.
    """
    new = [_as_chat(message) for message in observation.messages]
    goes_on = own_message is not None and new and new[0] == {"role": "assistant", "content": own_message}
    return [*before, *new] if goes_on else new


def message_of(text: str, observation: Any) -> Any:
    """An agent's answer as a message, of the same kind as those that it was shown."""
    shown = observation.messages[0] if observation.messages else None
    if isinstance(shown, Mapping):
        return {"role": "assistant", "content": text}
    kind: Any = Message if shown is None else type(shown)
    return kind(role="assistant", content=text)


def _as_chat(message: Any) -> dict[str, str]:
    known = (
        message
        if isinstance(message, Mapping)
        else {name: getattr(message, name, None) for name in ("role", "content")}
    )
    role, content = known.get("role"), known.get("content")
    role = getattr(role, "value", role)
    if not isinstance(role, str) or not isinstance(content, str):
        raise EnvError(f"a message must have a role and a text as content, found {brief(message)}")
    return {"role": _ROLES.get(role, role), "content": content}
