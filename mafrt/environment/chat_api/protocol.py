"""The form of a call that all APIs share, and the translation that each API makes.

An API (`completions.py`, `responses.py`) is one file: it reads its own requests into a `ChatCall`, and writes a
`ChatReply` in its own shape, whole or as events. Calls of tools travel as text in the form that Qwen and Hermes models
are trained on: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import NoneType
from typing import Any, NamedTuple, Protocol, TypeAlias, TypeVar

from mafrt.core.errors import MafrtError
from mafrt.core.text import brief, clean_deep, clean_text, has_controls, shortened
from mafrt.core.transcript import quoted
from mafrt.core.types import Message
from mafrt.environment.thought_forms import THINK, THOUGHT
from mafrt.environment.tool_calls import ToolCall, split_calls, with_types

T = TypeVar("T")

MOST_STOPS = 16
MOST_ANSWERS = 32
"""that one call may ask for"""
LONGEST_NAME = 256
"""characters of a tool's name"""


class ApiError(MafrtError):
    """An answer with an error status, in the API's own shape."""

    def __init__(self, status: int, message: str, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.code = status, code

    def body(self) -> dict[str, Any]:
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": str(self), "type": kind, "param": None, "code": self.code}}


class Token(NamedTuple):
    """A sampled token: its text, and its log-probability where it was sampled."""

    text: str
    logprob: float


@dataclass(frozen=True)
class ChatCall:
    """One request for an answer, whatever API it came through."""

    model: str
    messages: list[Message]
    stream: bool = False
    tool_names: tuple[str, ...] = ()
    """of the tools that the request offers"""
    schemas: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """name of a tool -> JSON schema of its arguments"""
    one_call: bool = False
    """whether at most one tool may be called in an answer"""
    strict: tuple[str, ...] = ()
    """of these tools, those whose calls must fit their schemas"""
    schema: str = ""
    """JSON schema, as JSON, that the answer must fit, be it a call or not; empty for plain text"""
    forced: str = ""
    """JSON schema, as JSON, of the call of a strict tool that the answer must be; empty where none must be called"""
    logprobs: bool = False
    """whether the answer shows its tokens with their log-probabilities"""
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    stop: tuple[str, ...] = ()
    seed: int | None = None
    answers: int = 1
    """how many are asked for"""
    number: int = 0
    """which of them this is, where each has become a call of its own"""
    request: Mapping[str, Any] = field(default_factory=dict)
    """the request as it came, for fields that an API repeats in its answer"""
    session: str = ""
    """`X-Session-ID` of the request, by which a program tells its conversations apart; empty without one"""


@dataclass(frozen=True)
class ChatReply:
    """The answer to a call."""

    text: str
    cut: bool = False
    """whether it ended at the token limit"""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    tokens: tuple[Token, ...] = ()
    """of the answer without its end token; empty unless the call asks for them"""
    stopped: str = ""
    """the stop text that ended it; empty if none did"""
    misfit: bool = False
    """whether the arguments of one of its calls do not fit a `strict` schema, so that all of it is words"""
    others: tuple[ChatReply, ...] = ()
    """further answers to the same call"""


class Events(Protocol):
    """A reply as server-sent events: pieces of the text as they are said, and the rest with the whole reply."""

    def begin(self) -> str:
        """The events before any text."""

    def piece(self, text: str) -> str:
        """The event of a piece of the text."""

    def end(self, reply: ChatReply) -> Iterator[str]:
        """The events that remain once the reply is whole."""

    def failed(self, error: ApiError) -> str:
        """The event of an error after the first piece."""


class EarlierAnswers(Protocol):
    """Earlier answers of one episode, for APIs whose requests may name them instead of repeating them."""

    def get(self, name: str) -> list[Any]:
        """The items of an answer. Raises ApiError (400)."""

    def keep(self, name: str, items: list[Any]) -> None: ...


class Api(Protocol):
    """One API: how its requests are read and its answers written."""

    path: str
    header: str
    """of every request of its clients; empty: none"""

    def error(self, error: ApiError) -> dict[str, Any]:
        """The body of an error."""

    def parse(self, body: Any, past: EarlierAnswers) -> ChatCall:
        """Raises ApiError (400) that names the field."""

    def whole(self, call: ChatCall, reply: ChatReply, created: int, past: EarlierAnswers) -> dict[str, Any]:
        """The body of a whole reply."""

    def events(self, call: ChatCall, created: int, past: EarlierAnswers) -> Events: ...


# ---------------------------------------------------------------------------------------------------- reading requests


ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
"""Role there -> role here."""


class Fields:
    """Reads the fields of a request. Each field of the API is read, known to change nothing, or refused."""

    def __init__(self, body: Any) -> None:
        if not isinstance(body, dict):
            raise ApiError(400, f"expected a JSON object, found {brief(body)}")
        self.body: dict[str, Any] = body

    def model(self) -> str:
        model = self.body.get("model")
        if not isinstance(model, str) or not model:
            raise ApiError(400, f"'model' must be the name of an agent, found {brief(model)}")
        return model

    def number(self, name: str, kind: type, low: float | None, high: float | None = None) -> Any:
        value = self.body.get(name)
        if value is None:
            return None
        try:
            known = not isinstance(value, bool) and isinstance(value, (int, float)) and math.isfinite(value)
        except OverflowError:  # an integer beyond the floats
            known = False
        if not known:
            raise ApiError(400, f"{name!r} must be a number, found {brief(value)}")
        if (kind is int and value != int(value)) or (low is not None and value < low):
            least = "" if low is None else f" of {low} or more"
            raise ApiError(400, f"{name!r} must be {'a whole number' if kind is int else 'a number'}{least}")
        if high is not None and value > high:
            raise ApiError(400, f"{name!r} must be at most {high:g}, found {brief(value)}")
        return kind(value)

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.body.get(name)
        if value is not None and not isinstance(value, bool):
            raise ApiError(400, f"{name!r} must be true or false, found {brief(value)}")
        return default if value is None else value

    def stops(self, name: str = "stop") -> tuple[str, ...]:
        stop = self.body.get(name) or []
        stops = (stop,) if isinstance(stop, str) else tuple(stop) if isinstance(stop, list) else None
        if stops is None or len(stops) > MOST_STOPS or not all(isinstance(text, str) and text for text in stops):
            raise ApiError(400, f"{name!r} must be a text or up to {MOST_STOPS} texts, found {brief(stop)}")
        return stops

    def refuse(self, wrong: Mapping[str, tuple[Callable[[Any], bool], str]], known: Collection[str]) -> None:
        """Refuse fields and values that are not supported.

        Args:
            wrong: field -> (whether a value is taken, sentence for those that are not).
            known: fields that are read elsewhere or change no sample.
        """
        for name, value in self.body.items():
            if value is None or name in known:
                continue
            if name not in wrong:
                raise ApiError(
                    400, f"{name!r} is no field that is known here, so it would have no effect; leave it out"
                )
            taken, sentence = wrong[name]
            if not taken(value):
                found = f", found {brief(value)}" if sentence.startswith("must") else ""
                raise ApiError(400, f"{name!r} {sentence}{found}")


Hint: TypeAlias = "tuple[Callable[[Any], bool], str]"
"""of a field that changes no sample: whether a value can be one, and the sentence for those that cannot"""
TEXT: Hint = (lambda value: isinstance(value, str), "must be a text")
FLAG: Hint = (lambda value: isinstance(value, bool), "must be true or false")
OBJECT: Hint = (lambda value: isinstance(value, dict), "must be an object")
TEXTS: Hint = (
    lambda value: isinstance(value, dict) and all(isinstance(text, (str, NoneType)) for text in value.values()),
    "must be an object of texts",
)
COUNT: Hint = (
    lambda value: isinstance(value, int) and not isinstance(value, bool) and value > 0,
    "must be a whole number of 1 or more",
)
RETENTION: Hint = (lambda value: value in ("in_memory", "in-memory", "24h"), "must be in_memory or 24h")
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")


def one_of(*names: str) -> Hint:
    """A hint that is one of these texts."""
    return (lambda value: isinstance(value, str) and value in names), f"must be one of {', '.join(names)}"


def refuse_unknown(given: Mapping[str, Any], known: Collection[str], where: str) -> None:
    """Refuse fields of a part of a request that nothing reads, unless they are empty. Raises ApiError (400)."""
    for name, value in given.items():
        if value and name not in known:
            raise ApiError(
                400,
                f"{where}: {shortened(name)!r} is no field that is known here, so it would have no effect; "
                "leave it out",
            )


def read_part(
    body: Mapping[str, Any], name: str, known: Collection[str], hints: Mapping[str, Hint] | None = None
) -> Mapping[str, Any]:
    """The object in a field, empty if there is none. Raises ApiError (400) for anything else, or unknown fields.

    `hints`: further fields that change no sample.
    """
    given = body.get(name)
    if given is None:
        return {}
    if not isinstance(given, dict):
        raise ApiError(400, f"{name!r} must be an object, found {brief(given)}")
    hints = hints or {}
    refuse_unknown(given, (*known, *hints), repr(name))
    for inner, (taken, sentence) in hints.items():
        if given.get(inner) is not None and not taken(given[inner]):
            raise ApiError(400, f"'{name}.{inner}' {sentence}, found {brief(given[inner])}")
    return given


def in_order(calls: Sequence[str], results: Sequence[tuple[str, T]], where: str) -> list[T]:
    """Results of tools in the order of their calls, which a prompt tells apart by that alone.

    Args:
        calls: ids of the calls before the results; none where a program has dropped them from its history.
        results: id, empty without one, and result.
        where: they stand, for the error.

    Raises:
        ApiError (400): a result of none of the calls.
    """
    if not calls or not all(calls) or not all(name for name, _ in results):
        return [result for _, result in results]
    for name, _ in results:
        if name not in calls:
            raise ApiError(400, f"{where}: {shortened(name)!r} is the id of no call before it; send the call too")
    return [result for _, result in sorted(results, key=lambda each: calls.index(each[0]))]


@dataclass(frozen=True)
class Tools:
    """The tools that a request offers, and how they are to be used."""

    functions: tuple[Mapping[str, Any], ...] = ()
    """each with `name`, and `description` and `parameters` where they are given"""
    must: str = ""
    """the name of the function that must be called, `*` for any, empty for none"""
    one: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(tool["name"] for tool in self.functions)

    @property
    def schemas(self) -> dict[str, Mapping[str, Any]]:
        return {tool["name"]: tool["parameters"] for tool in self.functions if isinstance(tool.get("parameters"), dict)}

    def told(self) -> str:
        """Their part of the system message."""
        listed = "\n".join(json.dumps(dict(tool), ensure_ascii=False) for tool in self.functions)
        text = (
            f"You may call these functions:\n<tools>\n{listed}\n</tools>\nFor each call write:\n<tool_call>\n"
            '{"name": "NAME", "arguments": {...}}\n</tool_call>'
        )
        if self.must:
            text += f"\nYou must call {'a function' if self.must == '*' else f'the function {self.must}'} now."
        return f"{text}\nCall at most one function." if self.one else text


def read_tools(functions: list[Mapping[str, Any]], choice: Any, *, one: bool) -> Tools:
    """The offered functions under a `tool_choice`. Raises ApiError (400)."""
    names = [function["name"] for function in functions]
    if choice == "none":
        return Tools()
    if choice is None or choice == "auto":
        return Tools(tuple(functions), one=one) if functions else Tools()
    if isinstance(choice, dict):
        refuse_unknown(choice, ("type", "name", "function", "allowed_tools", "mode", "tools"), "'tool_choice'")
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        inner = choice["allowed_tools"] if isinstance(choice.get("allowed_tools"), dict) else choice
        mode, listed = inner.get("mode", "auto"), inner.get("tools")
        allowed = [named(entry) for entry in listed] if isinstance(listed, list) else None
        if mode not in ("auto", "required") or not allowed or not all(name in names for name in allowed):
            raise ApiError(400, f"'tool_choice' must name tools that are offered ({', '.join(names)})")
        allowed_functions = tuple(function for function in functions if function["name"] in allowed)
        return Tools(allowed_functions, must="*" if mode == "required" else "", one=one)
    if choice == "required":
        if not functions:
            raise ApiError(400, "'tool_choice' is required, but 'tools' offers none")
        return Tools(tuple(functions), must="*", one=one)
    name = named(choice)
    if name is None or name not in names:
        raise ApiError(
            400,
            f"'tool_choice' must be none, auto, required, or one of the tools ({', '.join(names) or 'none'}), "
            f"found {brief(choice)}",
        )
    return Tools(tuple(function for function in functions if function["name"] == name), must=name, one=one)


def bounds(tools: Tools, given: Any, form: Any, where: str) -> dict[str, Any]:
    """The fields of a `ChatCall` that come of its tools and of the form of its answer. Raises ApiError (400).

    Args:
        tools: as they may be called.
        given: the request's `tools`, of which some may be `strict`.
        form: the response format, which stands in the field `where`.
    """
    marked = {part.get("name") for tool in given or () for part in (tool, tool.get("function"))
              if isinstance(part, dict) and part.get("strict") is True}  # fmt: skip
    strict = tuple(name for name in tools.names if name in marked)
    schema, forced = read_form(form, where), ""
    if schema and tools.functions:
        schema = _one_of_calls(tools, strict, () if tools.must else (json.loads(schema),))
    elif tools.must and len(strict) == len(tools.names):
        forced = _one_of_calls(tools, strict)
    return {
        "tool_names": tools.names,
        "schemas": tools.schemas,
        "one_call": tools.one,
        "strict": strict,
        "schema": schema,
        "forced": forced,
    }


def _one_of_calls(tools: Tools, strict: Collection[str], others: Sequence[Any] = ()) -> str:
    """The JSON schema, as JSON, of a call of one of the tools, or of what one of the other schemas takes."""
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": name}, "arguments": {"$ref": f"#/$defs/{number}"}},
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for number, name in enumerate(tools.names)
    ]
    of_tools = [tools.schemas.get(name, {}) if name in strict else {} for name in tools.names]
    schemas = [*({**schema, "type": "object"} for schema in of_tools), *others]
    answers = [{"$ref": f"#/$defs/{number}"} for number in range(len(of_tools), len(schemas))]
    defs = {str(number): _moved(schema, f"#/$defs/{number}") for number, schema in enumerate(schemas)}
    return json.dumps({"anyOf": [*calls, *answers], "$defs": defs})


