"""Values of tool calls: JSON as models write it, and constants in Python's notation."""

from __future__ import annotations

import ast
import json
import re
from typing import Any

LONGEST = 100_000
"""Characters of a call in Python's notation."""
_CONSTANTS = {"true": True, "false": False, "null": None}


class Unreadable(ValueError):
    """A call that is begun and cannot be read; the text is the reason."""


_ESCAPE = re.compile(r'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}|(?P<other>.?))', re.DOTALL)


def _no_number(name: str) -> float:
    raise ValueError(f"{name} is no number")


DECODER = json.JSONDecoder(strict=False, parse_constant=_no_number)


def read_value(text: str, place: int) -> tuple[Any, int]:
    """The JSON value at `place` and its end. Raises Unreadable.

    Strings may hold line breaks and tabs as they are, and a backslash that JSON does not know stands for itself. A
    value in Python's notation is read too.
    """
    if not text.startswith(("{", "["), place):
        raise Unreadable("the tool call is not JSON (no object)")
    try:
        return DECODER.raw_decode(text, place)
    except RecursionError:
        raise Unreadable("the tool call is not JSON (it is nested too deeply)") from None
    except ValueError as error:
        first = error
    end = balanced(text, place)
    if end is None:
        raise Unreadable(f"the tool call is not JSON ({str(first).splitlines()[0]})")
    piece = text[place:end]
    escaped = _ESCAPE.sub(lambda m: m[0] if m["other"] is None else f"\\\\{m['other']}", piece)
    for read in (DECODER.decode, _literal):
        try:
            return read(escaped if read is DECODER.decode else piece), end
        except (ValueError, SyntaxError, RecursionError, MemoryError, TypeError):
            continue
    raise Unreadable(f"the tool call is not JSON ({str(first).splitlines()[0]})")


def read_object(text: str, place: int) -> tuple[Any, int] | None:
    """The object at `place`, or within a JSON text there, and its end; None for anything else. Raises Unreadable."""
    if text.startswith("{", place):
        return read_value(text, place)
    if not text.startswith('"{', place):
        return None
    try:
        inner, end = DECODER.raw_decode(text, place)
    except ValueError:
        return None
    value, after = read_value(inner, 0)
    return None if inner[after:].strip() else (value, end)


def value_or_text(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def constant(node: ast.expr) -> Any:
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
    return json.loads(json.dumps(constant(ast.parse(text.strip(), mode="eval").body), allow_nan=False))


# What does not end is taken whole, so that no text is read again from each of its quotes.
_QUOTED = re.compile(r"(?P<quote>'{3}|\"{3}|['\"])(?:\\.|(?!(?P=quote))[^\\])*+(?P=quote)|['\"].*", re.DOTALL)


def escaped_breaks(text: str) -> str:
    """Python's notation with escapes for line breaks in short strings: LFM2.5's template writes them as they are."""

    def escaped(mark: re.Match[str]) -> str:
        short = mark["quote"] and len(mark["quote"]) == 1
        return mark[0].replace("\r", "\\r").replace("\n", "\\n") if short else mark[0]

    return _QUOTED.sub(escaped, text)


_BRACKET = re.compile(r"(?P<quote>'''|\"\"\"|['\"])|(?P<open>[(\[{])|(?P<close>[)\]}])")


def balanced(text: str, place: int) -> int | None:
    """The end of the expression at `place`, by its brackets; strings hold none. None if it does not end."""
    depth = 0
    while mark := _BRACKET.search(text, place):
        place = mark.end()
        if quote := mark["quote"]:
            # Possessive, and no character in two ways: a thousand backslashes would be tried in all.
            ended = re.compile(rf"(?:\\.|(?!{quote})[^\\])*+{quote}", re.DOTALL).match(text, place)
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


def skip_blanks(text: str, place: int) -> int:
    while place < len(text) and text[place].isspace():
        place += 1
    return place
