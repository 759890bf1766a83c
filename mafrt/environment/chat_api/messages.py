"""Anthropic's Messages, `POST /v1/messages`. Source: its API reference."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from mafrt.core.text import brief
from mafrt.core.types import Message
from mafrt.environment.chat_api.protocol import (
    COUNT,
    EFFORTS,
    OBJECT,
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
    text_of,
    thought_before,
    with_tools,
    written_call,
)
from mafrt.environment.thought_forms import TAGS
from mafrt.environment.tool_calls import leading_thought

SIGNATURE = "unsigned"
"""Of thoughts; clients send it back, and it is not looked at."""

_ROLES = {name: name for name in ("user", "assistant", "system")}
_READ = {
    *("model", "messages", "max_tokens", "system", "stream", "stop_sequences", "tools", "tool_choice"),
    *("temperature", "top_p", "thinking", "output_config"),
}
_CHECKED: dict[str, Hint] = {
    # For the provider's books, caches and places: they change no sample.
    "metadata": TEXTS,
    "service_tier": one_of("auto", "standard_only"),
    "cache_control": OBJECT,
    "inference_geo": TEXT,
    "diagnostics": OBJECT,
    "top_k": (lambda value: False, "is not supported: give 'top_p', or set it in the team file"),
    "container": (lambda value: False, "is not supported: nothing is run here"),
    "mcp_servers": (lambda value: value == [], "is not supported: only tools that the client runs itself are"),
    "context_management": (lambda value: False, "is not supported: shorten the messages yourself"),
    "speed": (lambda value: value == "standard", "must be standard: there is one speed"),
}
_KINDS = {400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error",
          413: "request_too_large", 429: "rate_limit_error", 503: "overloaded_error", 504: "timeout_error"}  # fmt: skip


class Messages:
    """Messages as an `Api`."""

    path = "/v1/messages"
    header = "anthropic-version"

    def parse(self, body: Any, past: EarlierAnswers | None = None) -> ChatCall:
        fields = Fields(body)
        model = fields.model()
        fields.refuse(_CHECKED, _READ)
        limit = fields.number("max_tokens", int, 1)
        if limit is None:
            raise ApiError(400, "'max_tokens' must be a whole number of 1 or more, found none")
        return self._call(fields, model, max_tokens=limit, stream=fields.flag("stream"))

    def counted(self, body: Any) -> ChatCall:
        """The call whose tokens `POST /v1/messages/count_tokens` asks for. Raises ApiError (400)."""
        fields = Fields(body)
        model = fields.model()
        fields.refuse(_CHECKED, _READ - {"stream", "stop_sequences", "temperature", "top_p"})
        return self._call(fields, model)

    @staticmethod
    def _call(fields: Fields, model: str, **more: Any) -> ChatCall:
        body = fields.body
        config = read_part(body, "output_config", ("format",), {"effort": one_of(*EFFORTS)})
        _thinks(body)
        choice, one = _choice(body.get("tool_choice"))
        tools = read_tools(functions_of(_functions(body.get("tools")), nested=False), choice, one=one)
        return ChatCall(
            model=model,
            messages=with_tools(_messages(body), tools),
            **bounds(tools, body.get("tools"), config.get("format"), "output_config.format"),
            temperature=fields.number("temperature", float, 0, 1),
            top_p=fields.number("top_p", float, 0, 1),
            stop=fields.stops("stop_sequences"),
            request=body,
            **more,
        )

    def whole(
        self, call: ChatCall, reply: ChatReply, created: int, past: EarlierAnswers | None = None
    ) -> dict[str, Any]:
        content = _content(call, reply)
        return {**_head(call, content), **_end(content, reply), "usage": _usage(reply)}

    def events(self, call: ChatCall, created: int, past: EarlierAnswers | None = None) -> Events:
        return _MessageEvents(call)

    def error(self, error: ApiError) -> dict[str, Any]:
        known = "api_error" if error.status >= 500 else "invalid_request_error"
        return {"type": "error", "error": {"type": _KINDS.get(error.status, known), "message": str(error)}}


# ---------------------------------------------------------------------------------------------------- reading requests


def _thinks(body: Any) -> bool:
    """Whether thoughts are shown as blocks. Raises ApiError (400)."""
    given = body.get("thinking")
    kind = given.get("type") if isinstance(given, dict) else given
    if kind is not None and kind not in ("enabled", "disabled", "adaptive", "between_tools"):
        raise ApiError(400, f"'thinking' must be of type enabled, adaptive or disabled, found {brief(kind)}")
    if isinstance(given, dict):  # whether, and how long, a model thinks is a setting of the run
        read_part(body, "thinking", ("type", "display"), {"budget_tokens": COUNT})
    if kind is not None and given.get("display") not in (None, "summarized"):
        raise ApiError(400, "'thinking.display' must be summarized: thoughts that a model has said are shown")
    return kind not in (None, "disabled")


def _choice(given: Any) -> tuple[Any, bool]:
    """A `tool_choice` in OpenAI's form, and whether at most one tool may be called. Raises ApiError (400)."""
    if given is None:
        return None, False
    kind = given.get("type") if isinstance(given, dict) else given
    forms = {"auto": "auto", "any": "required", "none": "none", "tool": given}
    if not isinstance(given, dict) or not isinstance(kind, str) or kind not in forms:
        raise ApiError(400, f"'tool_choice' must be of type auto, any, tool or none, found {brief(kind)}")
    refuse_unknown(given, ("type", "name", "disable_parallel_tool_use"), "'tool_choice'")
    form = {"type": "function", "name": given.get("name")} if kind == "tool" else forms[kind]
    return form, Fields(given).flag("disable_parallel_tool_use")