def _moved(part: Any, to: str) -> Any:
    """A schema whose references are still to itself where it stands at `to` in another."""
    if isinstance(part, list):
        return [_moved(entry, to) for entry in part]
    if not isinstance(part, dict):
        return part
    reference = part.get("$ref")
    moved = {
        key: value if key in ("const", "enum", "default", "examples") else _moved(value, to)
        for key, value in part.items()
    }
    return {**moved, "$ref": to + reference[1:]} if isinstance(reference, str) and reference.startswith("#") else moved


def read_form(given: Any, where: str) -> str:
    """The JSON schema that a response format asks for, as JSON; empty for plain text. Raises ApiError (400)."""
    kind = given.get("type") if isinstance(given, dict) else given
    if given is None or kind == "text":
        return ""
    schema: Any = {"type": "object"}
    if kind == "json_schema":
        inner = given["json_schema"] if isinstance(given.get("json_schema"), dict) else given
        refuse_unknown(given, _FORM if inner is given else ("type", "json_schema"), repr(where))
        refuse_unknown(inner, _FORM, repr(where))
        schema = inner.get("schema")
    elif kind != "json_object":
        raise ApiError(400, f"{where!r} must be of type text, json_object or json_schema, found {brief(kind)}")
    if not isinstance(schema, dict):
        raise ApiError(400, f"{where!r} must have a 'schema' that is an object, found {brief(schema)}")
    return json.dumps(schema)


