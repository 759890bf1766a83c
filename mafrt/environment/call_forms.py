"""The ways in which model families write tool calls, as small readers of one form each.

A call stands behind an opening mark, most often within a pair of tags (`TAGS`), and its beginning tells how it is
written (`READERS`):

    JSON             {"name": N, "arguments": {...}}                    Hermes, Qwen, Llama 3, Mistral, Granite, Phi ...
    functions        <function=N><parameter=K>V</parameter></function>  Qwen3-Coder, Qwen3.5, Nemotron, Seed-OSS
    invocations      <invoke name="N"><parameter name="K">V</parameter></invoke>        MiniMax M2, DeepSeek V3.2, Step3
    keys and values  N<arg_key>K</arg_key><arg_value>V</arg_value>                                        GLM, Hunyuan
    headers          N<separator>{...}                                       DeepSeek V3, Kimi K2, Mistral, Functionary
    braces           call:N{K:<|"|>V<|"|>}                                                                Gemma 3n and 4
    open and close   <|open|>call tool="N"<|sep|><|open|>argument key="K"<|sep|>V<|close|>argument<|sep|>        Kimi K3
    Python           N(K=V), [N(K=V), ...]                                               Llama 4, Olmo 3, Gemma 3, LFM2

Values in tags are texts; the tool's schema tells their types (`with_types`). The forms of gpt-oss and Kimi K2 are read
without their special tokens too, which servers drop.

Sources: the chat templates of the families, and the tool parsers of vLLM and of `renderers`, for the forms.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

BAD = "Nothing was run: "
FORM = 'a tool call is {"name": ..., "arguments": {...}}'


@dataclass(frozen=True)
class ToolCall:
    """A tool that is to be used."""

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    texts: bool = field(default=False, compare=False)
    """Whether the form writes all values as texts, so that only the tool's schema knows their types."""


@dataclass(frozen=True)
class BadCall:
    """A call that cannot be made; `why` is one sentence for the agent."""

    why: str


Call: TypeAlias = "ToolCall | BadCall"


@dataclass(frozen=True)
class Found:
    """The calls behind an opening mark."""

    calls: tuple[Call, ...]
    end: int
    """where the text goes on"""
    open: str = ""
    """the part that is not closed, if there is one"""


class Unreadable(ValueError):
    """A call that is begun and cannot be read; the text is the reason."""


# ---------------------------------------------------------------------------------------------------------- the marks

TAGS: tuple[tuple[str, str], ...] = (
    # <tool_call>, <tool_calls>, <function_call>, <TOOLCALL>, <minimax:tool_call>, <longcat_tool_call> ...
    (
        r"<(?P<tag>(?:[\w.-]+[:|]|｜DSML｜)?(?:\w+_)?(?:tool|function)_?(?:call|use)s?(?::[\w.-]+)?)(?:\s[^<>\n]*)?>",
        r"</(?i:{tag})>",
    ),
    (r"<(?P<start>start_function_call)>", r"<end_function_call>"),
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
    r"<\|(?:open|close)\|>(?:call|think|response|message)\b[^<\n]{0,200}<\|sep\|>",
    r"(?<![\w.])functions\.[\w.\-/]+:\d+\s{0,3}(?=\{)",
    r"(?:assistant)?(?:commentary|analysis)?\s{0,2}to=functions\.[\w.\-]+\s{0,3}(?:json|code)?\s{0,3}(?=\{)",
    r"(?:^|assistant|(?<=assistant))(?:(?:commentary|analysis)\s?to=|\s?to=[\w.]+?(?:commentary|analysis))",
    r"(?:response)?(?:tools)?call\s+tool=\"[^\"<\n]+\"(?:\s+\w+=\"[^\"<\n]*\")*\s*(?=argument\s+key=|call)",
    r"^[A-Za-z_][\w.\-/]*(?=\{\s*\"[^\"\n]*\"\s*:|\{\}\s*$)",
    r"^assistant\n[A-Za-z_][\w.\-/]*\n(?=\{)",
    r"^function[A-Za-z_][\w.\-/]*\n```json\n(?=\{)",
    r"^call:[\w.\-/]+(?=\{)",
    r"<\|recipient\|>",
    r"^>>>(?!all\b)[\w.\-/]+\n(?=\s*\{)",
    r"^Action:[ \t]*[\w.\-/]+[ \t]*\nAction Input:",
    r"(?:<\|start\|>assistant)?(?:\s{0,2}to=[\w.\-]+)?<\|channel\|>[^<]{0,200}<",
    r"<\|(?:end|return)\|>",
    r"<\|start\|>assistant",
)
OPENING = "|".join(re.sub(r"\(\?P<\w+>", "(?:", mark) for mark in (*(opening for opening, _ in TAGS), *_BARE))
"""Pattern of everything that may begin a call."""
_OPENINGS = tuple((re.compile(opening, re.IGNORECASE), closing) for opening, closing in TAGS)
_INNER = re.compile(
    r"(?:[\s,;]+|```(?:json)?(?=\s|<|$)|</?tool_calls?(?::[\w.-]+)?>|<\|/?tool_call(?:_begin|_end)?\|>"
    r"|<｜tool[▁_]call[▁_](?:begin|end)｜>|<\|(?:plugin|interpreter|call|eom_id)\|>|function<｜tool[▁_]sep｜>(?=\s*<))"
)
"""Text between the calls of a pair of tags."""
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