def _functions(given: Any) -> Any:
    """Tools in OpenAI's form. Raises ApiError (400)."""
    if not isinstance(given, list) or not all(isinstance(tool, dict) for tool in given):
        return given  # is refused in the common words
    for number, tool in enumerate(given):
        if wrong := [name for name in ("defer_loading", "input_examples") if tool.get(name)]:
            raise ApiError(400, f"tools[{number}]: {wrong[0]!r} is not supported; say it in 'description'")
    return [_function(tool) if tool.get("type") in (None, "custom") else tool for tool in given]


def _function(tool: dict[str, Any]) -> dict[str, Any]:
    rest = {name: value for name, value in tool.items() if name not in ("input_schema", "eager_input_streaming")}
    return {**rest, "type": "function", "parameters": tool.get("input_schema")}


def _messages(body: Any) -> list[Message]:
    given = body.get("messages")
    if not isinstance(given, list) or not given:
        raise ApiError(400, f"'messages' must be a list of at least one message, found {brief(given)}")
    messages: list[Message] = []
    if body.get("system"):
        messages.append({"role": "system", "content": text_of(body["system"], "'system'")})
    asked: list[str] = []
    """ids of the calls of tools in the last message"""
    for number, message in enumerate(given):
        where = f"messages[{number}]"
        role, content = role_of(message, _ROLES, where), message.get("content")
        refuse_unknown(message, ("role", "content"), where)
        blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
        if not isinstance(blocks, list):
            raise ApiError(400, f"{where}: 'content' must be a text or a list of blocks, found {brief(content)}")
        text = ""
        results = [block for block in blocks if role == "user" and _is_result(block)]
        ordered = iter(in_order(asked, [(id_of(block, "tool_use_id", where), block) for block in results], where))
        for place, block in enumerate(blocks):
            there = f"{where}.content[{place}]"
            if role == "user" and _is_result(block):
                _add(messages, role, text)
                text = ""
                messages.append({"role": "tool", "content": _result(next(ordered), there)})
            else:
                text = _with_block(text, block, role, there)
        calls = [block for block in blocks if role == "assistant" and block.get("type") == "tool_use"]
        asked = [id_of(block, "id", where) for block in calls]
        _add(messages, role, text, needed=not blocks or content == "")
    if messages[-1]["role"] == "assistant":
        raise ApiError(400, "the last message must not be the assistant's: an answer is not begun by its client")
    return messages


def _add(messages: list[Message], role: str, text: str, *, needed: bool = False) -> None:
    """Add a text to the messages; turns of one role that follow each other are one."""
    if messages and messages[-1]["role"] == role and text:
        messages[-1] = {"role": role, "content": f"{messages[-1]['content']}\n\n{text}".strip()}
    elif text or needed:
        messages.append({"role": role, "content": text})


def _with_block(text: str, block: Any, role: str, where: str) -> str:
    """The text of a message with one more block. Raises ApiError (400)."""
    kind = block.get("type") if isinstance(block, dict) else None
    if kind == "text":
        return text + text_of([block], where)
    if kind == "tool_use" and role == "assistant":
        if not isinstance(block.get("input"), dict):
            raise ApiError(400, f"{where}: 'input' must be an object, found {brief(block.get('input'))}")
        refuse_unknown(block, ("type", "id", "name", "input", "cache_control", "caller"), where)
        return f"{text}\n{written_call(block.get('name'), block['input'], where)}".strip()
    if kind == "thinking" and role == "assistant":
        thought = text_of(block.get("thinking"), f"{where}.thinking", needed=True)
        return text + thought_before(thought)
    known = "text, tool_use or thinking" if role == "assistant" else "text or tool_result" if role == "user" else "text"
    found = brief(block if kind is None else kind)
    raise ApiError(400, f"{where} must be a block of type {known}, found {found}; images and files are not supported")


def _is_result(block: Any) -> bool:
    return isinstance(block, dict) and block.get("type") == "tool_result"


def _result(block: Any, where: str) -> str:
    refuse_unknown(block, ("type", "tool_use_id", "content", "is_error", "cache_control"), where)
    text = text_of(block.get("content"), where)
    return f"Error: {text}" if Fields(block).flag("is_error") else text


# ------------------------------------------------------------------------------------------------------ writing answers