_FORM = ("type", "schema", "name", "description", "strict")  # the last three bind no answer here
_TOOL = ("type", "name", "description", "parameters", "strict", "cache_control", "output_schema")
_OF_TOOLS = {
    "description": TEXT,
    "parameters": OBJECT,
    "strict": FLAG,
    "output_schema": OBJECT,
    "cache_control": OBJECT,
}
_PART = ("type", "text", "refusal", "annotations", "logprobs", "citations", "cache_control", "prompt_cache_breakpoint")


def functions_of(given: Any, *, nested: bool) -> list[Mapping[str, Any]]:
    """The functions that `tools` offers. `nested`: each may stand under `function`. Raises ApiError (400)."""
    if given is None:
        return []
    if not isinstance(given, list) or not all(isinstance(tool, dict) for tool in given):
        raise ApiError(400, f"'tools' must be a list of objects, found {brief(given)}")
    functions: list[Mapping[str, Any]] = []
    for number, tool in enumerate(given):
        function = tool.get("function", tool) if nested else tool
        if tool.get("type", "function" if nested else None) != "function" or not isinstance(function, dict):
            raise ApiError(
                400,
                f"tools[{number}] must be of type function, found {brief(tool.get('type'))}; only tools that the "
                "client runs itself are supported",
            )
        known = (*_TOOL, "function") if nested else _TOOL
        direct = tool.get("allowed_callers") == ["direct"]
        refuse_unknown(tool, (*known, "allowed_callers") if direct else known, f"tools[{number}]")
        name = function.get("name")
        if not isinstance(name, str) or not 0 < len(name) <= LONGEST_NAME:
            raise ApiError(
                400,
                f"tools[{number}] must have a 'name' that is a text of at most {LONGEST_NAME} characters, "
                f"found {brief(name)}",
            )
        for key, (taken, sentence) in _OF_TOOLS.items():
            if function.get(key) is not None and not taken(function[key]):
                raise ApiError(400, f"tools[{number}]: {key!r} {sentence}, found {brief(function[key])}")
        shown = ("name", "description", "parameters", "output_schema")
        functions.append(function if nested else {key: function[key] for key in shown if function.get(key)})
    return functions


