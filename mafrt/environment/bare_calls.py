"""Tool calls without tags: in JSON, with a name and arguments under the usual keys, and in Python's notation."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, TypeAlias

from mafrt.environment.call_values import (
    DECODER,
    LONGEST,
    Unreadable,
    balanced,
    constant,
    escaped_breaks,
    read_value,
    skip_blanks,
    value_or_text,
)

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
Schemas: TypeAlias = "Mapping[str, Mapping[str, Any]]"
"""Names of tools, and the JSON schema of the arguments of each; empty where it is not known."""


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
        value, end = DECODER.raw_decode(text, start)
    except (ValueError, RecursionError):
        if not _LOOKS.match(text, start):
            return None
        try:
            value, end = read_value(text, start)
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
        found, end = (PYTHONIC.match(text, place) and python_calls(text, place)) or (None, 0)
        if found is None or (not code and any(isinstance(call, BadCall) for call in found)):
            return [BadCall(f"{BAD}the block is no call with named arguments.")] if code else None
        calls += found
        place = skip_blanks(text, end)
    return calls


def calls_of(value: Any, *, tagged: bool) -> list[Call]:
    """The calls of a JSON value. `tagged`: it stands in the tags of a call, so that it is meant as one."""
    if isinstance(value, list):
        if not value:
            return [BadCall(f"{BAD}{FORM}, found something else (an empty list).")]
        return [call for entry in value for call in calls_of(entry, tagged=tagged)]
    if isinstance(value, dict) and isinstance(value.get("tool_calls"), list):
        return calls_of(value["tool_calls"], tagged=tagged)
    return [_call(value, tagged=tagged)]


def _call(parsed: Any, *, tagged: bool) -> Call:
    wrong = BadCall(f"{BAD}{FORM}, found something else.")
    if not isinstance(parsed, dict):
        return wrong
    if inner := _inner(parsed):
        return _call(inner, tagged=tagged)
    key = next((key for key in _NAMES if isinstance(parsed.get(key), str) and parsed[key].strip()), None)
    if key is None:
        # Apertus writes {NAME: {...}}.
        [(name, arguments), *more] = list(parsed.items()) or [("", None)]
        if not tagged or not name or name in (*_NAMES, *_ARGUMENTS) or more:
            return wrong
        arguments = value_or_text(arguments) if isinstance(arguments, str) else arguments
        return ToolCall(name, arguments) if isinstance(arguments, dict) else wrong
    name = parsed[key].strip()
    if _is_schema(parsed):
        return BadCall(f"{BAD}the schema of {name!r} stands where its arguments belong; {FORM}.")
    given = {other: parsed[other] for other in _ARGUMENTS if other in parsed and other != key}
    others = [other for other in parsed if other not in given and other != key and other not in _BESIDE]
    filled = {other: value for other, value in given.items() if value not in (None, "", {})}
    if len(filled) > 1 or (not filled and others):
        return BadCall(
            f"{BAD}the arguments of {name!r} must be one object under 'arguments', found "
            f"{', '.join(map(repr, [*filled, *others]))} beside the name."
        )
    [arguments] = filled.values() or [{}]
    if isinstance(arguments, str):  # some models write the arguments as a JSON text of its own
        try:
            arguments = read_value(arguments.strip(), 0)[0]
        except Unreadable as error:
            return BadCall(f"{BAD}the arguments of {name!r} are a text ({brief_line(arguments)}): {error}.")
    if not isinstance(arguments, dict):
        return BadCall(f"{BAD}the arguments of {name!r} must be an object, found a {type(arguments).__name__}.")
    return ToolCall(name.removeprefix("functions."), arguments)


def with_types(call: ToolCall, schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Arguments of a call whose form writes them as texts, in the types of the tool's schema.

    A text stays one where the schema allows a text, or where it is not the JSON of another type that it allows.
    """
    properties = _properties(schema)
    if not call.texts or not properties:
        return call.arguments
    return {key: _typed(value, properties.get(key)) for key, value in call.arguments.items()}


