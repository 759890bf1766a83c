"""Chats of other libraries as messages of a role and a text: what their other fields say is written into the text.

TRL and the services of model makers keep a call of a tool in `tool_calls`, a thought in `reasoning_content`, and the
schemas of tools in a field `tools` of the record.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from mafrt.core.errors import DataError
from mafrt.core.text import brief
from mafrt.environment.chat_api.protocol import ApiError, text_of, thought_of, tool_calls_of, with_calls
from mafrt.rollout.prompts import TOOLS

_THOUGHTS = ("reasoning_content", "reasoning", "thinking")
_ROLES = {"developer": "system", "function": "tool"}
_SPEAKS = frozenset({"tool_calls", "function_call", *_THOUGHTS})


def with_fields_in_text(where: str, record: Mapping[str, Any]) -> Mapping[str, Any]:
    """A record whose chats say in their texts what stood in fields of messages, and begin with the record's tools.

    Args:
        where: file and line.
        record: any; one without chats is given back as it is.

    Raises:
        DataError: such a field has a form that it cannot have.
    """
    ours = dict(record)
    chats = {name: value for name, value in ours.items() if _is_chat(value)}
    try:
        for name, chat in chats.items():
            ours[name] = [_in_text(message, f"{name}[{number}]") for number, message in enumerate(chat)]
    except ApiError as error:
        raise DataError(f"{where}: {error}") from None
    if not ours.get("tools"):
        return ours
    tools = {"role": TOOLS, "content": json.dumps(_schemas(where, ours.pop("tools")), ensure_ascii=False)}
    if isinstance(ours.get("prompt"), str):
        ours["messages"] = [tools, {"role": "user", "content": ours.pop("prompt")}]
    # Pairs without a prompt of their own have it in both chats.
    for name in [name for name in ("prompt", "messages") if name in chats] or chats:
        ours[name] = [tools, *ours[name]]
    return ours


def _is_chat(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(m, dict) and "role" in m for m in value)


def _in_text(message: Mapping[str, Any], where: str) -> dict[str, Any]:
    role = message["role"]
    ours = {**message, "role": _ROLES.get(role, role) if isinstance(role, str) else role}
    spoken = {name for name in _SPEAKS if message.get(name)}
    if not spoken and (isinstance(message.get("content"), str) or "content" not in message):
        return ours
    text = thought_of(message, _THOUGHTS, where) + text_of(message.get("content"), where, needed=not spoken)
    return {**ours, "content": with_calls(text, tool_calls_of(message, where, bare=True), where)}


def _schemas(where: str, tools: Any) -> list[Any]:
    if isinstance(tools, str):
        try:
            tools = json.loads(tools)
        except (ValueError, RecursionError):
            raise DataError(f"{where}: 'tools' must be a list of schemas, or that as JSON") from None
    if not isinstance(tools, list):
        raise DataError(f"{where}: 'tools' must be a list of schemas, found {brief(tools)}")
    return tools