def read_form(text: str, start: int) -> Found | None:
    """The calls behind the opening mark at `start`; None if the mark is only mentioned."""
    if header := _HARMONY_CALL.match(text, start):
        return _harmony(text, header, header["after"] or header["before"])
    if header := _BARE_HARMONY.match(text, start):
        return _harmony(text, header, header["name"] or header["tool"] or header["other"], _BARE_HARMONY_END)
    if header := _FUNCTIONARY.match(text, start):
        name = header["name"] or header["short"] or header["action"]
        return None if name == "all" else _to(name, text, header.end())
    for opening, closing in _OPENINGS:
        if mark := opening.match(text, start):
            close = closing.format(tag=re.escape(mark["tag"])) if "{tag}" in closing else closing
            return _within(text, mark, close)
    return _within(text, re.compile("").match(text, start), "")


def _within(text: str, mark: Any, closing: str) -> Found | None:
    """The calls between a pair of tags; None if these are only mentioned."""
    close = re.compile(closing) if closing else None
    calls: list[Call] = []
    place = mark.end()
    while True:
        if close is not None and (ended := close.match(text, place)):
            if not calls:
                return Found((BadCall(f"{BAD}the tool call is empty; {FORM}."),), ended.end())
            return Found(tuple(calls), ended.end())
        if inner := _INNER.match(text, place):
            place = inner.end()
            continue
        try:
            read = next((found for reader in READERS if (found := reader(text, place, close)) is not None), None)
        except Unreadable as error:
            return _unreadable(text, place, close, mark, str(error))
        if read is None:
            break
        calls += read[0]
        place = read[1]
    if calls:
        rest = close.search(text, place) if close is not None else None
        if rest is not None and text[place : rest.start()].strip():
            why = f"{BAD}the tool call is not JSON alone (there is more text in its tags)."
            return Found((BadCall(why),), rest.end())
        # The end of the text closes as well, if the call itself is whole.
        if close is None or not text[place:].strip() or re.compile(OPENING, re.IGNORECASE).match(text, place):
            return Found(tuple(calls), place)
        return Found((), len(text), _not_closed(mark, closing))
    if mark[0] == "<|python_tag|>":
        code = text[mark.end() :].removesuffix("<|eom_id|>").strip()
        return Found((ToolCall("python", {"code": code}),), len(text)) if code else None
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
    return Found((BadCall(f"{BAD}the tool call is not JSON (found {_brief(inside)}); {FORM}."),), ended.end())


def _unreadable(text: str, place: int, close: re.Pattern[str] | None, mark: Any, why: str) -> Found:
    ended = close.search(text, place) if close is not None else None
    if close is not None and ended is None:
        return Found((), len(text), _not_closed(mark, close.pattern))
    return Found((BadCall(f"{BAD}{why}."),), ended.end() if ended else len(text))


def _not_closed(mark: Any, closing: str) -> str:
    plain = f"</{mark['tag']}>" if "tag" in mark.re.groupindex else re.sub(r"\\(.)|\(\?i:|\)", r"\1", closing)
    return f"a tool call is not closed with {plain}"


