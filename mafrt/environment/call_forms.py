"""The ways in which model families write tool calls, as small readers of one form each.

A call stands behind an opening mark, most often within a pair of tags (`TAGS`), and its beginning tells how it is
written (`READERS`):

    JSON             {"name": N, "arguments": {...}}                    Hermes, Qwen, Llama 3, Mistral, Granite, Phi ...
    functions        <function=N><parameter=K>V</parameter></function>  Qwen3-Coder, Qwen3.5, Nemotron, Seed-OSS
    invocations      <invoke name="N"><parameter name="K">V</parameter></invoke>        MiniMax M2, DeepSeek V3.2, Step3
    keys and values  N<arg_key>K</arg_key><arg_value>V</arg_value>                                        GLM, Hunyuan
    headers          N<separator>{...}                                       DeepSeek V3, Kimi K2, Mistral, Functionary
    braces           call:N{K:<|"|>V<|"|>}                                                                Gemma 3n and 4
    nested tags      <invoke name="N"><K><item>V</item></K></invoke>, ]<]minimax[>[ before each          MiniMax M3
    open and close   <|open|>call tool="N"<|sep|><|open|>argument key="K"<|sep|>V<|close|>argument<|sep|>        Kimi K3
    Python           N(K=V), [N(K=V), ...]                                               Llama 4, Olmo 3, Gemma 3, LFM2

Values in tags are texts; the tool's schema tells their types (`with_types`). Forms that are
written with special tokens are read without them too, since servers drop these.

Sources: the chat templates of the families, and the tool parsers of vLLM and of `renderers`, for the forms.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from mafrt.environment.bare_calls import (
    BAD,
    FORM,
    PYTHONIC,
    BadCall,
    Call,
    ToolCall,
    brief_line,
    calls_of,
    python_calls,
)
from mafrt.environment.call_values import (
    DECODER,
    Unreadable,
    balanced,
    read_object,
    read_value,
    skip_blanks,
    value_or_text,
)


@dataclass(frozen=True)
class Found:
    """The calls behind an opening mark."""

    calls: tuple[Call, ...]
    end: int
    """where the text goes on"""
    open: str = ""
    """the part that is not closed, if there is one"""


# ---------------------------------------------------------------------------------------------------------- the marks

TAGS: tuple[tuple[str, str], ...] = (
    # <tool_call>, <tool_calls>, <function_call>, <TOOLCALL>, <minimax:tool_call>, <longcat_tool_call> ...
    (
        r"<(?P<tag>(?:[\w.-]+[:|]|｜DSML｜)?(?:\w+_)?(?:tool|function)_?(?:call|use)s?(?::[\w.-]+)?)(?:\s[^<>\n]*)?>",
        r"</(?i:{tag})>",
    ),
    (r"<(?P<start>start_function_call)>", r"<end_function_call>"),
    (r"\]<\]minimax\[>\[<tool_call>", r"\]<\]minimax\[>\[</tool_call>"),
    (r"<\|tool_calls\|>", r"<\|calls\|>"),
    (r"<\|tool_call:begin\|>", r"<\|tool_call:end\|>"),
    (r"<\|tool_call>", r"<tool_call\|>"),
    (r"<\|tool_call\|>", r"<\|/tool_call\|>"),
    (r"<\|tool_call_start\|>", r"<\|tool_call_end\|>"),
    (r"<\|tool_calls?_section_begin\|>", r"<\|tool_calls?_section_end\|>"),
    (r"<\|open\|>tools<\|sep\|>", r"<\|close\|>tools<\|sep\|>"),
    (r"<\|tool_call_begin\|>", r"<\|tool_call_end\|>"),
    (r"<\|tools_prefix\|>", r"<\|tools_suffix\|>"),
    (r"<\|action_start\|>", r"<\|action_end\|>"),
    (r"<\|START_ACTION\|>", r"<\|END_ACTION\|>"),
    (r"<\|python_start\|>", r"<\|python_end\|>"),
    (r"<｜tool[▁_]calls[▁_]begin｜>", r"<｜tool[▁_]calls[▁_]end｜>"),
    (r"<｜tool[▁_]call[▁_]begin｜>", r"<｜tool[▁_]call[▁_]end｜>"),
    # Closed by the end of the message.
    (r"\[TOOL_CALLS\]", ""),
    (r"<\|function_call\|>", ""),
    (r"\bfunctools(?=\s*\[)", ""),
    (r"<\|python_tag\|>", ""),
)
"""Opening and closing mark; a mark in the text is a call only if one can be read behind it."""
_BARE = (
    r"<function(?:=|\s+name=)[^>\n]+>",
    r"<(?:[\w｜]+:|｜DSML｜)?invoke\s+name=[^>\n]+>",
    r"<\|(?:open|close)\|>(?:call|response|message)\b[^<\n]{0,200}<\|sep\|>",
    r"<\|(?:START|END)_(?:RESPONSE|TEXT)\|>",
    r"\[END FINAL RESPONSE\]",
    r"<\|begin\|>assistant",
    r"<\|(?:content|calls|eom|eot)\|>",
    r"(?:<\|start\|>assistant\s?)?(?<!\w)to=[\w.\-]+<\|message\|>",
    r"(?<![\w.])functions\.[\w.\-/]+:\d+\s{0,3}(?=\"?\{)",
    r"(?:assistant)?(?:commentary|analysis)?\s{0,2}to=functions\.[\w.\-]+\s{0,3}(?:json|code)?\s{0,3}(?=\{)",
    r"(?:^|assistant|(?<=assistant))(?:(?:commentary|analysis)\s?to=|\s?to=[\w.]+?(?:commentary|analysis))",
    r"(?:response)?(?:tools)?call\s+tool=\"[^\"<\n]+\"(?:\s+\w+=\"[^\"<\n]*\")*\s*(?=argument\s+key=|call)",
    r"^[A-Za-z_][\w.\-/]*(?:\[CALL_ID\]\w*+)?(?:\[ARGS\])?(?=\{\s*\"[^\"\n]*\"\s*:|\{\}\s*$)",
    r"^assistant\n[A-Za-z_][\w.\-/]*\n(?=\{)",
    r"^function[A-Za-z_][\w.\-/]*\n```json\n(?=\{)",
    r"^call:[\w.\-/]+(?=\{)",
    r"<\|recipient\|>",
    r">>>(?!all\n)[\w.\-/]+\n(?=\s*\{)|>>>(?:python|all)\n",
    r"^Action:[ \t]*[\w.\-/]+[ \t]*\nAction Input:",
    r"(?:<\|start\|>assistant)?(?:\s{0,2}to=[\w.\-]+)?<\|channel\|>[^<]{0,200}<",
    r"<\|(?:end|return)\|>",
    r"<\|start\|>assistant",
)
OPENING = "|".join(re.sub(r"\(\?P<\w+>", "(?:", mark) for mark in (*(opening for opening, _ in TAGS), *_BARE))
"""Pattern of everything that may begin a call."""
_OPENINGS = tuple((re.compile(opening, re.IGNORECASE), closing) for opening, closing in TAGS)
_INNER = re.compile(
    r"(?:[\s,;]+|```(?:json)?(?=\s|<|$)|</?tool_calls?(?::[\w.-]+)?>|<\|?/?tool_call(?:[_:]begin|[_:]end)?\|>"
    r"|<｜tool[▁_]call[▁_](?:begin|end)｜>|<\|(?:plugin|interpreter|call|eom_id)\|>|function<｜tool[▁_]sep｜>(?=\s*<))"
)
"""Text between the calls of a pair of tags."""
_MOST_DEEP = 50
"""Tags within each other in one call."""
_MOST_BETWEEN = 20
"""Pieces of it from one call to the next; where marks alone follow each other, each would be read with all others."""
_HARMONY_CALL = re.compile(
    r"(?:<\|start\|>assistant)?\s*(?:to=(?P<before>[\w.\-]+))?\s*<\|channel\|>\s*(?:analysis|commentary)\s*"
    r"(?:to=(?P<after>[\w.\-]+))?\s*(?:<\|constrain\|>)?\s*(?P<kind>\w*)\s*<\|message\|>"
)
_BARE_HARMONY = re.compile(
    r"(?:assistant)?(?:commentary|analysis)?\s*to=functions\.(?P<name>[\w.\-]+?)(?:commentary|analysis)?\s*(?:json|code)?"
    r"\s*(?=\{)"
    r"|(?:assistant)?(?:(?:commentary|analysis)\s?to=(?P<tool>python|[\w.\-]+)|\s?to=(?P<other>[\w.\-]+?)(?:commentary|analysis))"
    r"\s?(?:json|code)?"
)
"""The same where the special tokens were dropped."""
_HARMONY_END = re.compile(r"<\|(?:call|end|return|start)\|>")
_BARE_HARMONY_END = re.compile(r"assistant(?=\s?(?:final|commentary|analysis|to=))")
_FUNCTIONARY = re.compile(
    r"<\|recipient\|>\s*(?P<name>[\w.\-/]+)\s*<\|content\|>|>>>(?P<short>[\w.\-/]+)\n"
    r"|Action:[ \t]*(?P<action>[\w.\-/]+)[ \t]*\nAction Input:",
    re.MULTILINE,
)


_FUNCTIONARY_END = re.compile(r">>>(?=[\w.\-/]+\n)|<\|(?:eot_id|eom_id|stop|from)\|>|<\|call\|>")


def read_form(text: str, start: int) -> Found | None:
    """The calls behind the opening mark at `start`; None if the mark is only mentioned."""
    if header := _HARMONY_CALL.match(text, start):
        return _harmony(text, header, header["after"] or header["before"])
    if header := _BARE_HARMONY.match(text, start):
        return _harmony(text, header, header["name"] or header["tool"] or header["other"], _BARE_HARMONY_END)
    if header := _FUNCTIONARY.match(text, start):
        name = header["name"] or header["short"] or header["action"]
        return None if name == "all" else _to(name, text, header.end(), _FUNCTIONARY_END)
    for opening, closing in _OPENINGS:
        if mark := opening.match(text, start):
            close = closing.format(tag=re.escape(mark["tag"])) if "{tag}" in closing else closing
            return _within(text, mark, close)
    return _within(text, re.compile("").match(text, start), "")


def _within(text: str, mark: Any, closing: str) -> Found | None:
    """The calls between a pair of tags; None if these are only mentioned."""
    close = re.compile(closing) if closing else None
    calls: list[Call] = []
    place, between = mark.end(), 0
    while True:
        if close is not None and (ended := close.match(text, place)):
            if not calls:
                return Found((BadCall(f"{BAD}the tool call is empty; {FORM}."),), ended.end())
            return Found(tuple(calls), ended.end())
        if between < _MOST_BETWEEN and (inner := _INNER.match(text, place)):
            place, between = inner.end(), between + 1
            continue
        try:
            read = next((found for reader in READERS if (found := reader(text, place, close)) is not None), None)
        except Unreadable as error:
            return _unreadable(text, place, close, mark, str(error))
        if read is None:
            break
        calls += read[0]
        place, between = read[1], 0
    if mark[0] == "<|python_tag|>" and (not calls or any(isinstance(call, BadCall) for call in calls)):
        code = text[mark.end() :].removesuffix("<|eom_id|>").strip()
        given = value_or_text(code)
        arguments = given if isinstance(given, dict) and isinstance(given.get("code"), str) else {"code": code}
        if code and (arguments is given or not code.startswith("{")):
            return Found((ToolCall("python", arguments),), len(text))
    if calls:
        rest = close.search(text, place) if close is not None else None
        if rest is not None and text[place : rest.start()].strip():
            why = f"{BAD}the tool call is not JSON alone (there is more text in its tags)."
            return Found((BadCall(why),), rest.end())
        # The end of the text closes as well, if the call itself is whole.
        if close is None or not text[place:].strip() or re.compile(OPENING, re.IGNORECASE).match(text, place):
            return Found(tuple(calls), place)
        return Found((), len(text), _not_closed(mark, closing))
    return _mentioned(text, mark, close, closing)


def _mentioned(text: str, mark: Any, close: re.Pattern[str] | None, closing: str) -> Found | None:
    """A mark behind which no call can be read: words about it, or a call that went wrong."""
    if close is None:
        return None
    ended = close.search(text, mark.end())
    line = text.rfind("\n", 0, mark.start()) + 1
    leads = not text[line : mark.start()].strip()
    if ended is None:
        # Cut where a call would begin.
        cut = leads and text[mark.end() :].lstrip()[:1] in ("", "{", "[", "<")
        return Found((), len(text), _not_closed(mark, closing)) if cut else None
    inside = text[mark.end() : ended.start()]
    if not leads and not re.search(r"[{}\[\]()=:<>\"]", inside):
        return None
    return Found((BadCall(f"{BAD}the tool call is not JSON (found {brief_line(inside)}); {FORM}."),), ended.end())


def _unreadable(text: str, place: int, close: re.Pattern[str] | None, mark: Any, why: str) -> Found:
    ended = close.search(text, place) if close is not None else None
    if close is not None and ended is None:
        return Found((), len(text), _not_closed(mark, close.pattern))
    return Found((BadCall(f"{BAD}{why}."),), ended.end() if ended else len(text))


def _not_closed(mark: Any, closing: str) -> str:
    plain = f"</{mark['tag']}>" if "tag" in mark.re.groupindex else re.sub(r"\\(.)|\(\?i:|\)", r"\1", closing)
    return f"a tool call is not closed with {plain}"


# -------------------------------------------------------------------------------------------------------- the readers

Read: TypeAlias = "tuple[list[Call], int] | None"
"""Calls, and where the text goes on; None if this is another form."""
Closing: TypeAlias = "re.Pattern[str] | None"

_FUNCTION = re.compile(
    r"<(?P<tag>function|(?:\w+:|｜DSML｜)?invoke)(?:=|\s+name=)\s*[\"']?(?P<name>[^>\"'\n]+?)[\"']?\s*>"
)
_PARAMETER = re.compile(
    r"<(?P<tag>(?:[\w]+:|｜DSML｜)?param(?:eter)?)(?:=|\s+name=)\s*[\"']?(?P<key>[^>\"'\n]+?)[\"']?"
    r"(?:\s+string=\"(?P<string>true|false)\")?(?:\s+[\w]+=\"[^\"]*\")*\s*>"
)
_ARG = re.compile(
    r"<(?P<space>\w*\|?)arg_key(?P<suffix>:[\w.-]+)?>\s*(?P<key>.*?)\s*</(?P=space)arg_key(?P=suffix)?>", re.DOTALL
)
_GLM = re.compile(r"(?P<name>[\w.\-/:]+)(?:\s*<tool_sep(?::[\w.-]+)?>)?\s*(?=<(?:\w*\|)?arg_key)")
_SEPARATOR = re.compile(r"<tool_sep(?::[\w.-]+)?>")
_NAME = re.compile(r"(?P<name>[A-Za-z_][\w.\-/]*)")
_HEADER = re.compile(
    r"(?:assistant\n|[\w.:-]*<\|tool_call:name\|>|function(?:<｜tool[▁_]sep｜>|(?=[\w.\-/]+\n```)))?(?:functions\.)?(?P<name>[A-Za-z_][\w.\-/]*)(?::\d+)?"
    r"(?:\[CALL_ID\]\w*+)?"
    r"(?:\s|<\|tool_call:args\|>|<｜tool[▁_]sep｜>|<tool_sep(?::[\w.-]+)?>|<\|tool_call_argument_begin\|>|\[ARGS\]|```(?:json)?)*(?=\"?\{)"
)
_BRACES = re.compile(r"call:(?P<name>[\w.\-/]+)(?=\{)")


def _json(text: str, place: int, close: Closing) -> Read:
    if text[place : place + 1] not in ("{", "["):
        return None
    if PYTHONIC.match(text, place) or text.startswith("[TOOL_CALLS]", place):
        return None
    value, end = read_value(text, place)
    return calls_of(value, tagged=True), end


def _tagged(text: str, place: int, close: Closing) -> Read:
    mark = _FUNCTION.match(text, place)
    if mark is None:
        return None
    ends = f"</{mark['tag']}>"
    return _parameters(
        text, mark["name"].strip(), mark.end(), ends, rf"{re.escape(ends)}|<{mark['tag']}\b|</\w*_?tool_call"
    )


def _parameters(text: str, name: str, place: int, ends: str, follows: str) -> Read:
    """The values in tags, up to `ends`. A value may hold tags: it ends where another value or the end follows."""
    arguments: dict[str, Any] = {}
    while True:
        place = skip_blanks(text, place)
        if text.startswith(ends, place):
            return [ToolCall(name, arguments, texts=True)], place + len(ends)
        if not arguments and (found := read_object(text, place)) is not None:
            value, place = found
            place = skip_blanks(text, place)
            if not isinstance(value, dict) or not (text.startswith(ends, place) or not text[place:].strip()):
                raise Unreadable(f"the call of {name!r} holds more than one JSON object")
            return [ToolCall(name, value)], min(place + len(ends), len(text))
        mark = _PARAMETER.match(text, place)
        if mark is None:
            # Qwen leaves the end of the function out at times, never that of a value.
            if arguments and (not text[place:].strip() or text.startswith("</", place)):
                return [ToolCall(name, arguments, texts=True)], place
            if not arguments and text.find(ends, place) < 0:
                return None  # words about the tag
            raise Unreadable(
                f"the call of {name!r} is not closed with {ends}, or holds {brief_line(text[place : place + 60])}"
            )
        tag = re.escape(mark["tag"])
        ended = re.compile(rf"</{tag}>(?=\s*(?:<{tag}[\s=]|{follows}|\Z))").search(text, mark.end())
        if ended is None:
            raise Unreadable(f"the argument {mark['key']!r} of {name!r} is not closed with </{mark['tag']}>")
        value = text[mark.end() : ended.start()]
        # MiniCPM 5 quotes as XML does.
        value = re.sub(r"\A\s*<!\[CDATA\[(.*)\]\]>\s*\Z", r"\1", value, flags=re.DOTALL)
        if value.startswith("\n"):  # Qwen puts the value on lines of its own
            value = value[1:].removesuffix("\n")
        if mark["string"] == "false":
            value = value_or_text(value)
        _put(arguments, mark["key"].strip(), value, name)
        place = ended.end()


_NESTED = re.compile(
    r"(?P<mark>(?:\]<\]minimax\[>\[)?)<invoke name=\"(?P<name>[^\">\n]+)\">(?=\s*(?P=mark)<(?!param|/?invoke)|\]<)"
)
_NESTED_TAG = re.compile(r"<(?P<end>/?)(?P<key>[^<>\s]+)>")


def _nested(text: str, place: int, close: Closing) -> Read:
    """MiniMax M3's: a tag for every key, objects and lists as tags within it."""
    mark = _NESTED.match(text, place)
    if mark is None:
        return None
    sign = mark["mark"]
    if not sign and text.find("</invoke>", mark.end()) < 0:
        return None  # words about the tag
    tags = re.compile(re.escape(sign) + _NESTED_TAG.pattern)
    stack: list[tuple[str, list[tuple[str, Any]]]] = [("invoke", [])]
    begun = place = mark.end()
    while tag := tags.search(text, place):
        place = tag.end()
        key, inside = stack[-1]
        if (key == "invoke" or inside) and text[begun : tag.start()].strip():
            raise Unreadable(f"the call of {mark['name']!r} holds {brief_line(text[begun : tag.start()])}")
        if tag["end"] and tag["key"] == key:
            if key == "invoke" and len(stack) == 1:
                arguments: dict[str, Any] = {}
                for name, value in inside:
                    _put(arguments, name, value, mark["name"])
                return [ToolCall(mark["name"], arguments, texts=True)], place
            stack.pop()
            stack[-1][1].append((key, _holds(inside) if inside else text[begun : tag.start()]))
            begun = place
        # Without the signs a value's own tags look the same: those that do not stand at its beginning are its text.
        elif not tag["end"] and (sign or not text[begun : tag.start()].strip()) and len(stack) < _MOST_DEEP:
            stack.append((tag["key"], []))
            begun = place
    raise Unreadable(f"the call of {mark['name']!r} is not closed with {sign}</invoke>")


