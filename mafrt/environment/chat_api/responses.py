"""OpenAI's Responses, `POST /v1/responses`: the API that the OpenAI Agents SDK speaks by default.

Source: its API reference. One deviation: an answer that ends at the token limit is `completed`, with an `incomplete`
message and `incomplete_details`. The stock SDKs raise for an `incomplete` answer, and an agent that talks too much
would so lose its whole episode, which costs it less than a bad answer.
"""

from __future__ import annotations

import json
import threading
import uuid
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from mafrt.core.text import brief
from mafrt.core.types import Message
from mafrt.environment.chat_api.protocol import (
    COUNT,
    EFFORTS,
    FLAG,
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
    with_tools,
    written_call,
)

_ITEMS = {
    "message": ("type", "role", "content", "id", "status", "phase"),
    "function_call": ("type", "id", "call_id", "name", "arguments", "status"),
    "function_call_output": ("type", "id", "call_id", "name", "output", "status"),
}
LOGPROBS = "message.output_text.logprobs"

_READ = {
    *("model", "input", "instructions", "stream", "tools", "tool_choice", "parallel_tool_calls"),
    *("max_output_tokens", "temperature", "top_p", "include", "previous_response_id", "store", "text"),
    *("reasoning", "stream_options", "prompt_cache_options"),
}
_CHECKED: dict[str, Hint] = {
    # For the provider's books and caches, and hints that bind no answer: they change no sample.
    "metadata": TEXTS,
    **dict.fromkeys(("user", "safety_identifier", "prompt_cache_key"), TEXT),
    "service_tier": one_of("auto", "default", "flex", "scale", "priority", "fast"),
    "access_programs": (lambda value: isinstance(value, (dict, list)), "must be an object"),
    "prompt_cache_retention": RETENTION,
    "max_tool_calls": COUNT,  # only the client's own tools are called
    "top_logprobs": (lambda value: value == 0, "must be 0: only the log-probabilities of the sampled tokens are known"),
    "background": (lambda value: value is False, "is not supported: wait for the answer, or stream it"),
    "conversation": (lambda value: False, "is not supported: send the items, or 'previous_response_id'"),
    "context_management": (lambda value: value == [], "is not supported: shorten the input yourself"),
    "truncation": (lambda value: value == "disabled", "must be disabled: a prompt is never cut; shorten the input"),
    "prompt": (lambda value: False, "is not supported: there are no stored prompts; give 'instructions'"),
    "moderation": (lambda value: False, "is not supported: answers are not moderated"),
    "image": (lambda value: False, "is not supported: answers are texts"),
}

_SUMMARY = one_of("auto", "concise", "detailed")  # there are none
_REASONING = {"effort": one_of(*EFFORTS), "summary": _SUMMARY, "generate_summary": _SUMMARY}
_CACHES = {"mode": TEXT, "ttl": TEXT, "comparison_response_id": TEXT}


class KeptItems:
    """Items of earlier answers by episode and id; the oldest are forgotten.

    Args:
        most: answers that are kept.
        most_mib: of their items as JSON.
    """

    def __init__(self, most: int = 4096, most_mib: float = 64.0) -> None:
        self.most, self.most_bytes = most, most_mib * 2**20
        self._kept: OrderedDict[tuple[str, str], tuple[list[Any], int]] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()

    def of(self, key: str) -> EarlierAnswers:
        """Those of one episode."""
        return _PastOf(self, key)

    def get(self, key: str, name: str) -> list[Any]:
        with self._lock:
            stored = self._kept.get((key, name))
        if stored is None:
            raise ApiError(
                400,
                f"there is no earlier response {name!r} of this episode here; send its items as 'input'",
                "previous_response_not_found",
            )
        return stored[0]

    def forget(self, key: str) -> None:
        """Forget an episode."""
        with self._lock:
            for each in [each for each in self._kept if each[0] == key]:
                self._bytes -= self._kept.pop(each)[1]

    def keep(self, key: str, name: str, items: list[Any]) -> None:
        size = len(json.dumps(items))
        with self._lock:
            self._kept[key, name] = (items, size)
            self._bytes += size
            while len(self._kept) > self.most or self._bytes > self.most_bytes:
                self._bytes -= self._kept.popitem(last=False)[1][1]