def named(choice: Any) -> str | None:
    """The name of a function in `{"type": "function", "name": N}` or `{..., "function": {"name": N}}`."""
    if not isinstance(choice, dict) or choice.get("type", "function") != "function":
        return None
    inner = choice["function"] if isinstance(choice.get("function"), dict) else choice
    name = inner.get("name")
    return name if isinstance(name, str) else None


def with_tools(messages: list[Message], tools: Tools) -> list[Message]:
    """The messages with the tools described in the system message."""
    if not tools.functions:
        return messages
    if messages[0]["role"] == "system":
        first = {"role": "system", "content": f"{messages[0]['content']}\n\n{tools.told()}".strip()}
        return [first, *messages[1:]]
    return [{"role": "system", "content": tools.told()}, *messages]


def id_of(given: Mapping[str, Any], name: str, where: str) -> str:
    """The id in a field; empty without one. Raises ApiError (400) for what is no text."""
    value = given.get(name)
    if value is not None and not isinstance(value, str):
        raise ApiError(400, f"{where}: {name!r} must be a text, found {brief(value)}")
    return value or ""


def thought_before(thought: str) -> str:
    """The beginning of an answer that was thought about before; empty without a thought."""
    return f"{THINK}\n{thought}\n{THOUGHT}\n\n" if thought else ""


