"""`OpenEnv`: environments on servers of OpenEnv (`openenv` on PyPI), `--env openenv:URL`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from mafrt.config.schema import check_choice, check_number
from mafrt.core.errors import ConfigError, EnvError
from mafrt.core.text import clean_deep, error_line, has_controls
from mafrt.core.types import Message, Observation, StepResult
from mafrt.environment.call_values import Unreadable, read_value
from mafrt.environment.replayed import ReplayedEnv
from mafrt.environment.tool_calls import BadCall, find_call, tool_message
from mafrt.envs.construction import SPLITS
from mafrt.envs.openenv.servers import ActionError, Servers, Session, token_of

FIRST = {"test": 0, "validation": 10**6, "train": 2 * 10**6}
"""Seed of a split's first episode."""
_HIDDEN = ("done", "reward", "metadata")
DEEPEST = 20
"""Levels of nesting of an action."""
LARGEST_TOOLS = 1 << 18
"""Characters of the schemas of all tools, and of the form of an action, since every prompt holds them."""

_TOOLS = {"type": "list_tools"}


class OpenEnv(ReplayedEnv[Session]):
    """An environment on servers of OpenEnv.

    Its actions are read from the server's own schema. With one field of text (`message`, `code`, ...) an agent's words
    are the action; with one field of another type, or several, it answers with a JSON object of these fields; tools of
    an MCP environment are called as in every other environment. A wrong form is answered with what is expected, and
    takes a turn. An agent sees the chat of its own turns. The reward of a step goes to the agent that acted. An episode
    is a function of seed and actions: one whose server is lost is played again on another, and compared.
    """

    _end = staticmethod(Session.close)
    held_out = MappingProxyType({"split": "test"})
    validation = MappingProxyType({"split": "validation"})

    def __init__(
        self,
        name: str,
        agents: tuple[str, ...] | str = ("agent",),
        turn_field: str | None = None,
        show: tuple[str, ...] | str = (),
        reset: Mapping[str, Any] | None = None,
        size: int = 1000,
        held_out_size: int = 200,
        split: str = "train",
        max_turns: int = 32,
        timeout_s: float = 60.0,
        token_env: str | None = None,
    ) -> None:
        """Ask the servers what they serve.

        Args:
            name: `http://HOST:PORT`, or several addresses with `+` between them, of the same environment.
            agents: names of the agents; several need `turn_field`.
            turn_field: field of an observation with the number, from 0, of the agent that acts next.
            show: fields of an observation that are shown, in this order; default: all but reward, done and metadata.
            reset: further arguments of the environment's `reset`.
            size: episodes of the training split, each with a seed of its own.
            held_out_size: episodes of `validation`, and of `test`.
            split: `train`, `validation` or `test`: seeds that share nothing.
            max_turns: turns after which an episode is cut.
            timeout_s: deadline of a reset or a step, in seconds.
            token_env: environment variable that holds a bearer token for the servers.

        Raises:
            ConfigError: a setting that is none.
            EnvError: no server of OpenEnv, several environments, or actions that no prompt can describe.
        """
        check_choice("split", split, SPLITS)
        for what, value in (("size", size), ("held_out_size", held_out_size), ("max_turns", max_turns)):
            check_number(what, value, least=1, most=10**6, whole=True)
        check_number("timeout_s", timeout_s, above=0, most=3600)
        self.agents = (agents,) if isinstance(agents, str) else tuple(agents)
        self.turn_field, self.show = turn_field, (show,) if isinstance(show, str) else tuple(show)
        if (len(self.agents) > 1) != (turn_field is not None):
            raise ConfigError("several agents need turn_field, the field of an observation that says who acts next")
        self.arguments, self.split, self.max_steps = dict(reset or {}), split, max_turns
        self.num_tasks = size if split == "train" else held_out_size
        self._servers = Servers([part.strip() for part in name.split("+")], token_of(token_env), float(timeout_s))
        schemas = self._servers.describe()
        self._fields, self._required = _fields_of(schemas["action"])
        self.calls_tools = set(self._fields) >= {"tool_name", "arguments"} or not self._fields
        if len(self._form()) > LARGEST_TOOLS or any(has_controls(field) for field in self._fields):
            raise EnvError(f"{name}: the {len(self._fields)} fields of an action are more than a prompt can hold")
        self._begin()

    def _begin(self) -> None:
        super()._begin()
        self._start: dict[str, Any] | None = None
        self._first: Any = None
        self._steps: list[tuple[dict[str, Any], Any]] = []
        self._tools: list[Any] = []
        self._chats: dict[str, list[Message]] = {}
        self._refused = 0

    def reset(
        self, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Observation], dict[str, Any]]:
        assert self.num_tasks is not None
        chosen = (options or {}).get("task")
        task_seed = FIRST[self.split or "train"] + (self.rng.randrange(self.num_tasks) if chosen is None else chosen)
        self._start, self._first, self._steps = {**self.arguments, "seed": task_seed}, None, []
        self._chats, self._refused = {}, 0
        try:
            reply = self._ask("reset", self._start)
            self._first = reply
            if self.calls_tools and not self._tools:
                self._tools, listed = self._persist(self._list_tools)
                self._steps.append((_TOOLS, listed))
        except ActionError as error:
            raise EnvError(f"the environment does not begin with {self._start}: {error}") from None
        if reply.get("done"):
            raise EnvError("the environment was over before its first turn")
        return self._shown(reply), {"task": str(task_seed)}  # the seed: the environment names its tasks by nothing else

    def step(self, actions: dict[str, str]) -> StepResult:
        ((agent, text),) = actions.items()
        self._chats[agent].append({"role": "assistant", "content": text})
        action = self._action(text)
        if isinstance(action, str):
            return self._refuse(agent, action)
        try:
            reply = self._ask("step", action)
        except ActionError as error:
            return self._refuse(agent, f"The environment does not take this: {error}. {self._form()}")
        self._steps.append((action, reply))
        rewards = {} if reply.get("reward") is None else {agent: float(reply["reward"])}
        info = {"measures": {"refused": float(self._refused)}}
        if reply.get("done"):
            return StepResult({}, rewards, True, False, info)
        return StepResult(self._shown(reply), rewards, False, False, info)

    def _refuse(self, agent: str, why: str) -> StepResult:
        """The agent's own mistake costs it a turn; the environment knows nothing of it."""
        self._refused += 1
        seen = self._heard(agent, {"role": "user", "content": why})
        return StepResult({agent: seen}, {}, False, False, {"measures": {"refused": float(self._refused)}})

    # ------------------------------------------------------------------------------------------------ words and fields

    def _action(self, text: str) -> dict[str, Any] | str:
        """The action of an agent's words, or what to answer where it has none.

        What no server need be able to read is the agent's mistake: a connection that is lost over it would be played
        again, and cost the agent nothing in the end.
        """
        action = self._read_action(text)
        if isinstance(action, str):
            return action
        try:
            cleaned: dict[str, Any] = clean_deep(action, DEEPEST)
            json.dumps(cleaned, allow_nan=False)
        except (ValueError, RecursionError) as error:
            return f"No action was found ({error_line(error)}). {self._form()}"
        return cleaned

    def _read_action(self, text: str) -> dict[str, Any] | str:
        if self.calls_tools:
            schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in self._tools}
            call = find_call(text, schemas)
            if call is None:
                return f"Nothing was called. {self._form()}"
            if isinstance(call, BadCall):
                return call.why
            return {"type": "call_tool", "tool_name": call.name, "arguments": dict(call.arguments)}
        if len(self._required) == 1 and self._fields[self._required[0]] == "string":
            return {self._required[0]: text}
        place = text.find("{")
        if place < 0 and len(self._required) == 1:  # a number alone, where a number is wanted
            try:
                return {self._required[0]: json.loads(text.strip())}
            except (ValueError, RecursionError):
                return f"No action was found. {self._form()}"
        try:
            value, _ = read_value(text, max(place, 0))
        except Unreadable as error:
            return f"No action was found ({error}). {self._form()}"
        return value if isinstance(value, dict) else f"No action was found. {self._form()}"

    def _form(self) -> str:
        if self.calls_tools:
            return "Call one of the tools."
        fields = ", ".join(f'"{name}": {kind}' for name, kind in self._fields.items())
        return f"Answer with {{{fields}}}."

    def _heard(self, agent: str, message: Message) -> Observation:
        """The agent's chat with one more message."""
        chat = self._chats.setdefault(agent, [])
        chat.append(message)
        # The first message of role `tools` holds the schemas of what may be called.
        tools: list[Message] = [{"role": "tools", "content": json.dumps(self._tools)}] if self.calls_tools else []
        return [*tools, *chat]

    def _shown(self, reply: dict[str, Any]) -> dict[str, Observation]:
        fields = reply["observation"]
        names = self.show or [name for name in fields if name not in _HIDDEN and name != self.turn_field]
        missing = [name for name in names if name not in fields]
        if missing and self.show:
            raise EnvError(f"an observation has no field {missing[0]!r} to show; it has {', '.join(fields) or 'none'}")
        shown = {name: fields[name] for name in names if fields[name] not in (None, "", [], {})}
        agent = self._next(fields)
        if self.calls_tools and "tool_name" in shown and self._chats.get(agent):
            return {agent: self._heard(agent, tool_message(_text(_result(shown))))}
        if len(shown) == 1:
            text = _text(next(iter(shown.values())))
        else:
            text = "\n".join(f"{name}: {_text(value)}" for name, value in shown.items())
        takes_text = len(self._required) == 1 and self._fields.get(self._required[0]) == "string"
        if not takes_text and agent not in self._chats:
            text = f"{text}\n\n{self._form()}".strip()
        return {agent: self._heard(agent, {"role": "user", "content": text or "Begin."})}

    def _next(self, fields: Mapping[str, Any]) -> str:
        """The agent that acts next."""
        if self.turn_field is None:
            return self.agents[0]
        number = fields.get(self.turn_field)
        if type(number) is not int or not 0 <= number < len(self.agents):
            raise EnvError(
                f"the field {self.turn_field!r} of an observation is {number!r}; expected the number of one of "
                f"{len(self.agents)} agents, from 0"
            )
        return self.agents[number]

    # ------------------------------------------------------------------------------------------------------- servers

    def _ask(self, kind: str, data: dict[str, Any]) -> dict[str, Any]:
        return self._persist(lambda: self._sessions[0].ask(kind, data))

    def _list_tools(self) -> tuple[list[Any], dict[str, Any]]:
        """The tools in the form in which agents are shown them, and the reply that listed them."""
        session = self._sessions[0]
        reply = session.ask("step", _TOOLS)
        tools = _schemas_of(reply["observation"].get("tools"))
        if any(has_controls(tool["function"]["name"]) for tool in tools):
            raise session.broken("a name of a tool that is not of one line")
        if len(json.dumps(tools)) > LARGEST_TOOLS:
            raise session.broken(f"schemas of tools of more than {LARGEST_TOOLS} characters")
        return tools, reply

    def _open(self) -> Session:
        return self._servers.open()

    def _play_again(self) -> bool:
        if self._first is None:
            return True
        session = self._sessions[0]
        same = _told(session.ask("reset", self._start or {})) == _told(self._first)
        for action, shown in self._steps:
            same = same and _told(session.ask("step", action)) == _told(shown)
        return bool(same)


