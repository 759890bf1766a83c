"""Tools with JSON schemas, and the toolbox of an episode: calls in a text are checked, made and answered.

A call that cannot be made (no such tool, arguments against the schema, a tool that fails, hangs or lies) is answered
with one sentence that begins with `Error:`, as a tool message to the agent. It ends neither the episode nor the run.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mafrt.config.schema import unknown
from mafrt.core.deadline import LateError, call_within
from mafrt.core.errors import ConfigError, EnvError
from mafrt.core.extras import check_package
from mafrt.core.text import clean_text, error_line
from mafrt.environment.tool_calls import PYTHON, BadCall, ToolCall, find_calls, shorten, with_types
from mafrt.envs.tools.checker import CHECKER
from mafrt.envs.tools.failed import Failed
from mafrt.envs.workflows.state import EpisodeTool

ERROR = "Error: "
MOST_CALLS = 8
"""Calls of one turn that are made."""
TOOL_S = 30.0
"""for a call of a tool that sets itself no deadline"""
SHOWN = 2000
"""Characters of an answer that the chat gets."""
MOST_TOLD = 16384
"""Characters of a tool's description, and of its schema as JSON: all agents read them in every prompt."""
TOLD = f"at most {MOST_TOLD} are taken, since every prompt holds them"
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")


Files = Mapping[str, bytes]
"""Path within the workspace -> content."""


@dataclass(frozen=True)
class Tool:
    """One function that agents may call."""

    name: str
    description: str
    parameters: Mapping[str, Any]
    """JSON schema of the arguments, an object"""
    call: Callable[[Mapping[str, Any], Toolbox], str]
    """(arguments, toolbox of the episode) -> answer. Raises Failed; every other exception is an answer too."""
    bounded: bool = False
    """whether it ends by itself in bounded time; any other gets `TOOL_S` seconds, in a thread"""

    def schema(self) -> dict[str, Any]:
        """In the form that chat templates take as `tools`."""
        described = {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}
        return {"type": "function", "function": described}


@dataclass(frozen=True)
class AnsweredCall:
    """A call with its answer."""

    call: ToolCall | BadCall
    answer: str


@dataclass
class Toolbox(EpisodeTool):
    """The tools of an episode, with its files."""

    tools: Sequence[Tool]
    first_files: Files = field(default_factory=dict)
    """files at the start of an episode"""
    files: Files = field(default_factory=dict)
    """Replaced, never written into: a fork of the episode shares them."""

    def __post_init__(self) -> None:
        check_package("a toolbox", "tools", "jsonschema")
        names = [tool.name for tool in self.tools]
        if twice := {name for name in names if names.count(name) > 1}:
            raise ConfigError(f"two tools are called {sorted(twice)[0]!r}; leave one of them out.")
        for tool in self.tools:
            if not _NAME.fullmatch(tool.name):
                raise ConfigError(
                    f"a tool is called {tool.name[:80]!r}; expected letters, digits, _, - and ., 128 at most"
                )
            if len(tool.description) > MOST_TOLD:
                raise ConfigError(
                    f"the description of the tool {tool.name!r} has {len(tool.description)} characters; {TOLD}"
                )
            if (fault := schema_fault(tool.parameters)) is not None:
                raise ConfigError(f"the tool {tool.name!r} has a schema that is none: {fault}")
        self.files = dict(self.first_files)

    def fresh(self) -> Toolbox:
        twin = copy.copy(self)  # the tools were checked once
        twin.files = dict(self.first_files)
        return twin

    def copy(self) -> Toolbox:
        twin = self.fresh()
        twin.files = self.files
        return twin

    def schemas(self) -> list[dict[str, Any]]:
        """Of all tools, for the chat template."""
        return [tool.schema() for tool in self.tools]

    def calls(self, text: str) -> list[ToolCall | BadCall]:
        """The calls of a text. Fenced Python is one only where there is a tool of that name."""
        schemas = {tool.name: tool.parameters for tool in self.tools}
        return find_calls(text, PYTHON in schemas, schemas)

    def run(self, text: str, agent: str | None = None) -> list[AnsweredCall]:
        """Make the calls of a text, in order."""
        calls = self.calls(text)
        made = [AnsweredCall(call, self.answer(call)) for call in calls[:MOST_CALLS]]
        if len(calls) > MOST_CALLS:
            why = f"at most {MOST_CALLS} calls are made in one turn; {len(calls) - MOST_CALLS} were left out."
            made.append(AnsweredCall(BadCall(why), f"{ERROR}{why}"))
        return made

    def says(self, ran: list[AnsweredCall]) -> str:
        return shorten("\n".join(called.answer for called in ran), SHOWN)

    def answer(self, call: ToolCall | BadCall) -> str:
        """The answer to a call. Raises EnvError if the sandbox failed, and nothing for what an agent wrote."""
        if isinstance(call, BadCall):
            return f"{ERROR}{call.why}"
        tool = next((tool for tool in self.tools if tool.name == call.name), None)
        if tool is None:
            return f"{ERROR}{unknown('tool', clean_text(call.name)[:80], [tool.name for tool in self.tools])}"
        try:
            arguments = with_types(call, tool.parameters)
            if (wrong := self._wrong(tool, arguments)) is not None:
                return f"{ERROR}{wrong}"
            return shorten(clean_text(self._call(tool, arguments)), SHOWN)
        except (Failed, LateError) as failure:
            return f"{ERROR}{shorten(clean_text(str(failure)), SHOWN)}"
        except EnvError:  # the sandbox, not the program: nothing is known about the call, and the episode is lost
            raise
        except Exception as error:  # a tool's own fault is an answer too: the agent can do without it
            return f"{ERROR}the tool {tool.name} failed ({type(error).__name__}: {error_line(error)})."

    def _call(self, tool: Tool, arguments: Mapping[str, Any]) -> str:
        if tool.bounded:
            return tool.call(arguments, self)
        # A twin, so that a call which hangs cannot change the files of a later turn.
        twin = self.copy()
        answer = call_within(TOOL_S, f"the tool {tool.name}", tool.call, arguments, twin)
        self.files = twin.files
        return answer

    def _wrong(self, tool: Tool, arguments: Mapping[str, Any]) -> str | None:
        """The first fault of the arguments, as a sentence; None if they fit. Raises Failed if that takes too long."""
        fault = CHECKER.wrong(tool.parameters, arguments)
        return None if fault is None else f"the arguments of {tool.name} do not fit{fault}."


_FAULTS: dict[str, str | None] = {}
"""of schemas as JSON, each looked at once"""


def schema_fault(schema: Mapping[str, Any]) -> str | None:
    """Why a schema cannot be used, as a clause; None if it can."""
    try:
        text = json.dumps(schema)
    except (ValueError, TypeError, RecursionError) as error:
        return f"it is no JSON ({type(error).__name__})"
    if len(text) > MOST_TOLD:
        return f"it has {len(text)} characters; {TOLD}"
    if text not in _FAULTS:
        _FAULTS[text] = CHECKER.schema_fault(schema)
    return _FAULTS[text]


def parameters(required: Mapping[str, Any], optional: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """A JSON schema of arguments, from name -> (type, description) as JSON types."""
    both = {**required, **(optional or {})}
    properties = {name: {"type": kind, "description": text} for name, (kind, text) in both.items()}
    return {
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
    }


def listed(schemas: Sequence[Mapping[str, Any]]) -> str:
    """Schemas as one JSON text, as they travel in an observation."""
    return json.dumps(list(schemas), ensure_ascii=False)
