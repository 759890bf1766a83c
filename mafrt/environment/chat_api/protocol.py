"""Chat completion requests as typed calls, and replies in the shape that OpenAI's clients read.

Source: the API reference of `POST /v1/chat/completions`. Calls of tools travel as text in the form that Qwen and Hermes
models are trained on: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`.
"""

from __future__ import annotations

import contextlib
import json
import math
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mafrt.core.errors import MafrtError
from mafrt.core.text import brief, clean_text
from mafrt.core.types import Message
from mafrt.environment.tool_calls import ToolCall, split_calls, with_types

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
_ROLES |= {"tool": "tool", "function": "tool"}


class ApiError(MafrtError):
    """An answer with an error status, in the API's own shape."""

    def __init__(self, status: int, message: str, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.code = status, code

    def body(self) -> dict[str, Any]:
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": str(self), "type": kind, "param": None, "code": self.code}}


@dataclass(frozen=True)
class ChatCall:
    """One request for a completion."""

    model: str
    messages: list[Message]
    stream: bool = False
    usage_in_stream: bool = False
    tools: bool = False
    """whether the request offers tools"""
    schemas: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """name of a tool -> JSON schema of its arguments"""
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    stop: tuple[str, ...] = ()
    seed: int | None = None


@dataclass(frozen=True)
class ChatReply:
    """The answer to a call."""

    text: str
    cut: bool = False
    """whether it ended at the token limit"""
    prompt_tokens: int = 0
    completion_tokens: int = 0


def parse_call(body: Any) -> ChatCall:
    """The call of a request's JSON body. Raises ApiError (400) that names the field."""
    if not isinstance(body, dict):
        raise ApiError(400, f"expected a JSON object, found {brief(body)}")
    model = body.get("model")
    if not isinstance(model, str) or not model:
        raise ApiError(400, f"'model' must be the name of an agent, found {brief(model)}")
    if body.get("n") not in (None, 1):
        raise ApiError(400, "'n' must be 1; make one call for each answer")
    tools = body.get("tools") or []
    if body.get("tool_choice") == "none":
        tools = []
    messages = _messages(body.get("messages"))
    options = body.get("stream_options")
    stop = body.get("stop") or []
    stops = (stop,) if isinstance(stop, str) else tuple(stop) if isinstance(stop, list) else None
    if stops is None or len(stops) > 16 or not all(isinstance(text, str) and text for text in stops):
        raise ApiError(400, f"'stop' must be a text or up to 16 texts, found {brief(stop)}")
    return ChatCall(
        model=model,
        messages=_with_tools(messages, tools),
        stream=bool(body.get("stream")),
        usage_in_stream=isinstance(options, dict) and bool(options.get("include_usage")),
        tools=bool(tools),
        schemas=_schemas(tools),
        max_tokens=_number(body, "max_completion_tokens", int, 1) or _number(body, "max_tokens", int, 1),
        temperature=_number(body, "temperature", float, 0),
        top_p=_number(body, "top_p", float, 0),
        stop=stops,
        seed=_number(body, "seed", int, None),
    )


def _number(body: Mapping[str, Any], name: str, kind: type, low: float | None) -> Any:
    value = body.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ApiError(400, f"{name!r} must be a number, found {brief(value)}")
    if (kind is int and value != int(value)) or (low is not None and value < low):
        raise ApiError(400, f"{name!r} must be {'a whole number' if kind is int else 'a number'} of {low} or more")
    return kind(value)


def _messages(given: Any) -> list[Message]:
    if not isinstance(given, list) or not given:
        raise ApiError(400, f"'messages' must be a list of at least one message, found {brief(given)}")
    messages: list[Message] = []
    for number, message in enumerate(given):
        where = f"messages[{number}]"
        if not isinstance(message, dict) or message.get("role") not in _ROLES:
            raise ApiError(400, f"{where} must be an object whose 'role' is one of {', '.join(_ROLES)}")
        text = _content(message.get("content"), where)
        for call in message.get("tool_calls") or ():
            text = f"{text}\n{_called(call, where)}".strip()
        messages.append({"role": _ROLES[message["role"]], "content": clean_text(text)})
    return messages


def _content(content: Any, where: str) -> str:
    """The text of a message; a list of text parts is joined."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list) and all(isinstance(p, dict) and isinstance(p.get("text"), str) for p in content):
        return "".join(part["text"] for part in content)
    raise ApiError(
        400, f"{where}: 'content' must be a text or a list of text parts; images and sound are not supported"
    )


def _called(call: Any, where: str) -> str:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ApiError(400, f"{where}: each of 'tool_calls' must have a 'function' with a 'name'")
    arguments = function.get("arguments") or "{}"
    with contextlib.suppress(ValueError):  # the model wrote it, and gets it back as it was
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
    content = json.dumps({"name": function["name"], "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{content}\n</tool_call>"


def _with_tools(messages: list[Message], tools: Any) -> list[Message]:
    """The messages with the tools described in the system message."""
    if not tools:
        return messages
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise ApiError(400, "'tools' must be a list of objects")
    listed = "\n".join(json.dumps(tool.get("function", tool), ensure_ascii=False) for tool in tools)
    told = (
        f"You may call these functions:\n<tools>\n{listed}\n</tools>\nFor each call write:\n<tool_call>\n"
        '{"name": "NAME", "arguments": {...}}\n</tool_call>'
    )
    if messages[0]["role"] == "system":
        first = {"role": "system", "content": f"{messages[0]['content']}\n\n{told}".strip()}
        return [first, *messages[1:]]
    return [{"role": "system", "content": told}, *messages]


def _schemas(tools: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    functions = [tool["function"] if isinstance(tool.get("function"), dict) else tool for tool in tools]
    return {
        function["name"]: function["parameters"]
        for function in functions
        if isinstance(function.get("name"), str) and isinstance(function.get("parameters"), dict)
    }


# ------------------------------------------------------------------------------------------------------------- replies


def _parts(call: ChatCall, reply: ChatReply) -> tuple[str | None, list[dict[str, Any]], str]:
    """Content, tool calls and finish reason of a reply."""
    words, written = split_calls(reply.text, fences=False) if call.tools else (reply.text, [])
    calls = [
        {
            "id": f"call_{uuid.uuid4().hex[:24]}",
            "type": "function",
            "function": {"name": tool.name, "arguments": _arguments(tool, call)},
        }
        for tool in written
        if isinstance(tool, ToolCall)
    ]
    if calls:
        return words or None, calls, "tool_calls"
    return reply.text, [], "length" if reply.cut else "stop"


def _arguments(tool: ToolCall, call: ChatCall) -> str:
    return json.dumps(dict(with_types(tool, call.schemas.get(tool.name, {}))), ensure_ascii=False)


def _usage(reply: ChatReply) -> dict[str, int]:
    total = reply.prompt_tokens + reply.completion_tokens
    return {
        "prompt_tokens": reply.prompt_tokens,
        "completion_tokens": reply.completion_tokens,
        "total_tokens": total,
    }


def completion(call: ChatCall, reply: ChatReply, created: int) -> dict[str, Any]:
    """The body of a whole reply."""
    content, calls, reason = _parts(call, reply)
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if calls:
        message["tool_calls"] = calls
    return {
        "id": f"chatcmpl-{uuid.uuid4().hex}",
        "object": "chat.completion",
        "created": created,
        "model": call.model,
        "choices": [{"index": 0, "message": message, "finish_reason": reason, "logprobs": None}],
        "usage": _usage(reply),
    }


class EventStream:
    """A reply as server-sent events: pieces of the text as they are said, and the rest with the whole reply."""

    def __init__(self, call: ChatCall, created: int) -> None:
        self._call = call
        self._head = {
            "id": f"chatcmpl-{uuid.uuid4().hex}",
            "object": "chat.completion.chunk",
            "created": created,
            "model": call.model,
        }
        self._said = ""

    def begin(self) -> str:
        """The first event, without text."""
        return self._event({"role": "assistant", "content": ""}, None)

    def piece(self, text: str) -> str:
        """The event of a piece of the text."""
        self._said += text
        return self._event({"content": text}, None)

    def end(self, reply: ChatReply) -> Iterator[str]:
        """The events that remain once the reply is whole."""
        content, calls, reason = _parts(self._call, reply)
        if content and (rest := content[len(self._said) :]):
            yield self.piece(rest)
        if calls:
            yield self._event({"tool_calls": [{"index": place, **tool} for place, tool in enumerate(calls)]}, None)
        yield self._event({}, reason)
        if self._call.usage_in_stream:
            yield self._event(None, None, usage=_usage(reply))
        yield "data: [DONE]\n\n"

    def failed(self, error: ApiError) -> str:
        """The event of an error after the first piece."""
        return f"data: {json.dumps(error.body(), ensure_ascii=False)}\n\n"

    def _event(self, delta: dict[str, Any] | None, finish: str | None, **more: Any) -> str:
        choices = [] if delta is None else [{"index": 0, "delta": delta, "finish_reason": finish, "logprobs": None}]
        return f"data: {json.dumps({**self._head, 'choices': choices, **more}, ensure_ascii=False)}\n\n"


def model_list(names: Sequence[str]) -> dict[str, Any]:
    """The body of `GET /v1/models`."""
    models = [{"id": name, "object": "model", "created": 0, "owned_by": "mafrt"} for name in names]
    return {"object": "list", "data": models}