def with_speakers(messages: list[Message], names: Sequence[Any]) -> list[Message]:
    """The messages, each with its speaker's name at its head where a role has several; results of tools have none.

    Raises ApiError (400) for what is no name.
    """
    spoken: dict[str, set[str]] = {}
    for number, (message, name) in enumerate(zip(messages, names, strict=True)):
        if name is not None and (not isinstance(name, str) or has_controls(name) or len(name) > LONGEST_NAME):
            raise ApiError(400, f"messages[{number}]: 'name' must be a text of one line, found {brief(name)}")
        spoken.setdefault(message["role"], set()).add(name or "")
    known = {name for role, found in spoken.items() if role != "tool" for name in found if name}
    several = {role for role, found in spoken.items() if role != "tool" and len(found) > 1}
    return [
        {**message, "content": f"{name}: " * bool(name) + quoted(message["content"], known)}
        if message["role"] in several
        else message
        for message, name in zip(messages, names, strict=True)
    ]


def text_of(content: Any, where: str, *, needed: bool = False) -> str:
    """The text of a message; a list of text parts is joined. Raises ApiError (400)."""
    if content is None and not needed:
        return ""
    if isinstance(content, str):
        return clean_text(content)
    if isinstance(content, list):
        texts = [_text_of_part(part) for part in content]
        if all(text is not None for text in texts):
            for part in content:
                refuse_unknown(part, _PART, where)
            return clean_text("".join(text for text in texts if text is not None))
    raise ApiError(
        400,
        f"{where}: 'content' must be a text or a list of text parts; images and sound are not supported, nor are files",
    )