def _holds(inside: list[tuple[str, Any]]) -> Any:
    return [value for _, value in inside] if all(key == "item" for key, _ in inside) else dict(inside)


def _keys_and_values(text: str, place: int, close: Closing) -> Read:
    mark = _GLM.match(text, place)
    if mark is None:
        alone = _NAME.match(text, place)
        # A call without arguments is the name alone, directly within its tags.
        if alone is None or close is None or (text[place - 1 : place].isspace() and text[place - 1] != "\n"):
            return None
        if separator := _SEPARATOR.match(text, alone.end()):
            return [ToolCall(alone["name"], {}, texts=True)], separator.end()
        ended = close.match(text, _skip_lines(text, alone.end()))
        return None if ended is None else ([ToolCall(alone["name"], {}, texts=True)], ended.start())
    arguments: dict[str, Any] = {}
    place = mark.end()
    while key := _ARG.match(text, skip_blanks(text, place)):
        space = re.escape(key["space"]) + "arg_value" + re.escape(key["suffix"] or "")
        closes = close.pattern if close is not None else r"</tool_call"
        opened = re.compile(rf"\s*(?:<\w*\|?arg_type>.*?</\w*\|?arg_type>\s*)?<{space}>", re.DOTALL).match(
            text, key.end()
        )
        ended = opened and re.compile(rf"</{space}>(?=\s*(?:<\w*\|?arg_key|</?\w*\|?tool_call|{closes}|\Z))").search(
            text, opened.end()
        )
        if not opened or not ended:
            raise Unreadable(f"the argument {key['key']!r} of {mark['name']!r} has no value in <arg_value>")
        _put(arguments, key["key"], text[opened.end() : ended.start()], mark["name"])
        place = ended.end()
    return [ToolCall(mark["name"], arguments, texts=True)], place


