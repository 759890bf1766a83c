"""OpenAI's Chat Completions, `POST /v1/chat/completions`. Source: its API reference."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from typing import Any

from mafrt.core.text import brief
from mafrt.core.types import Message
from mafrt.environment.chat_api.protocol import (
    EFFORTS,
    FLAG,
    MOST_ANSWERS,
    OBJECT,
    RETENTION,
    ROLES,
    TEXT,
    TEXTS,
    ApiError,
    ChatCall,
    ChatReply,
    EarlierAnswers,
    Events,
    Fields,
    Hint,
    bounds,
    functions_of,
    id_of,
    in_order,
    one_of,
    parts_of,
    read_part,
    read_tools,
    refuse_unknown,
    role_of,
    shown_logprobs,
    text_of,
    thought_of,
    tool_calls_of,
    with_calls,
    with_speakers,
    with_tools,
)

_THOUGHTS = ("reasoning_content", "reasoning")
_MESSAGE = {
    *("role", "content", "name", "refusal", "audio", "tool_calls", "tool_call_id", "function_call", "annotations"),
    *("cache_control", *_THOUGHTS),
}
_ROLES = {**ROLES, "tool": "tool", "function": "tool"}

_READ = {
    *("model", "messages", "stream", "stream_options", "stop", "tools", "tool_choice", "parallel_tool_calls"),
    *("max_completion_tokens", "max_tokens", "temperature", "top_p", "seed", "logprobs", "response_format", "n"),
}
_CHECKED: dict[str, Hint] = {
    # For the provider's books and caches, and hints that bind no answer: they change no sample.
    "metadata": TEXTS,
    "store": FLAG,
    **dict.fromkeys(("user", "safety_identifier", "prompt_cache_key"), TEXT),
    "service_tier": one_of("auto", "default", "flex", "scale", "priority", "fast"),
    "prompt_cache_options": OBJECT,
    "prompt_cache_retention": RETENTION,
    "prediction": OBJECT,
    "reasoning_effort": one_of(*EFFORTS),
    "verbosity": one_of("low", "medium", "high"),
    "top_logprobs": (lambda value: value == 0, "must be 0: only the log-probabilities of the sampled tokens are known"),
    "logit_bias": (lambda value: value == {}, "is not supported: it would change the policy that is sampled"),
    "frequency_penalty": (lambda value: value == 0, "must be 0: a penalty would change the policy that is sampled"),
    "presence_penalty": (lambda value: value == 0, "must be 0: a penalty would change the policy that is sampled"),
    "modalities": (lambda value: value == ["text"], 'must be ["text"]; images and sound are not supported'),
    "audio": (lambda value: False, "is not supported: answers are texts"),
    "functions": (lambda value: value == [], "is the form before 'tools'; give 'tools'"),
    "function_call": (lambda value: value == "none", "is the form before 'tool_choice'; give 'tool_choice'"),
    "web_search_options": (lambda value: False, "is not supported: there is no search here; offer it as a tool"),
    "moderation": (lambda value: False, "is not supported: answers are not moderated"),
}


class Completions:
    """Chat Completions as an `Api`."""

    path = "/v1/chat/completions"
    header = ""

    def parse(self, body: Any, past: EarlierAnswers | None = None) -> ChatCall:
        fields = Fields(body)
        model = fields.model()
        fields.refuse(_CHECKED, _READ)
        messages = _messages(body.get("messages"))
        read_part(body, "stream_options", (), {"include_usage": FLAG, "include_obfuscation": FLAG})
        one = not fields.flag("parallel_tool_calls", True)
        tools = read_tools(functions_of(body.get("tools"), nested=True), body.get("tool_choice"), one=one)
        most = fields.number("max_completion_tokens", int, 1)
        return ChatCall(
            model=model,
            messages=with_tools(messages, tools),
            stream=fields.flag("stream"),
            **bounds(tools, body.get("tools"), body.get("response_format"), "response_format"),
            logprobs=fields.flag("logprobs"),
            max_tokens=fields.number("max_tokens", int, 1) if most is None else most,
            temperature=fields.number("temperature", float, 0),
            top_p=fields.number("top_p", float, 0, 1),
            stop=fields.stops(),
            seed=fields.number("seed", int, None),
            answers=fields.number("n", int, 1, MOST_ANSWERS) or 1,
            request=body,
        )

    def whole(
        self, call: ChatCall, reply: ChatReply, created: int, past: EarlierAnswers | None = None
    ) -> dict[str, Any]:
        return {
            "id": f"chatcmpl-{uuid.uuid4().hex}",
            "object": "chat.completion",
            "created": created,
            "model": call.model,
            "choices": [_choice(call, each, index) for index, each in enumerate((reply, *reply.others))],
            "usage": _usage(reply),
        }

    def events(self, call: ChatCall, created: int, past: EarlierAnswers | None = None) -> Events:
        return _Chunks(call, created)

    def error(self, error: ApiError) -> dict[str, Any]:
        return error.body()


def _choice(call: ChatCall, reply: ChatReply, index: int) -> dict[str, Any]:
    content, calls, reason = _parts(call, reply)
    message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
    if calls:
        message["tool_calls"] = calls
    return {"index": index, "message": message, "finish_reason": reason, "logprobs": _logprobs(call, reply)}


def _messages(given: Any) -> list[Message]:
    if not isinstance(given, list) or not given:
        raise ApiError(400, f"'messages' must be a list of at least one message, found {brief(given)}")
    messages: list[Message] = []
    asked: list[str] = []
    """ids of the last message's calls of tools"""
    results: list[tuple[str, Message]] = []
    """of these"""
    for number, message in enumerate(given):
        where = f"messages[{number}]"
        role = role_of(message, _ROLES, where)
        refuse_unknown(message, _MESSAGE, where)
        text = text_of(message.get("content"), where, needed=role in ("system", "user"))
        if role == "assistant":
            text = thought_of(message, _THOUGHTS, where) + (text or text_of(message.get("refusal"), where))
        calls = tool_calls_of(message, where)
        if message.get("audio") is not None:
            raise ApiError(400, f"{where}: 'audio' is not supported: messages are texts")
        for call in calls:
            refuse_unknown(call, ("id", "type", "index", "function"), f"{where}.tool_calls")
            refuse_unknown(call["function"], ("name", "arguments"), f"{where}.tool_calls")
        text = with_calls(text, calls, where)
        if role == "tool":
            results.append((id_of(message, "tool_call_id", where), {"role": role, "content": text}))
            messages[len(messages) - len(results) + 1 :] = in_order(asked, results, where)
            continue
        asked, results = [id_of(call, "id", f"{where}.tool_calls") for call in calls], []
        messages.append({"role": role, "content": text})
    return with_speakers(messages, [message.get("name") for message in given])