def _text_of_part(part: Any) -> str | None:
    if not isinstance(part, dict) or part.get("type", "text") not in ("text", "input_text", "output_text", "refusal"):
        return None
    text = part.get("refusal" if part.get("type") == "refusal" else "text")
    return text if isinstance(text, str) else None


def thought_of(message: Mapping[str, Any], names: Sequence[str], where: str) -> str:
    """What an agent has thought before its answer, as the beginning of its text, in the first of these fields."""
    return thought_before(text_of(next((message[name] for name in names if message.get(name)), None), where))


def tool_calls_of(message: Mapping[str, Any], where: str, *, bare: bool = False) -> list[dict[str, Any]]:
    """The calls of tools in a message, each with its `function`; also in `function_call`, the form before `tool_calls`.

    `bare`: a call may be its function itself. Raises ApiError (400).
    """
    calls = message.get("tool_calls") or []
    if not isinstance(calls, list):
        raise ApiError(400, f"{where}: 'tool_calls' must be a list, found {brief(calls)}")
    if message.get("function_call") is not None:
        calls = [*calls, {"function": message["function_call"]}]
    if bare:
        calls = [{"function": call} if isinstance(call, dict) and "function" not in call else call for call in calls]
    if not all(isinstance(call, dict) and isinstance(call.get("function"), dict) for call in calls):
        raise ApiError(400, f"{where}: each of 'tool_calls' must have a 'function' with a 'name'")
    return calls


def with_calls(text: str, calls: Sequence[Mapping[str, Any]], where: str) -> str:
    """A text, and earlier calls of tools as models write them behind it. Raises ApiError (400)."""
    for call in calls:
        function = call["function"]
        text = f"{text}\n{written_call(function.get('name'), function.get('arguments'), where)}".strip()
    return text


def written_call(name: Any, arguments: Any, where: str) -> str:
    """An earlier call of a tool as the text in which models write one. Raises ApiError (400)."""
    if not isinstance(name, str):
        raise ApiError(400, f"{where}: a call of a tool must have a 'name', found {brief(name)}")
    if arguments is not None and not isinstance(arguments, (str, dict)):
        raise ApiError(400, f"{where}: the 'arguments' of a call must be a text or an object, found {brief(arguments)}")
    arguments = arguments or "{}"
    with contextlib.suppress(ValueError, RecursionError):  # the model wrote it, and gets it back as it was
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
    content = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return clean_text(f"<tool_call>\n{content}\n</tool_call>")


# ------------------------------------------------------------------------------------------------------ writing replies