@dataclass(frozen=True)
class _PastOf:
    kept: KeptItems
    key: str

    def get(self, name: str) -> list[Any]:
        return self.kept.get(self.key, name)

    def keep(self, name: str, items: list[Any]) -> None:
        self.kept.keep(self.key, name, items)


class Responses:
    """Responses as an `Api`."""

    path = "/v1/responses"
    header = ""

    def parse(self, body: Any, past: EarlierAnswers) -> ChatCall:
        fields = Fields(body)
        model = fields.model()
        fields.refuse(_CHECKED, _READ)
        include = body.get("include") or []
        if not isinstance(include, list) or any(
            entry not in (LOGPROBS, "reasoning.encrypted_content") for entry in include
        ):
            raise ApiError(400, f"'include' may hold {LOGPROBS} alone, found {brief(include)}")
        text = read_part(body, "text", ("format",), {"verbosity": one_of("low", "medium", "high")})
        read_part(body, "stream_options", (), {"include_obfuscation": FLAG})  # events are not padded anyway
        reasoning = read_part(body, "reasoning", ("mode", "context"), _REASONING)
        if reasoning.get("mode") not in (None, "standard"):
            raise ApiError(400, "'reasoning.mode' must be standard: there is one way to answer")
        if reasoning.get("context") not in (None, "auto", "current_turn"):
            raise ApiError(400, "'reasoning.context' must be current_turn: earlier thoughts are no part of a prompt")
        caches = read_part(body, "prompt_cache_options", ("prewarm",), _CACHES)
        if caches.get("prewarm"):
            raise ApiError(400, "'prompt_cache_options.prewarm' is not supported: every request is answered")
        instructions = body.get("instructions")
        if instructions is not None and not isinstance(instructions, str):
            raise ApiError(400, f"'instructions' must be a text, found {brief(instructions)}")
        items = _all_items(body, past)
        messages = _messages(items)
        if instructions:
            messages = _instructed(messages, text_of(instructions, "instructions"))
        one = not fields.flag("parallel_tool_calls", True)
        tools = read_tools(functions_of(body.get("tools"), nested=False), body.get("tool_choice"), one=one)
        if not messages:
            raise ApiError(400, "'input' must be a text or a list of at least one item that says something")
        fields.flag("store")
        return ChatCall(
            model=model,
            messages=with_tools(messages, tools),
            stream=fields.flag("stream"),
            **bounds(tools, body.get("tools"), text.get("format"), "text.format"),
            logprobs=LOGPROBS in include,
            max_tokens=fields.number("max_output_tokens", int, 1),
            temperature=fields.number("temperature", float, 0),
            top_p=fields.number("top_p", float, 0, 1),
            request=body,
        )

    def whole(self, call: ChatCall, reply: ChatReply, created: int, past: EarlierAnswers) -> dict[str, Any]:
        name, output = _id("resp"), _output(call, reply)
        _keep(call, name, output, past)
        return _response(call, name, created, reply, output)

    def events(self, call: ChatCall, created: int, past: EarlierAnswers) -> Events:
        return _ResponseEvents(call, created, past)

    def error(self, error: ApiError) -> dict[str, Any]:
        return error.body()


# ---------------------------------------------------------------------------------------------------- reading requests


def _all_items(body: Mapping[str, Any], past: EarlierAnswers) -> list[Any]:
    """Earlier items and those of this request."""
    given = body.get("input")
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    if items is None and body.get("previous_response_id") is not None:
        items = []
    if not isinstance(items, list):
        raise ApiError(400, f"'input' must be a text or a list of items, found {brief(given)}")
    earlier = body.get("previous_response_id")
    if earlier is None:
        return items
    if not isinstance(earlier, str):
        raise ApiError(400, f"'previous_response_id' must be a text, found {brief(earlier)}")
    return [*past.get(earlier), *items]


