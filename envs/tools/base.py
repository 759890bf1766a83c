"""Tools with JSON schemas, and the toolbox of an episode: calls in a text are checked, made and answered.

A call that cannot be made (no such tool, arguments against the schema, a tool that fails, hangs or lies) is answered
with one sentence that begins with `Error:`, as a tool message to the agent. It ends neither the episode nor the run.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mafrt.config.schema import unknown
from mafrt.core.errors import ConfigError, EnvError, MissingExtraError
from mafrt.core.extras import install
from mafrt.core.text import brief, clean_text, error_line
from mafrt.environment.tool_calls import PYTHON, BadCall, ToolCall, find_calls, shorten, with_types
from mafrt.envs.workflows.state import EpisodeTool

ERROR = "Error: "
MOST_CALLS = 8
"""Calls of one turn that are made."""
SHOWN = 2000
"""Characters of an answer that the chat gets."""


class Failed(Exception):
    """A call that a tool could not make; the text is one sentence for the agent."""


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

    def schema(self) -> dict[str, Any]:
        """In the form that chat templates take as `tools`."""
        described = {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}
        return {"type": "function", "function": described}


@dataclass(frozen=True)
class Called:
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
        try:
            import jsonschema
        except ImportError as error:
            raise MissingExtraError(f"tools need a package: {install('tools')}") from error
        names = [tool.name for tool in self.tools]
        if twice := {name for name in names if names.count(name) > 1}:
            raise ConfigError(f"two tools are called {sorted(twice)[0]!r}; leave one of them out.")
        self._checks = {}
        for tool in self.tools:
            try:
                kind = jsonschema.validators.validator_for(tool.parameters, jsonschema.Draft202012Validator)
                kind.check_schema(tool.parameters)
            except jsonschema.SchemaError as error:
                raise ConfigError(f"the tool {tool.name!r} has a schema that is none: {error.message}") from error
            self._checks[tool.name] = kind(tool.parameters)
        self.files = dict(self.first_files)

    def fresh(self) -> Toolbox:
        return Toolbox(self.tools, self.first_files)

    def copy(self) -> Toolbox:
        twin = self.fresh()
        twin.files = self.files
        return twin

    @property
    def fences(self) -> bool:
        """Whether fenced Python is a call: only where there is a tool of that name."""
        return any(tool.name == PYTHON for tool in self.tools)

    def schemas(self) -> list[dict[str, Any]]:
        """Of all tools, for the chat template."""
        return [tool.schema() for tool in self.tools]

    def run(self, text: str, agent: str | None = None) -> list[Called]:
        """Make the calls of a text, in order."""
        calls = find_calls(text, self.fences)
        made = [Called(call, self.answer(call)) for call in calls[:MOST_CALLS]]
        if len(calls) > MOST_CALLS:
            why = f"at most {MOST_CALLS} calls are made in one turn; {len(calls) - MOST_CALLS} were left out."
            made.append(Called(BadCall(why), f"{ERROR}{why}"))
        return made

    def says(self, ran: list[Called]) -> str:
        return shorten("\n".join(called.answer for called in ran), SHOWN)

    def answer(self, call: ToolCall | BadCall) -> str:
        """The answer to a call. Raises EnvError if the sandbox failed, and nothing for what an agent wrote."""
        if isinstance(call, BadCall):
            return f"{ERROR}{call.why}"
        tool = next((tool for tool in self.tools if tool.name == call.name), None)
        if tool is None:
            return f"{ERROR}{unknown('tool', clean_text(call.name)[:80], [tool.name for tool in self.tools])}"
        arguments = with_types(call, tool.parameters)
        try:
            if (wrong := self._wrong(tool, arguments)) is not None:
                return f"{ERROR}{wrong}"
            return shorten(clean_text(tool.call(arguments, self)), SHOWN)
        except Failed as failure:
            return f"{ERROR}{shorten(clean_text(str(failure)), SHOWN)}"
        except EnvError:  # the sandbox, not the program: nothing is known about the call, and the episode is lost
            raise
        except Exception as error:  # a tool's own fault is an answer too: the agent can do without it
            return f"{ERROR}the tool {tool.name} failed ({type(error).__name__}: {error_line(error)})."

    def _wrong(self, tool: Tool, arguments: Mapping[str, Any]) -> str | None:
        """The first fault of the arguments, as a sentence; None if they fit."""
        import jsonschema

        error = jsonschema.exceptions.best_match(self._checks[tool.name].iter_errors(dict(arguments)))
        if error is None:
            return None
        where = ".".join(map(str, error.absolute_path))
        fault = clean_text(error.message) if len(error.message) < 200 else f"found {brief(error.instance)}"
        return f"the arguments of {tool.name} do not fit{f' at {where}' if where else ''}: {fault}."


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