def _brief(text: str) -> str:
    line = " ".join(text.split())
    return repr(line if len(line) <= 60 else f"{line[:57]}...")


# -------------------------------------------------------------------------------------------------------- the readers

Read: TypeAlias = "tuple[list[Call], int] | None"
"""Calls, and where the text goes on; None if this is another form."""
Closing: TypeAlias = "re.Pattern[str] | None"

_FUNCTION = re.compile(r"<function(?:=|\s+name=)\s*[\"']?(?P<name>[^>\"'\n]+?)[\"']?\s*>")
_INVOKE = re.compile(r"<(?P<space>(?:[\w]+:|｜DSML｜)?)invoke\s+name=\s*[\"']?(?P<name>[^>\"'\n]+?)[\"']?\s*>")
_PARAMETER = re.compile(
    r"<(?P<tag>(?:[\w]+:|｜DSML｜)?param(?:eter)?)(?:=|\s+name=)\s*[\"']?(?P<key>[^>\"'\n]+?)[\"']?"
    r"(?:\s+string=\"(?P<string>true|false)\")?(?:\s+[\w]+=\"[^\"]*\")*\s*>"
)
_ARG = re.compile(
    r"<(?P<space>\w*\|?)arg_key(?P<suffix>:[\w.-]+)?>\s*(?P<key>.*?)\s*</(?P=space)arg_key(?P=suffix)?>", re.DOTALL
)
_GLM = re.compile(r"(?P<name>[\w.\-/:]+)(?:\s*<tool_sep(?::[\w.-]+)?>)?\s*(?=<(?:\w*\|)?arg_key)")
_NAME = re.compile(r"(?P<name>[A-Za-z_][\w.\-/]*)")
_HEADER = re.compile(
    r"(?:assistant\n|function(?:<｜tool[▁_]sep｜>|(?=[\w.\-/]+\n```)))?(?:functions\.)?(?P<name>[A-Za-z_][\w.\-/]*)(?::\d+)?"
    r"(?:\[CALL_ID\][^\[\s]*)?"
    r"(?:\s|<｜tool[▁_]sep｜>|<tool_sep(?::[\w.-]+)?>|<\|tool_call_argument_begin\|>|\[ARGS\]|```(?:json)?)*(?=\{)"
)
_BRACES = re.compile(r"call:(?P<name>[\w.\-/]+)(?=\{)")
_PYTHONIC = re.compile(r"\[?\s*[A-Za-z_][\w.]*\s*\(")


def _json(text: str, place: int, close: Closing) -> Read:
    if text[place : place + 1] not in ("{", "["):
        return None
    if _PYTHONIC.match(text, place) or text.startswith("[TOOL_CALLS]", place):
        return None
    value, end = _value(text, place)
    return calls_of(value, tagged=True), end


def _function(text: str, place: int, close: Closing) -> Read:
    mark = _FUNCTION.match(text, place)
    if mark is None:
        return None
    return _parameters(text, mark["name"].strip(), mark.end(), "</function>", "</?function|</tool_call")


def _invoke(text: str, place: int, close: Closing) -> Read:
    mark = _INVOKE.match(text, place)
    if mark is None:
        return None
    ends = f"</{mark['space']}invoke>"
    return _parameters(text, mark["name"].strip(), mark.end(), ends, re.escape(ends))


def _parameters(text: str, name: str, place: int, ends: str, follows: str) -> Read:
    """The values in tags, up to `ends`. A value may hold tags: it ends where another value or the end follows."""
    arguments: dict[str, Any] = {}
    while True:
        place = _skip_blanks(text, place)
        if text.startswith(ends, place):
            return [ToolCall(name, arguments, texts=True)], place + len(ends)
        if not arguments and text.startswith("{", place):
            value, place = _value(text, place)
            place = _skip_blanks(text, place)
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
                f"the call of {name!r} is not closed with {ends}, or holds {_brief(text[place : place + 60])}"
            )
        tag = re.escape(mark["tag"])
        ended = re.compile(rf"</{tag}>(?=\s*(?:<{tag}[\s=]|{follows}|\Z))").search(text, mark.end())
        if ended is None:
            raise Unreadable(f"the argument {mark['key']!r} of {name!r} is not closed with </{mark['tag']}>")
        value = text[mark.end() : ended.start()]
        if value.startswith("\n"):  # Qwen puts the value on lines of its own
            value = value[1:].removesuffix("\n")
        if mark["string"] == "false":
            value = _value_or_text(value)
        _put(arguments, mark["key"].strip(), value, name)
        place = ended.end()