def _messages(items: list[Any]) -> list[Message]:
    """Items as chat messages: a call joins its agent's words before it."""
    messages: list[Message] = []
    open_call = False
    """whether the last message is an agent's and may still take calls"""
    asked: list[str] = []
    """ids of its calls"""
    results: list[tuple[str, Message]] = []
    """of these"""
    for number, item in enumerate(items):
        where = f"input[{number}]"
        if not isinstance(item, dict):
            raise ApiError(400, f"{where} must be an object, found {brief(item)}")
        kind = item.get("type", "message")
        if isinstance(kind, str) and kind in _ITEMS:
            refuse_unknown(item, _ITEMS[kind], where)
        if kind in ("message", "function_call") and results:
            asked, results = [], []
        if kind == "message":
            role = role_of(item, ROLES, where)
            messages.append({"role": role, "content": text_of(item.get("content"), where, needed=role != "assistant")})
            open_call = role == "assistant"
        elif kind == "function_call":
            text = written_call(item.get("name"), item.get("arguments"), where)
            asked.append(id_of(item, "call_id", where))
            if open_call:
                messages[-1] = {**messages[-1], "content": f"{messages[-1]['content']}\n{text}".strip()}
            else:
                messages.append({"role": "assistant", "content": text})
            open_call = True
        elif kind == "function_call_output":
            result: Message = {"role": "tool", "content": text_of(item.get("output"), where)}
            results.append((id_of(item, "call_id", where), result))
            messages[len(messages) - len(results) + 1 :] = in_order(asked, results, where)
            open_call = False
        elif kind != "reasoning":  # thoughts of earlier turns are no part of a prompt
            raise ApiError(
                400,
                f"{where}: items of type {brief(kind)} are not supported; there are message, function_call, "
                "function_call_output and reasoning",
            )
    return messages


def _instructed(messages: list[Message], instructions: str) -> list[Message]:
    """The messages with the instructions as, or at the head of, the system message."""
    if messages and messages[0]["role"] == "system":
        return [{"role": "system", "content": f"{instructions}\n\n{messages[0]['content']}"}, *messages[1:]]
    return [{"role": "system", "content": instructions}, *messages]


# ------------------------------------------------------------------------------------------------------ writing answers


def _id(kind: str) -> str:
    return f"{kind}_{uuid.uuid4().hex}"


def _keep(call: ChatCall, name: str, output: list[dict[str, Any]], past: EarlierAnswers) -> None:
    if call.request.get("store") is not False:
        past.keep(name, [*_all_items(call.request, past), *output])


def _output(call: ChatCall, reply: ChatReply, message_id: str | None = None) -> list[dict[str, Any]]:
    """The items of an answer."""
    words, calls = parts_of(call, reply)
    items: list[dict[str, Any]] = []
    if words or not calls:
        items.append(
            _message(
                message_id or _id("msg"), words, shown_logprobs(reply.tokens) if call.logprobs else [], cut=reply.cut
            )
        )
    for tool_call in calls:
        items.append(
            {
                "type": "function_call",
                "id": _id("fc"),
                "call_id": f"call_{uuid.uuid4().hex[:24]}",
                "name": tool_call.name,
                "arguments": tool_call.arguments,
                "status": "completed",
            }
        )
    return items


def _message(name: str, text: str, logprobs: list[dict[str, Any]], *, cut: bool = False) -> dict[str, Any]:
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}
    status = "incomplete" if cut else "completed"
    return {"type": "message", "id": name, "role": "assistant", "status": status, "content": [part]}