def _told(reply: dict[str, Any]) -> Any:
    """What an agent or the credit sees of a reply."""
    seen = {name: value for name, value in reply["observation"].items() if name != "metadata"}
    return seen, reply.get("reward"), bool(reply.get("done"))


def _fields_of(schema: Mapping[str, Any]) -> tuple[dict[str, str], list[str]]:
    """Fields of an action with their JSON types, and those that must be given."""
    given = schema.get("properties")
    properties = given if isinstance(given, dict) else {}
    fields: dict[str, str] = {}
    for name, about in properties.items():
        kind = about.get("type") if isinstance(about, dict) else None
        if name != "metadata":
            fields[str(name)] = kind if isinstance(kind, str) else "value"
    needed = schema.get("required")
    required = [name for name in fields if isinstance(needed, list) and name in needed]
    return fields, required or (list(fields) if len(fields) == 1 else [])


def _schemas_of(tools: Any) -> list[Any]:
    """The tools of an MCP environment in the form in which agents are shown tools."""
    listed = [tool for tool in tools if isinstance(tool, dict)] if isinstance(tools, list) else []
    if not listed or not all(isinstance(tool.get("name"), str) for tool in listed):
        raise EnvError("the environment takes calls of tools and lists none")
    return [
        {
            "type": "function",
            "function": {
                "name": tool["name"],
                "description": str(tool.get("description") or ""),
                "parameters": tool.get("input_schema") or {"type": "object", "properties": {}},
            },
        }
        for tool in listed
    ]


def _result(shown: Mapping[str, Any]) -> Any:
    """Of a call: its error, else its result, without the layers that MCP puts around a value."""
    error, result = shown.get("error"), shown.get("result")
    if error:
        return error.get("message", error) if isinstance(error, dict) else error
    if isinstance(result, dict) and "data" in result:
        return result["data"]
    return result


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