_OPEN_CALL = re.compile(
    r"(?P<marked><\|open\|>)?(?:(?:response)?(?:tools)?(?=call))?call\s+tool=\"(?P<name>[^\"<\n]+)\"(?:\s+\w+=\"[^\"<\n]*\")*"
    r"(?(marked)[^<\n]*<\|sep\|>|\s*(?=argument\s+key=|call))"
)
_OPEN_ARGUMENT = re.compile(
    r"(?P<marked><\|open\|>)?argument\s+key=\"(?P<key>[^\"<\n]+)\"(?:\s+type=\"(?P<type>[^\"<\n]*)\")?"
    r"(?(marked)[^<\n]*<\|sep\|>)(?P<value>.*?)(?(marked)<\|close\|>argument<\|sep\|>(?=\s*<\|(?:open\|>argument\s|close\|>call<))"
    r"|argument(?=\s*argument\s+key=|\s*call(?:\s|tools|message|call\s+tool=|\Z)))",
    re.DOTALL,
)
_OPEN_JSON = re.compile(r"\s*(?:<\|open\|>)?json type=\"object\"(?:<\|sep\|>)?\s*(?=\{)")
_CLOSE_CALL = re.compile(
    r"(?:(?:<\|close\|>)?json(?:<\|sep\|>)?\s*)?<\|close\|>call<\|sep\|>|call(?=\s|tools|message|call\s+tool=|\Z)(?:tools)?(?:message)?"
)


