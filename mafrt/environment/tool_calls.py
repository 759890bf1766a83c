"""Reading an agent's answer: thoughts removed, the tool call found, and a tool's output shortened.

Two ways to call a tool are understood, whichever comes last in the text:

    ```python                     <tool_call>
    print(3 + 4)                  {"name": "python", "arguments": {"code": "print(3 + 4)"}}
    ```                           </tool_call>

String work only: nothing that is read here is run. A malformed call is a `BadCall`, whose sentence
goes back to the agent in place of the tool's answer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mafrt.core.types import Message

THINK, THOUGHT = "<think>", "</think>"
OWN_MARKUP = frozenset((THINK, THOUGHT, "<tool_call>", "</tool_call>"))
PYTHON = "python"
"""The tool that fenced blocks call."""

_LANGUAGES = ("python", "python3", "py", "")
_CODE_TOOLS = ("python", "python3", "code", "code_interpreter", "execute_python", "run_python", "ipython")
_CODE_ARGUMENTS = ("code", "source", "program", "input")
# An opening fence, a closing one (no language), or a call's tags, each where it may stand.
_MARK = re.compile(r"^[ \t]*(```+)[ \t]*([\w+-]*)[^\n`]*$|(<tool_call>)|(</tool_call>)", re.MULTILINE)


@dataclass(frozen=True)
class ToolCall:
    """A tool that is to be used."""

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class BadCall:
    """A call that cannot be made; `why` is one sentence for the agent."""

    why: str


def visible(text: str, *, opened: bool = False) -> str:
    """`text` without its thoughts.

    `opened`: the prompt ended with `<think>`, so the text begins inside a thought. A thought that does not end takes
    everything after it along: half a thought is no answer. A lone `</think>` ends a thought that was
    opened before the text, whether `opened` says so or not.
    """
    kept, inside, place = [], opened, 0
    if not opened:
        first, last = text.find(THINK), text.find(THOUGHT)
        inside = last >= 0 and (first < 0 or last < first)
    while place < len(text):
        mark = THOUGHT if inside else THINK
        position = text.find(mark, place)
        end = len(text) if position < 0 else position
        if not inside:
            kept.append(text[place:end])
        if position < 0:
            break
        place, inside = position + len(mark), not inside
    whole = "".join(kept)
    return whole.strip() if opened or THINK in text or THOUGHT in text else whole


def find_call(text: str) -> ToolCall | BadCall | None:
    """The last tool call of `text`, None if it makes none."""
    calls = marked_calls(text)
    return calls[-1] if calls else None


def find_calls(text: str, fences: bool = True) -> list[ToolCall | BadCall]:
    """All tool calls of a text without its thoughts, for agents that have several tools.

    `<tool_call>` tags and, with `fences`, fenced Python count, else a text that is one JSON call or a list of them, as
    the chat templates of Llama 3 and Mistral have it.
    """
    said = visible(text)
    if calls := marked_calls(said, fences):
        return calls
    bare = said.strip().removeprefix("<|python_tag|>").removeprefix("[TOOL_CALLS]").strip()
    if not bare.startswith(("{", "[")):
        return []
    try:
        value = json.loads(bare)
    except (ValueError, RecursionError):
        return []
    entries = value if isinstance(value, list) else [value]
    meant = all(isinstance(e, dict) and "name" in e and ("arguments" in e or "parameters" in e) for e in entries)
    return [_from_json(json.dumps(entry)) for entry in entries] if meant else []


def marked_calls(text: str, fences: bool = True) -> list[ToolCall | BadCall]:
    """The calls in tags and fences, in order. One that is not closed replaces all of them: nothing is run."""
    calls: list[ToolCall | BadCall] = []
    opened: re.Match[str] | None = None
    for mark in _MARK.finditer(text):
        fence, language, call, call_end = mark.groups()
        if fence and not fences:
            continue
        if opened is None:
            if fence or call:
                opened = mark
        elif fence and opened[1] and not language and len(fence) >= len(opened[1]):
            if opened[2].lower() in _LANGUAGES:
                calls.append(ToolCall(PYTHON, {"code": text[opened.end() + 1 : mark.start()]}))
            opened = None
        elif call_end and opened[3]:
            calls.append(_from_json(text[opened.end() : mark.start()]))
            opened = None
    if opened is not None and (opened[3] or opened[2].lower() in _LANGUAGES):
        problem = "a tool call is not closed with </tool_call>" if opened[3] else "a code block is not closed with ```"
        return [BadCall(f"Nothing was run: {problem}.")]
    return calls


def code_of(call: ToolCall) -> str | BadCall:
    """The program that a call of the Python tool carries."""
    if call.name.lower() not in _CODE_TOOLS:
        return BadCall(f"Nothing was run: there is no tool {call.name!r}; there is {PYTHON!r}.")
    code = next((call.arguments[name] for name in _CODE_ARGUMENTS if name in call.arguments), None)
    if not isinstance(code, str) or not code.strip():
        has = ", ".join(map(repr, call.arguments)) or "none"
        return BadCall(f"Nothing was run: the tool {PYTHON!r} needs a program as its argument 'code', found {has}.")
    return code


def find_code(text: str) -> str | BadCall | None:
    """The program that `text` wants to be run: `find_call` and `code_of` in one."""
    call = find_call(text)
    return code_of(call) if isinstance(call, ToolCall) else call


def shorten(text: str, limit: int = 2000) -> str:
    """At most about `limit` characters of `text`, from both ends: a traceback ends with its cause."""
    if len(text) <= limit:
        return text
    head, tail = limit // 2, limit - limit // 2
    return f"{text[:head]}\n[... {len(text) - limit} characters left out ...]\n{text[-tail:]}"


def tool_message(output: str) -> Message:
    """The tool's answer as the chat template's tool message."""
    return {"role": "tool", "content": output}


def _from_json(text: str) -> ToolCall | BadCall:
    try:
        return _call(json.loads(text))
    except (ValueError, RecursionError) as error:
        return BadCall(f"Nothing was run: the tool call is not JSON ({str(error).splitlines()[0]}).")


def _call(said: Any) -> ToolCall | BadCall:
    """A call from its JSON value. Raises ValueError for arguments that are a text and not JSON."""
    arguments = said.get("arguments", said.get("parameters", {})) if isinstance(said, dict) else None
    if isinstance(arguments, str):  # some models write the arguments as a JSON text of its own
        arguments = json.loads(arguments)
    if not isinstance(said, dict) or not isinstance(said.get("name"), str) or not isinstance(arguments, dict):
        return BadCall('Nothing was run: a tool call is {"name": ..., "arguments": {...}}, found something else.')
    return ToolCall(said["name"], arguments)