def _parts(call: ChatCall, reply: ChatReply) -> tuple[str | None, list[dict[str, Any]], str]:
    """Content, tool calls and finish reason of a reply."""
    words, tool_calls = parts_of(call, reply)
    if not tool_calls:
        return words, [], "length" if reply.cut else "stop"
    calls = [
        {
            "id": f"call_{uuid.uuid4().hex[:24]}",
            "type": "function",
            "function": {"name": each.name, "arguments": each.arguments},
        }
        for each in tool_calls
    ]
    return words or None, calls, "tool_calls"


def _logprobs(call: ChatCall, reply: ChatReply) -> dict[str, Any] | None:
    return {"content": shown_logprobs(reply.tokens), "refusal": None} if call.logprobs else None


def _usage(reply: ChatReply) -> dict[str, int]:
    completion_tokens = sum(each.completion_tokens for each in (reply, *reply.others))
    return {
        "prompt_tokens": reply.prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": reply.prompt_tokens + completion_tokens,
    }


class _Chunks:
    """A reply as chunks: the first answer in pieces, others each whole."""

    def __init__(self, call: ChatCall, created: int) -> None:
        self._call = call
        self._head = {
            "id": f"chatcmpl-{uuid.uuid4().hex}",
            "object": "chat.completion.chunk",
            "created": created,
            "model": call.model,
        }
        self._said = ""
        options = call.request.get("stream_options")
        self._usage = isinstance(options, dict) and bool(options.get("include_usage"))

    def begin(self) -> str:
        return self._event({"role": "assistant", "content": ""}, None)

    def piece(self, text: str) -> str:
        self._said += text
        return self._event({"content": text}, None)

    def end(self, reply: ChatReply) -> Iterator[str]:
        for index, answer in enumerate((reply, *reply.others)):
            content, calls, reason = _parts(self._call, answer)
            if index:
                yield self._event({"role": "assistant", "content": content or ""}, None, index=index)
            elif content and (rest := content[len(self._said) :]):
                yield self.piece(rest)
            if calls:
                listed = [{"index": place, **tool} for place, tool in enumerate(calls)]
                yield self._event({"tool_calls": listed}, None, index=index)
            yield self._event({}, reason, _logprobs(self._call, answer), index=index)
        if self._usage:
            yield self._event(None, None, usage=_usage(reply))
        yield "data: [DONE]\n\n"

    def failed(self, error: ApiError) -> str:
        return f"data: {json.dumps(error.body(), ensure_ascii=False)}\n\n"

    def _event(
        self,
        delta: dict[str, Any] | None,
        finish: str | None,
        logprobs: dict[str, Any] | None = None,
        *,
        index: int = 0,
        **more: Any,
    ) -> str:
        choice = {"index": index, "delta": delta, "finish_reason": finish, "logprobs": logprobs}
        body = {**self._head, "choices": [] if delta is None else [choice], **more}
        return f"data: {json.dumps(body, ensure_ascii=False)}\n\n"


COMPLETIONS = Completions()
parse_call = COMPLETIONS.parse