def _open_and_close(text: str, place: int, close: Closing) -> Read:
    """Kimi K3's, with its special tokens or without: values of any type but `string` are JSON."""
    mark = _OPEN_CALL.match(text, place)
    if mark is None:
        return None
    arguments: dict[str, Any] = {}
    place = mark.end()
    if whole := _OPEN_JSON.match(text, place):
        found = read_object(text, whole.end())
        arguments, place = found or ({}, place)
    while argument := _OPEN_ARGUMENT.match(text, skip_blanks(text, place)):
        value = argument["value"]
        _put(arguments, argument["key"], value if argument["type"] == "string" else value_or_text(value), mark["name"])
        place = argument.end()
    closed = _CLOSE_CALL.match(text, skip_blanks(text, place))
    if closed is None:
        raise Unreadable(f"the call of {mark['name']!r} is not closed with <|close|>call<|sep|>")
    return [ToolCall(mark["name"], arguments)], closed.end()


def _header(text: str, place: int, close: Closing) -> Read:
    mark = _HEADER.match(text, place)
    if mark is None:
        return None
    found = read_object(text, mark.end())
    if found is None:
        raise Unreadable(f"the arguments of {mark['name']!r} must be a JSON object")
    return [ToolCall(mark["name"], found[0])], found[1]