def _properties(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    properties = schema.get("properties")
    return properties if isinstance(properties, dict) else {}


def _typed(value: Any, schema: Any) -> Any:
    if isinstance(value, dict):
        properties = _properties(schema) if isinstance(schema, dict) else {}
        return {key: _typed(inner, properties.get(key)) for key, inner in value.items()}
    if isinstance(value, list):
        return [_typed(inner, schema.get("items") if isinstance(schema, dict) else None) for inner in value]
    if not isinstance(value, str):
        return value
    told = value.strip()
    if "string" in _types(schema):
        return None if told in ("null", "None") and "null" in _types(schema) else value
    if not told and (kinds := _types(schema) & {"array", "object"}):
        return [] if "array" in kinds else {}
    read = value_or_text({"True": "true", "False": "false", "None": "null"}.get(told, told))
    if isinstance(read, str) and _types(schema) & {"array", "object"}:  # some templates write what Python prints
        try:
            read = read_value(told, 0)[0]
        except Unreadable:
            return value
    return value if isinstance(read, str) and not _types(schema) else read


def _types(schema: Any) -> set[str]:
    """Types that a schema names; none: the value may be of any, and stays a text."""
    if not isinstance(schema, dict):
        return {"string"}
    named = schema.get("type")
    named = [named] if isinstance(named, str) else named if isinstance(named, list) else []
    types = {kind for kind in named if isinstance(kind, str)}
    for key in ("anyOf", "oneOf"):
        if isinstance(schema.get(key), list):
            types |= {kind for inner in schema[key] for kind in _types(inner)}
    if isinstance(schema.get("enum"), list):
        types |= {"string"} if any(isinstance(entry, str) for entry in schema["enum"]) else {"any"}
    return types or {"string"}


# -------------------------------------------------------------------------------------------- calls without their marks

_WITH_ID = "(?:{name}[A-Za-z0-9]{{9}}|.*[a-z0-9]{{10}}{name})"
"""a name beside the id of its call, as Mistral and Solar Open write it"""
_ALONE = (
    r"(?:</(?:[\w.-]+[:|]|｜DSML｜)?(?:\w+_)?(?:tool|function)_?calls?(?::[\w.-]+)?>|</?arg_(?:key|value)>|\[ARGS\]|\[CALL_ID\]\w*"
    r"|<\|(?:call|content|tool_call_end|tool_call_argument_begin|tools_suffix|python_end|sep)\|>"
    r"|<end_function_call>|<tool_call\|>)(?=\s*$|[<{\[])|<\|(?:open\|>call\s+tool=|recipient\|>[\w.\-/]+\n)"
)
"""Marks that stand within a call or after it, at the end of a line or before more of it."""


_SOLE = r"(?:{names})\(\s*(?:[A-Za-z_]\w*\s*=[^=]|\)[ \t]*\]?[ \t]*$)"
"""The beginning of a call in Python's notation that has names for its arguments, or none and nothing behind it."""


def without_id(call: Call, tools: Schemas) -> Call:
    """A call whose id has become a part of its name, where the mark between was dropped in decoding."""
    if isinstance(call, BadCall) or call.name in tools:
        return call
    name = next((name for name in tools if re.fullmatch(_WITH_ID.format(name=re.escape(name)), call.name)), call.name)
    return replace(call, name=name)


def without_marks(text: str, tools: Schemas) -> tuple[int, list[Call]] | None:
    """Calls in a text in which no mark begins one, and where they begin; None if it makes none.

    `tools`: the schemas of the tools that there are. They tell Apertus' `[{NAME: {...}}]` from an answer in
    JSON, and from words the rest of a call whose marks were dropped in decoding, and the forms of other programs,
    as `<NAME>...</NAME>` or `Action: NAME[...]`: what cannot be read is a `BadCall`.
    """
    named = "|".join(map(re.escape, sorted(tools, key=len, reverse=True)))
    for mark in re.finditer(rf"\[\s*\{{\s*\"(?:{named})\"\s*:\s*\{{", text):
        try:
            value, _ = read_value(text, mark.start())
        except Unreadable as error:
            return mark.start(), [BadCall(f"{BAD}{error}.")]
        return mark.start(), calls_of(value, tagged=True)
    # At a handful of places, since reading a long value in vain takes time.
    inner = rf"\{{\s*['\"](?:{'|'.join(_NAMES)})['\"]\s*:\s*['\"](?:{named})['\"]\s*,"
    for mark in islice(re.finditer(inner, text), 9):
        try:
            value, _ = read_value(text, mark.start())
        except Unreadable:
            continue
        if _meant(value):  # a call under a key of another program
            return mark.start(), calls_of(value, tagged=True)
    if re.match(rf"\[?\s*(?:{named})\(", text):
        found = python_calls(text, 0)
        if (found is None or not text[found[1] :].strip()) and (listed := bare_list(text, code=True)):
            return 0, listed
    begin = end = 0
    calls: list[Call] = []
    for mark in islice(re.finditer(rf"(?:^[ \t]*\[?|\[)(?={_SOLE.format(names=named)})", text, re.MULTILINE), 99):
        found = python_calls(text, mark.end() - mark[0].endswith("[")) if mark.start() >= end else None
        if found is not None and not any(isinstance(call, BadCall) for call in found[0]):
            begin, end, calls = begin if calls else mark.start(), found[1], [*calls, *found[0]]
    if calls:
        return begin, calls
    keys = {name: "|".join(map(re.escape, _properties(schema))) for name, schema in tools.items()}
    begun = "|".join(rf"{re.escape(name)}(?:\s*[\[{{<]|\n?(?:{keys[name]}))" for name in tools if keys[name])
    begun = "|".join(filter(None, (begun, rf"(?:{named})(?:[\[{{<]|\n```(?:json)?\n\{{)", _ALONE)))
    tag = rf"[\w:.-]+\s[^<>\n]*=[\"']?(?:{named})[\"']?(?:\s[^<>\n]*)?"
    begun += rf"|<(?:(?:{named})(?:\s[^<>\n]*)?|{tag}|\w*name>\s*(?:{named})\s*</\w*name)/?>"
    begun += rf"|\W{{0,5}}(?i:action|tool|function)\W{{1,6}}(?:{named})(?:\W*$|[\[({{<])"
    for mark in re.finditer(rf"^(?:call:|function|assistant\n?)?(?:{begun})|{_ALONE}", text, re.MULTILINE):
        line = text.rfind("\n", 0, mark.start()) + 1
        shown = brief_line(text[line : line + 80])
        why = f"a tool call in a form of its own, or without its marks, cannot be read (found {shown}); {FORM}."
        return line, [BadCall(f"{BAD}{why}")]
    return None


# ------------------------------------------------------------------------------------------------------------- Python

PYTHONIC = re.compile(r"\[?\s*[A-Za-z_][\w.\-/]*\s*\(")


def python_calls(text: str, place: int) -> tuple[list[Call], int] | None:
    """The calls of `f(x=1)` or `[f(x=1), ...]` at `place`, and their end; None if it is neither.

    LFM2.5's template writes a text between single quotes as it is, with quotes, backslashes and line breaks in it. A
    call is read so where Python cannot read it or knows none of its escapes.
    """
    end = balanced(text, place)
    piece = text[place : min(end or len(text), place + LONGEST)]
    odd = _NO_ESCAPE.search(piece) is not None and "'''" not in piece
    tree = None if odd or end is None else _parsed(piece)
    nodes = tree.elts if isinstance(tree, (ast.List, ast.Tuple)) else [tree]
    calls = [_python_call(node) for node in nodes if isinstance(node, ast.Call)]
    if end is not None and calls and len(calls) == len(nodes):
        return calls, end
    readers = (*([] if odd else [_constant_at]), *([] if "\\'" in piece else [_as_it_is]), _with_breaks, _as_it_is)
    return next((found for read in readers if (found := _listed(text, place, read)) is not None), None)


_NO_ESCAPE = re.compile(r"(?<!\\)(?:\\\\)*\\[^\\'\"\nnrtux]")
_HEAD = re.compile(r"\s*(?P<name>[A-Za-z_][\w.\-/]*)\s*\(")
_KEY = re.compile(r"\s*(?P<key>[A-Za-z_]\w*)\s*=\s*")
_PLAIN_END = re.compile(r"'(?=\s*(?:,\s*[A-Za-z_]\w*\s*=|\)\s*(?:,\s*[A-Za-z_][\w.\-/]*\s*\(|\]|\Z)))")
_CONSTANT = re.compile(r"'(?:\\.|[^'\\])*+'|\"(?:\\.|[^\"\\])*+\"|[^\s,()\[\]{}'\"]++", re.DOTALL)
_Value: TypeAlias = "tuple[Any, int] | None"


def _listed(text: str, place: int, read: Callable[[str, int], _Value]) -> tuple[list[Call], int] | None:
    """The calls at `place` and their end, with names that Python does not have and values as `read` finds them."""
    calls: list[Call] = []
    listed = text.startswith("[", place)
    place += listed
    while head := _HEAD.match(text, place):
        arguments: dict[str, Any] = {}
        place = head.end()
        while key := _KEY.match(text, place):
            found = read(text, key.end())
            if found is None or key["key"] in arguments:
                return None
            arguments[key["key"]], place = found
            place = skip_blanks(text, place)
            if not text.startswith(",", place):
                break
            place += 1
        place = skip_blanks(text, place)
        if not text.startswith(")", place):
            return None
        calls.append(ToolCall(_plain_name(head["name"]), arguments))
        place = skip_blanks(text, place + 1) if listed else place + 1
        if not listed or not text.startswith(",", place):
            break
        place += 1
    if listed and not text.startswith("]", place):
        return None
    return (calls, place + listed) if calls else None


def _as_it_is(text: str, place: int) -> _Value:
    """A text up to the first end of it at which its brackets are closed, else up to the first."""
    if not text.startswith("'", place):
        return _constant_at(text, place)
    place += 1
    first, depth, done = None, [0, 0, 0], place
    for end in islice(_PLAIN_END.finditer(text, place, place + LONGEST), 1000):
        first = first or end
        for number, (opening, closing) in enumerate((("(", ")"), ("[", "]"), ("{", "}"))):
            depth[number] += text.count(opening, done, end.start()) - text.count(closing, done, end.start())
        done = end.start()
        if not any(depth):
            first = end
            break
    return None if first is None else (text[place : first.start()], first.end())


def _constant_at(text: str, place: int, escape: Callable[[str], str] = str) -> _Value:
    mark = _CONSTANT.match(text, place)
    end = balanced(text, place) if text.startswith(("[", "{", "("), place) else mark.end() if mark else None
    tree = None if end is None or end - place > LONGEST else _parsed(escape(text[place:end]))
    try:
        return None if tree is None or end is None else (constant(tree), end)
    except (ValueError, TypeError, RecursionError, MemoryError):
        return None


def _with_breaks(text: str, place: int) -> _Value:
    return _constant_at(text, place, escaped_breaks)


def _parsed(text: str) -> ast.expr | None:
    try:
        return ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _plain_name(name: str) -> str:
    return re.sub(r"^(?:default_api|functions|tools)\.|\.call$", "", name)


def is_program(text: str) -> bool:
    """Whether a text can be a program."""
    try:
        return len(text) <= LONGEST and bool(ast.parse(text).body)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False


def _python_call(node: ast.Call) -> Call:
    try:
        name = ast.unparse(node.func)
        if name == "print" and len(node.args) == 1 and isinstance(node.args[0], ast.Call):
            return _python_call(node.args[0])
        name = _plain_name(name)
        if node.args or any(keyword.arg is None for keyword in node.keywords):
            return BadCall(
                f"{BAD}the call of {name!r} is not JSON, and has arguments without names ({name}(key=value))."
            )
        return ToolCall(name, {keyword.arg or "": constant(keyword.value) for keyword in node.keywords})
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return BadCall(f"{BAD}the arguments of a call in Python's notation must be constants.")


def brief_line(text: str) -> str:
    line = " ".join(text.split())
    return repr(line if len(line) <= 60 else f"{line[:57]}...")