def _keys_and_values(text: str, place: int, close: Closing) -> Read:
    mark = _GLM.match(text, place)
    if mark is None:
        alone = _NAME.match(text, place)
        # A call without arguments is the name alone, directly within its tags.
        if alone is None or close is None or (text[place - 1 : place].isspace() and text[place - 1] != "\n"):
            return None
        ended = close.match(text, _skip_lines(text, alone.end()))
        return None if ended is None else ([ToolCall(alone["name"], {}, texts=True)], ended.start())
    arguments: dict[str, Any] = {}
    place = mark.end()
    while key := _ARG.match(text, _skip_blanks(text, place)):
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
_CLOSE_CALL = re.compile(r"<\|close\|>call<\|sep\|>|call(?=\s|tools|message|call\s+tool=|\Z)(?:tools)?(?:message)?")


def _open_and_close(text: str, place: int, close: Closing) -> Read:
    """Kimi K3's, with its special tokens or without: values of any type but `string` are JSON."""
    mark = _OPEN_CALL.match(text, place)
    if mark is None:
        return None
    arguments: dict[str, Any] = {}
    place = mark.end()
    while argument := _OPEN_ARGUMENT.match(text, _skip_blanks(text, place)):
        value = argument["value"]
        _put(arguments, argument["key"], value if argument["type"] == "string" else _value_or_text(value), mark["name"])
        place = argument.end()
    closed = _CLOSE_CALL.match(text, _skip_blanks(text, place))
    if closed is None:
        raise Unreadable(f"the call of {mark['name']!r} is not closed with <|close|>call<|sep|>")
    return [ToolCall(mark["name"], arguments)], closed.end()


def _header(text: str, place: int, close: Closing) -> Read:
    mark = _HEADER.match(text, place)
    if mark is None:
        return None
    value, end = _value(text, mark.end())
    if not isinstance(value, dict):
        raise Unreadable(f"the arguments of {mark['name']!r} must be a JSON object")
    return [ToolCall(mark["name"], value)], end


def _braces(text: str, place: int, close: Closing) -> Read:
    """Gemma's: keys bare, texts between marks of their own."""
    mark = _BRACES.match(text, place)
    if mark is None:
        return None
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
            pieces.append(word if plain and not key else json.dumps(word))
        else:
            pieces.append(part["string"] or part["sign"] or "")
            depth += {"{": 1, "[": 1, "}": -1, "]": -1}.get(part["sign"] or "", 0)
            if not depth and part["sign"]:
                break
    try:
        value = _DECODER.decode("".join(pieces))
    except (ValueError, RecursionError):
        raise Unreadable(
            f"the arguments of {mark['name']!r} cannot be read ({_brief(text[mark.end() : end])})"
        ) from None
    return [ToolCall(mark["name"], value)], end


def _python(text: str, place: int, close: Closing) -> Read:
    if not _PYTHONIC.match(text, place):
        return None
    end = _balanced(text, place)
    if end is None:
        raise Unreadable("the tool call does not end")
    calls = _python_calls(text[place:end])
    if calls is None:
        raise Unreadable(
            f"the tool call is not JSON, and no call of Python with named arguments ({_brief(text[place:end])})"
        )
    return calls, end