def _braces(text: str, place: int, close: Closing) -> Read:
    """Gemma's: keys bare, texts between marks of their own."""
    mark = _BRACES.match(text, place)
    if mark is None:
        return None
    if text.startswith("{{", mark.end()):  # the template puts arguments that are JSON between braces of its own
        value, end = read_value(text, mark.end() + 1)
        return [ToolCall(mark["name"], value)], end + text.startswith("}", end)
    pieces, end, depth = [], mark.end(), 0
    token = re.compile(
        r'<\|"\|>(?P<quoted>.*?)<\|"\|>|<escape>(?P<escaped>.*?)<escape>|(?P<string>"(?:[^"\\]|\\.)*")|(?P<sign>[{}\[\],:])'
        r"|(?P<word>[^\s{}\[\],:\"<]+)|\s+",
        re.DOTALL,
    )
    while part := token.match(text, end):
        end = part.end()
        literal = part["quoted"] if part["quoted"] is not None else part["escaped"]
        if literal is not None:
            pieces.append(json.dumps(literal))
        elif word := part["word"]:
            plain = re.fullmatch(r"-?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?|true|false|null", word)
            key = text[end : end + 1] == ":"
            # Gemma's template writes null as Python does.
            pieces.append("null" if word == "None" and not key else word if plain and not key else json.dumps(word))
        else:
            pieces.append(part["string"] or part["sign"] or "")
            depth += {"{": 1, "[": 1, "}": -1, "]": -1}.get(part["sign"] or "", 0)
            if not depth and part["sign"]:
                break
    try:
        value = DECODER.decode("".join(pieces))
    except (ValueError, RecursionError):
        raise Unreadable(
            f"the arguments of {mark['name']!r} cannot be read ({brief_line(text[mark.end() : end])})"
        ) from None
    return [ToolCall(mark["name"], value)], end