def _response(
    call: ChatCall, name: str, created: int, reply: ChatReply | None, output: list[dict[str, Any]]
) -> dict[str, Any]:
    """The answer; `reply` is None while it is being made."""
    asked, usage = call.request, None
    if reply is not None:
        usage = {
            "input_tokens": reply.prompt_tokens,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": reply.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": reply.prompt_tokens + reply.completion_tokens,
        }
    return {
        "id": name,
        "object": "response",
        "created_at": created,
        "completed_at": None if reply is None else created,
        "status": "in_progress" if reply is None else "completed",
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if reply is not None and reply.cut else None,
        "instructions": asked.get("instructions"),
        "max_output_tokens": asked.get("max_output_tokens"),
        "metadata": asked.get("metadata") or {},
        "model": call.model,
        "output": output,
        "parallel_tool_calls": not call.one_call,
        "previous_response_id": asked.get("previous_response_id"),
        "reasoning": asked.get("reasoning"),
        "store": asked.get("store") is not False,
        "temperature": call.temperature,
        "text": asked.get("text") or {"format": {"type": "text"}},
        "tool_choice": asked.get("tool_choice") or "auto",
        "tools": asked.get("tools") or [],
        "top_p": call.top_p,
        "truncation": "disabled",
        "usage": usage,
    }


class _ResponseEvents:
    """An answer as typed events."""

    def __init__(self, call: ChatCall, created: int, past: EarlierAnswers) -> None:
        self._call, self._created, self._past = call, created, past
        self._name, self._message_id = _id("resp"), _id("msg")
        self._number = 0
        self._said = ""
        self._opened = False
        """whether the message has begun"""

    def begin(self) -> str:
        state = _response(self._call, self._name, self._created, None, [])
        return self._event("response.created", response=state) + self._event("response.in_progress", response=state)

    def piece(self, text: str) -> str:
        head = "" if self._opened else self._open_message()
        self._said += text
        return head + self._event("response.output_text.delta", **self._place(), delta=text, logprobs=[])

    def end(self, reply: ChatReply) -> Iterator[str]:
        output = _output(self._call, reply, self._message_id)
        for place, item in enumerate(output):
            if item["type"] == "message":
                yield from self._end_message(item)
            else:
                yield from self._end_call(item, place)
        _keep(self._call, self._name, output, self._past)
        yield self._event(
            "response.completed", response=_response(self._call, self._name, self._created, reply, output)
        )

    def failed(self, error: ApiError) -> str:
        return self._event("error", code=error.code, message=str(error), param=None)

    def _open_message(self) -> str:
        self._opened = True
        item = {**_message(self._message_id, "", []), "status": "in_progress", "content": []}
        part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        return self._event("response.output_item.added", output_index=0, item=item) + self._event(
            "response.content_part.added", **self._place(), part=part
        )

    def _end_message(self, item: dict[str, Any]) -> Iterator[str]:
        part = item["content"][0]
        if rest := part["text"][len(self._said) :]:
            yield self.piece(rest)
        elif not self._opened:
            yield self._open_message()
        yield self._event("response.output_text.done", **self._place(), text=part["text"], logprobs=part["logprobs"])
        yield self._event("response.content_part.done", **self._place(), part=part)
        yield self._event("response.output_item.done", output_index=0, item=item)

    def _end_call(self, item: dict[str, Any], place: int) -> Iterator[str]:
        where = {"item_id": item["id"], "output_index": place}
        started = {**item, "arguments": "", "status": "in_progress"}
        yield self._event("response.output_item.added", output_index=place, item=started)
        yield self._event("response.function_call_arguments.delta", **where, delta=item["arguments"])
        yield self._event(
            "response.function_call_arguments.done", **where, name=item["name"], arguments=item["arguments"]
        )
        yield self._event("response.output_item.done", output_index=place, item=item)

    def _place(self) -> dict[str, Any]:
        return {"item_id": self._message_id, "output_index": 0, "content_index": 0}

    def _event(self, kind: str, **more: Any) -> str:
        body = {"type": kind, "sequence_number": self._number, **more}
        self._number += 1
        return f"event: {kind}\ndata: {json.dumps(body, ensure_ascii=False)}\n\n"


RESPONSES = Responses()