class SaidCall(NamedTuple):
    """A call of a tool that an answer makes."""

    name: str
    arguments: str


def parts_of(call: ChatCall, reply: ChatReply) -> tuple[str, list[SaidCall]]:
    """The words of a reply and its calls of tools."""
    if not call.tool_names or reply.misfit:
        return clean_text(reply.text), []
    if call.schema:
        tool = _whole_call(call, reply.text)
        return ("", [tool]) if tool is not None else (clean_text(reply.text), [])
    words, written = split_calls(reply.text, False, {name: call.schemas.get(name, {}) for name in call.tool_names})
    calls = [SaidCall(clean_text(tool.name), _arguments(tool, call)) for tool in written if isinstance(tool, ToolCall)]
    if not calls:
        return clean_text(reply.text), []
    return clean_text(words), calls[:1] if call.one_call else calls


def _whole_call(call: ChatCall, text: str) -> SaidCall | None:
    """The call that a text of the call's schema is; None if it is an answer."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):  # cut
        return None
    known = isinstance(value, dict) and value.keys() == {"name", "arguments"} and value["name"] in call.tool_names
    if not known or not isinstance(value["arguments"], dict):
        return None
    return SaidCall(value["name"], clean_text(json.dumps(_finite(value["arguments"]), ensure_ascii=False)))


def _arguments(tool: ToolCall, call: ChatCall) -> str:
    given = _finite(clean_deep(dict(with_types(tool, call.schemas.get(tool.name, {})))))
    return clean_text(json.dumps(given, ensure_ascii=False))


def _finite(value: Any) -> Any:
    """`value` with null in place of the numbers that JSON cannot write."""
    if isinstance(value, dict):
        return {key: _finite(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def before_stop(text: str, stops: Sequence[str]) -> tuple[str, str]:
    """The text before the first of the stop texts, and that stop text; empty if there is none."""
    place, stop = min(((place, stop) for stop in stops if (place := text.find(stop)) >= 0), default=(len(text), ""))
    return text[:place], stop


def tokens_of(
    text: str, ids: Sequence[int], logprobs: Sequence[float], decode: Callable[[list[int]], str]
) -> tuple[Token, ...]:
    """The tokens whose text begins within `text`, each with its log-probability."""
    tokens, length = [], 0
    for token, logprob in zip(ids, logprobs, strict=True):
        if length >= len(text):
            break  # the end token, or what a stop text cut off
        text_of_token = decode([token])
        tokens.append(Token(text_of_token, logprob))
        length += len(text_of_token)
    return tuple(tokens)


def shown_logprobs(tokens: Sequence[Token]) -> list[dict[str, Any]]:
    """The tokens of an answer with their log-probabilities. A part of a character has no text, and so no bytes."""
    # JSON has no infinity; OpenAI's own API says -9999 for a token that is next to impossible.
    return [
        {
            "token": token.text,
            "logprob": max(token.logprob, -9999.0),
            "bytes": [] if "\ufffd" in token.text else list(token.text.encode()),
            "top_logprobs": [],
        }
        for token in tokens
    ]


def role_of(message: Any, roles: Mapping[str, str], where: str) -> str:
    """The role of a message here. Raises ApiError (400)."""
    role = message.get("role") if isinstance(message, dict) else None
    if not isinstance(role, str) or role not in roles:
        raise ApiError(400, f"{where} must be an object whose 'role' is one of {', '.join(roles)}")
    return roles[role]


def model_list(names: Sequence[str]) -> dict[str, Any]:
    """The body of `GET /v1/models`, for the clients of all APIs."""
    openai = {"object": "model", "created": 0, "owned_by": "mafrt"}
    anthropic = {"type": "model", "created_at": "1970-01-01T00:00:00Z", "lifecycle": "active"}
    models = [{"id": name, "display_name": name, **openai, **anthropic} for name in names]
    ends = {"first_id": names[0], "last_id": names[-1]} if names else {"first_id": None, "last_id": None}
    return {"object": "list", "data": models, "has_more": False, **ends}