def _python(text: str, place: int, close: Closing) -> Read:
    if not PYTHONIC.match(text, place):
        return None
    if (found := python_calls(text, place)) is None:
        end = balanced(text, place)
        if end is None:
            raise Unreadable("the tool call does not end")
        raise Unreadable(
            f"the tool call is not JSON, and no call of Python with named arguments ({brief_line(text[place:end])})"
        )
    return found


READERS: tuple[Callable[[str, int, Closing], Read], ...] = (
    _json,
    _nested,
    _tagged,
    _open_and_close,
    _braces,
    _keys_and_values,
    _header,
    _python,
)


def _harmony(text: str, header: re.Match[str], name: str | None, ends: re.Pattern[str] | None = None) -> Found | None:
    """A message to a tool, as gpt-oss writes it."""
    return None if name is None or name == "user" else _to(name, text, header.end(), ends)


def _to(name: str, text: str, place: int, ends: re.Pattern[str] | None = None) -> Found:
    """A message to the tool `name`: arguments in JSON, or a program."""
    ended = (ends or _HARMONY_END).search(text, place)
    name = name.removeprefix("functions.")
    start = skip_blanks(text, place)
    end = ended.end() if ended and ended[0] == "<|call|>" else ended.start() if ended else len(text)
    try:
        found = read_object(text, start)
    except Unreadable as error:
        return Found((BadCall(f"{BAD}{error}."),), end)
    if found is not None:
        value, after = found
        following = _HARMONY_END.match(text, skip_blanks(text, after))
        after = following.end() if following and following[0] == "<|call|>" else after
        return Found((ToolCall(name, value),), after)
    body = text[place : ended.start() if ended else len(text)].strip()
    if name.partition(".")[0] in ("python", "browser", "container"):
        return Found((ToolCall(name, {"code": body}),), end)
    why = (
        f"the arguments of {name!r} must be a JSON object, found {brief_line(body)}"
        if body
        else f"{name!r} has no arguments"
    )
    return Found((BadCall(f"{BAD}{why}."),), end)


def _skip_lines(text: str, place: int) -> int:
    while place < len(text) and text[place] in "\r\n":
        place += 1
    return place


def _put(arguments: dict[str, Any], key: str, value: Any, name: str) -> None:
    if key in arguments:
        raise Unreadable(f"the argument {key!r} of {name!r} is given twice")
    arguments[key] = value