def _content(call: ChatCall, reply: ChatReply) -> list[dict[str, Any]]:
    """The blocks of an answer."""
    thought, text = leading_thought(reply.text) if _thinks(call.request) else ("", reply.text)
    words, calls = parts_of(call, replace(reply, text=text))
    blocks: list[dict[str, Any]] = []
    if thought:
        blocks.append({"type": "thinking", "thinking": thought, "signature": SIGNATURE})
    if words or not calls:
        blocks.append({"type": "text", "text": words, "citations": None})
    for tool_call in calls:
        name = f"toolu_{uuid.uuid4().hex[:24]}"
        blocks.append(
            {"type": "tool_use", "id": name, "name": tool_call.name, "input": json.loads(tool_call.arguments)}
        )
    return blocks


def _head(call: ChatCall, content: list[dict[str, Any]]) -> dict[str, Any]:
    name = f"msg_{uuid.uuid4().hex[:24]}"
    return {"id": name, "type": "message", "role": "assistant", "model": call.model, "content": content}


def _end(content: list[dict[str, Any]], reply: ChatReply) -> dict[str, Any]:
    """Why an answer ended."""
    reason = "max_tokens" if reply.cut else "stop_sequence" if reply.stopped else "end_turn"
    calls = content[-1]["type"] == "tool_use"
    return {"stop_reason": "tool_use" if calls else reason, "stop_sequence": None if calls else reply.stopped or None}


def _usage(reply: ChatReply) -> dict[str, int]:
    cache = {"cache_creation_input_tokens": 0, "cache_read_input_tokens": 0}
    return {"input_tokens": reply.prompt_tokens, "output_tokens": reply.completion_tokens, **cache}


class _MessageEvents:
    """An answer as typed events: one block after the other."""

    def __init__(self, call: ChatCall) -> None:
        self._call, self._thinks = call, _thinks(call.request)
        self._raw = ""
        self._sent = {"thinking": "", "text": ""}
        self._open = ""
        """the type of the block that has begun and not ended"""
        self._place = -1
        """of the last block"""

    def begin(self) -> str:
        start = {**_head(self._call, []), "stop_reason": None, "stop_sequence": None, "usage": _usage(ChatReply(""))}
        return self._event("message_start", message=start)

    def piece(self, text: str) -> str:
        self._raw += text
        if self._thinks:
            thought, words = _certain(self._raw)
            if not words:
                return self._more("thinking", thought)
            self._raw, self._thinks = words, False
            return self._more("thinking", thought) + self._more("text", words)
        return self._more("text", self._raw)

    def end(self, reply: ChatReply) -> Iterator[str]:
        content = _content(self._call, reply)
        for block in content:
            kind = block["type"]
            if kind != "tool_use":
                yield self._more(kind, block[kind], needed=True)
                continue
            yield self._begin_block({**block, "input": {}})
            yield self._delta("input_json_delta", partial_json=json.dumps(block["input"], ensure_ascii=False))
        yield self._end_block()
        yield self._event("message_delta", delta=_end(content, reply), usage=_usage(reply))
        yield self._event("message_stop")

    def failed(self, error: ApiError) -> str:
        return f"event: error\ndata: {json.dumps(MESSAGES.error(error), ensure_ascii=False)}\n\n"

    def _more(self, kind: str, whole: str, *, needed: bool = False) -> str:
        """The events of what a block's text is longer than what was sent."""
        rest, events = whole[len(self._sent[kind]) :], ""
        if (rest or needed) and self._open != kind and not self._sent[kind]:
            empty = {"citations": None} if kind == "text" else {"signature": ""}
            events = self._begin_block({"type": kind, kind: "", **empty})
        self._sent[kind] = whole
        return events + (self._delta(f"{kind}_delta", **{kind: rest}) if rest else "")

    def _begin_block(self, block: dict[str, Any]) -> str:
        ended = self._end_block()
        self._place, self._open = self._place + 1, block["type"]
        return ended + self._event("content_block_start", index=self._place, content_block=block)

    def _end_block(self) -> str:
        if not self._open:
            return ""
        signed = self._delta("signature_delta", signature=SIGNATURE) if self._open == "thinking" else ""
        self._open = ""
        return signed + self._event("content_block_stop", index=self._place)

    def _delta(self, kind: str, **more: Any) -> str:
        return self._event("content_block_delta", index=self._place, delta={"type": kind, **more})

    @staticmethod
    def _event(kind: str, **more: Any) -> str:
        return f"event: {kind}\ndata: {json.dumps({'type': kind, **more}, ensure_ascii=False)}\n\n"


def _certain(raw: str) -> tuple[str, str]:
    """Thought and words of the beginning of an answer, as far as what follows cannot change them."""
    begun = raw.lstrip()
    form = next((form for form in TAGS if begun.startswith(form.opening)), None)
    if form is not None and form.closing not in begun:
        return begun[len(form.opening) : 1 - len(form.closing)].strip(), ""  # the end may be a part of the closing tag
    # A prompt may have opened the thought, so that nothing is certain before its end, and what stands behind that.
    return leading_thought(begun) if form or any(one.closing in begun[:-1] for one in TAGS) else ("", "")


MESSAGES = Messages()