READERS: tuple[Callable[[str, int, Closing], Read], ...] = (
    _json,
    _function,
    _invoke,
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
    start = _skip_blanks(text, place)
    end = ended.end() if ended and ended[0] == "<|call|>" else ended.start() if ended else len(text)
    if text.startswith("{", start):
        try:
            value, after = _value(text, start)
        except Unreadable as error:
            return Found((BadCall(f"{BAD}{error}."),), end)
        following = _HARMONY_END.match(text, _skip_blanks(text, after))
        after = following.end() if following and following[0] == "<|call|>" else after
        return Found((ToolCall(name, value),), after)
    body = text[place : ended.start() if ended else len(text)].strip()
    if name.partition(".")[0] in ("python", "browser", "container"):
        return Found((ToolCall(name, {"code": body}),), end)
    why = (
        f"the arguments of {name!r} must be a JSON object, found {_brief(body)}"
        if body
        else f"{name!r} has no arguments"
    )
    return Found((BadCall(f"{BAD}{why}."),), end)


# ---------------------------------------------------------------------------------------------------------- bare calls

_NAMES = ("name", "tool_name", "function_name", "tool", "function", "action")
_ARGUMENTS = ("arguments", "parameters", "args", "input", "params", "kwargs", "tool_input", "action_input", "inputs",
              "tool_args", "tool_arguments", "function_arguments", "function_args")  # fmt: skip
_HOLDERS = ("function", "function_call", "tool_call")
_BESIDE = frozenset(
    ("id", "call_id", "tool_call_id", "type", "index", "thought", "thoughts", "reasoning", "description")
)
_LOOKS = re.compile(
    rf"(?:\[\s*)?\{{\s*['\"](?:{'|'.join(_NAMES)}|type|id|tool_call_id)['\"]\s*:[\s\S]{{0,2000}}?"
    rf"['\"](?:{'|'.join(_ARGUMENTS)})['\"]\s*:"
)


def bare_json(text: str, start: int) -> tuple[tuple[Call, ...], int] | None:
    """The calls of a JSON value at `start` that stands in no tags, and its end; None if it makes none.

    A value makes calls if each of its entries has a name and arguments under the usual keys.
    """
    try:
        value, end = _DECODER.raw_decode(text, start)
    except (ValueError, RecursionError):
        if not _LOOKS.match(text, start):
            return None
        try:
            value, end = _value(text, start)
        except Unreadable as error:
            return (BadCall(f"{BAD}{error}."),), len(text)
    entries = value if isinstance(value, list) else [value]
    if entries and all(map(_meant, entries)):
        return tuple(calls_of(value, tagged=False)), end
    # Not a call, and nothing in it is one.
    return (), end


def _meant(entry: Any) -> bool:
    """Whether a JSON value without tags is a call: a name and arguments, and not the schema of a tool."""
    if not isinstance(entry, dict):
        return False
    if isinstance(entry.get("tool_calls"), list) and entry["tool_calls"]:
        return all(map(_meant, entry["tool_calls"]))
    if inner := _inner(entry):
        return _meant(inner)
    named = any(isinstance(entry.get(key), str) for key in _NAMES)
    return named and any(isinstance(entry.get(key), (dict, str)) for key in _ARGUMENTS) and not _is_schema(entry)


def _inner(entry: Mapping[str, Any]) -> dict[str, Any] | None:
    """The call within an object that holds it under a key of its own."""
    return next((entry[key] for key in _HOLDERS if isinstance(entry.get(key), dict) and entry[key]), None)


def _is_schema(entry: Mapping[str, Any]) -> bool:
    inner = entry.get("parameters")
    return isinstance(inner, dict) and (
        "arguments" not in entry and (isinstance(inner.get("properties"), dict) or "description" in entry)
    )


def bare_list(text: str, *, code: bool = False) -> list[Call] | None:
    """The calls of a text that is nothing but Python calls with named arguments, as `[f(x=1)]` or `f.call(x=1)`.

    `code`: calls need no brackets, and `print(f(x=1))` is one, as Gemma writes them in a block of `tool_code`.
    """
    if not text or not (code or re.match(r"\[\s*[A-Za-z_][\w.]*\s*\(|[A-Za-z_]\w*\.call\(", text)):
        return None
    calls: list[Call] = []
    place = 0
    while place < len(text):
        end = _balanced(text, place) if _PYTHONIC.match(text, place) else None
        found = _python_calls(text[place:end]) if end is not None else None
        if found is None or (not code and any(isinstance(call, BadCall) for call in found)):
            return [BadCall(f"{BAD}the block is no call with named arguments.")] if code else None
        calls += found
        place = _skip_blanks(text, end or len(text))
    return calls


# --------------------------------------------------------------------------------------------------------------- JSON


def calls_of(value: Any, *, tagged: bool) -> list[Call]:
    """The calls of a JSON value. `tagged`: it stands in the tags of a call, so that it is meant as one."""
    if isinstance(value, list):
        if not value:
            return [BadCall(f"{BAD}{FORM}, found something else (an empty list).")]
        return [call for entry in value for call in calls_of(entry, tagged=tagged)]
    return [_call(value, tagged=tagged)] if not _is_list(value) else calls_of(value["tool_calls"], tagged=tagged)


def _is_list(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("tool_calls"), list)


def _call(said: Any, *, tagged: bool) -> Call:
    wrong = BadCall(f"{BAD}{FORM}, found something else.")
    if not isinstance(said, dict):
        return wrong
    if inner := _inner(said):
        return _call(inner, tagged=tagged)
    key = next((key for key in _NAMES if isinstance(said.get(key), str) and said[key].strip()), None)
    if key is None:
        # Apertus writes {NAME: {...}}.
        [(name, arguments), *more] = list(said.items()) or [("", None)]
        good = tagged and name and name not in (*_NAMES, *_ARGUMENTS) and isinstance(arguments, dict) and not more
        return ToolCall(name, arguments) if good else wrong
    name = said[key].strip()
    if _is_schema(said):
        return BadCall(f"{BAD}the schema of {name!r} stands where its arguments belong; {FORM}.")
    given = {other: said[other] for other in _ARGUMENTS if other in said and other != key}
    others = [other for other in said if other not in given and other != key and other not in _BESIDE]
    filled = {other: value for other, value in given.items() if value not in (None, "", {})}
    if len(filled) > 1 or (not filled and others):
        return BadCall(
            f"{BAD}the arguments of {name!r} must be one object under 'arguments', found "
            f"{', '.join(map(repr, [*filled, *others]))} beside the name."
        )
    [arguments] = filled.values() or [{}]
    if isinstance(arguments, str):  # some models write the arguments as a JSON text of its own
        try:
            arguments = _value(arguments.strip(), 0)[0]
        except Unreadable as error:
            return BadCall(f"{BAD}the arguments of {name!r} are a text ({_brief(arguments)}): {error}.")
    if not isinstance(arguments, dict):
        return BadCall(f"{BAD}the arguments of {name!r} must be an object, found a {type(arguments).__name__}.")
    return ToolCall(name.removeprefix("functions."), arguments)


_ESCAPE = re.compile(r'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}|(?P<other>.?))', re.DOTALL)


def _no_number(name: str) -> float:
    raise ValueError(f"{name} is no number")


_DECODER = json.JSONDecoder(strict=False, parse_constant=_no_number)


def _value(text: str, place: int) -> tuple[Any, int]:
    """The JSON value at `place` and its end. Raises Unreadable.

    Strings may hold line breaks and tabs as they are, and a backslash that JSON does not know stands for itself. A
    value in Python's notation is read too.
    """
    if not text.startswith(("{", "["), place):
        raise Unreadable("the tool call is not JSON (no object)")
    try:
        return _DECODER.raw_decode(text, place)
    except RecursionError:
        raise Unreadable("the tool call is not JSON (it is nested too deeply)") from None
    except ValueError as error:
        first = error
    end = _balanced(text, place)
    if end is None:
        raise Unreadable(f"the tool call is not JSON ({str(first).splitlines()[0]})")
    piece = text[place:end]
    escaped = _ESCAPE.sub(lambda m: m[0] if m["other"] is None else f"\\\\{m['other']}", piece)
    for read in (_DECODER.decode, _literal):
        try:
            return read(escaped if read is _DECODER.decode else piece), end
        except (ValueError, SyntaxError, RecursionError, MemoryError, TypeError):
            continue
    raise Unreadable(f"the tool call is not JSON ({str(first).splitlines()[0]})")


def _value_or_text(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def with_types(call: ToolCall, schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Arguments of a call whose form writes them as texts, in the types of the tool's schema.

    A text stays one where the schema allows a text, or where it is not the JSON of another type that it allows.
    """
    properties = schema.get("properties")
    if not call.texts or not isinstance(properties, dict):
        return call.arguments
    return {key: _typed(value, properties.get(key)) for key, value in call.arguments.items()}


def _typed(value: Any, schema: Any) -> Any:
    if not isinstance(value, str) or "string" in _types(schema):
        return value
    told = value.strip()
    read = _value_or_text({"True": "true", "False": "false", "None": "null"}.get(told, told))
    return value if isinstance(read, str) and not _types(schema) else read


def _types(schema: Any) -> set[str]:
    """Types that a schema names; none: the value may be of any, and stays a text."""
    if not isinstance(schema, dict):
        return {"string"}
    named = schema.get("type")
    types = {named} if isinstance(named, str) else set(named) if isinstance(named, list) else set()
    for key in ("anyOf", "oneOf"):
        if isinstance(schema.get(key), list):
            types |= {kind for inner in schema[key] for kind in _types(inner)}
    if isinstance(schema.get("enum"), list):
        types |= {"string"} if any(isinstance(entry, str) for entry in schema["enum"]) else {"any"}
    return types or {"string"}


# ------------------------------------------------------------------------------------------------------------- Python

LONGEST = 100_000
"""Characters of a call in Python's notation."""
_CONSTANTS = {"true": True, "false": False, "null": None}


def _python_calls(text: str) -> list[Call] | None:
    """The calls of `f(x=1)` or `[f(x=1), ...]`; None if the text is neither."""
    if len(text) > LONGEST:
        return None
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    nodes = tree.elts if isinstance(tree, (ast.List, ast.Tuple)) else [tree]
    if not nodes or not all(isinstance(node, ast.Call) for node in nodes):
        return None
    return [_python_call(node) for node in nodes if isinstance(node, ast.Call)]


def _python_call(node: ast.Call) -> Call:
    try:
        name = ast.unparse(node.func)
        if name == "print" and len(node.args) == 1 and isinstance(node.args[0], ast.Call):
            return _python_call(node.args[0])
        name = re.sub(r"^(?:default_api|functions|tools)\.|\.call$", "", name)
        if node.args or any(keyword.arg is None for keyword in node.keywords):
            return BadCall(
                f"{BAD}the call of {name!r} is not JSON, and has arguments without names ({name}(key=value))."
            )
        return ToolCall(name, {keyword.arg or "": _constant(keyword.value) for keyword in node.keywords})
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return BadCall(f"{BAD}the arguments of a call in Python's notation must be constants.")


def _constant(node: ast.expr) -> Any:
    for inner in ast.walk(node):
        for name, child in ast.iter_fields(inner):
            if isinstance(child, ast.Name) and child.id in _CONSTANTS:
                setattr(inner, name, ast.Constant(_CONSTANTS[child.id]))
            elif isinstance(child, list):
                child[:] = [
                    ast.Constant(_CONSTANTS[entry.id])
                    if isinstance(entry, ast.Name) and entry.id in _CONSTANTS
                    else entry
                    for entry in child
                ]
    if isinstance(node, ast.Name) and node.id in _CONSTANTS:
        return _CONSTANTS[node.id]
    return ast.literal_eval(node)


def _literal(text: str) -> Any:
    """An object or list in Python's notation, as JSON has it. Raises ValueError, TypeError, and errors of `ast`."""
    if len(text) > LONGEST:
        raise ValueError("too long")
    return json.loads(json.dumps(_constant(ast.parse(text.strip(), mode="eval").body), allow_nan=False))


_BRACKET = re.compile(r"(?P<quote>'''|\"\"\"|['\"])|(?P<open>[(\[{])|(?P<close>[)\]}])")


def _balanced(text: str, place: int) -> int | None:
    """The end of the expression at `place`, by its brackets; strings hold none. None if it does not end."""
    depth = 0
    while mark := _BRACKET.search(text, place):
        place = mark.end()
        if quote := mark["quote"]:
            ended = re.compile(rf"(?:\\.|(?!{quote}).)*{quote}", re.DOTALL).match(text, place)
            if ended is None:
                return None
            place = ended.end()
        elif mark["open"]:
            depth += 1
        else:
            depth -= 1
            if depth <= 0:
                return place
    return None


# ------------------------------------------------------------------------------------------------------------- helpers


def _skip_blanks(text: str, place: int) -> int:
    while place < len(text) and text[place].isspace():
        place += 1
    return place


def _skip_lines(text: str, place: int) -> int:
    while place < len(text) and text[place] in "\r\n":
        place += 1
    return place


def _put(arguments: dict[str, Any], key: str, value: Any, name: str) -> None:
    if key in arguments:
        raise Unreadable(f"the argument {key!r} of {name!r} is given twice")
    arguments[key] = value
