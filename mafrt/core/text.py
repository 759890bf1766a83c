"""Text and numbers at the library's boundaries: valid Unicode, plain floats, and short forms for error messages.

Data sets, observations, judges, tools, file names and models all deliver text. A lone surrogate makes tokenizers and
SQLite raise, NUL ends C strings, and other control characters are obeyed by terminals. `clean_text` is the one place
where that is repaired; every boundary calls it, so no code behind a boundary has to.
"""

from __future__ import annotations

import copy
import itertools
import math
import numbers
import re
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

from mafrt.core.errors import EnvError

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"

DEEPEST = 100
"""Levels of nesting that `clean_deep` follows."""

MOST_NAMED = 12
"""Keys that an error message names."""

_FIXED = (int, float, bytes, type(None))
"""What nobody can write into; texts too."""

# Kept: tab, line feed, vertical tab, form feed, carriage return, and next line (U+0085).
_BAD = re.compile("[\x00-\x08\x0e-\x1f\x7f-\x84\x86-\x9f\ud800-\udfff]")

# For output of programs. Tab and line feed are kept.
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f]")

# In a name none is kept: each would break a line or drive a terminal wherever the name is printed.
_IN_NAMES = re.compile("[\x00-\x1f\x7f-\x9f]")


def whole_characters(text: str) -> str:
    """`text` as valid Unicode: surrogates that form a pair are joined, and a lone one becomes U+FFFD."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


def clean_text(text: str) -> str:
    """`text` as valid Unicode; U+FFFD stands for lone surrogates and for control characters but white space."""
    if _BAD.search(text) is None:
        return text
    return _BAD.sub(REPLACEMENT, whole_characters(text))


def clean_deep(value: Any, levels: int = DEEPEST) -> Any:
    """A copy of `value` with every text in it cleaned, keys included: its maker may go on writing into its own.

    Raises ValueError where it is nested deeper than `levels`, or contains itself.
    """
    if isinstance(value, str):
        return clean_text(value)
    if not isinstance(value, (dict, list, tuple)):
        try:
            return value if isinstance(value, _FIXED) else copy.deepcopy(value)
        except Exception:  # what classes raise has no common one; of an open file or a lock there is no copy
            return value
    if not levels:
        raise ValueError(f"it is nested deeper than {DEEPEST} levels")
    if isinstance(value, dict):
        return {clean_deep(key, levels - 1): clean_deep(entry, levels - 1) for key, entry in value.items()}
    return (tuple if isinstance(value, tuple) else list)(clean_deep(entry, levels - 1) for entry in value)


def brief(value: Any, limit: int = 80) -> str:
    """Type and shortened `repr` of a value on one line, for error messages. Never raises."""
    try:
        text = repr(value)
    except Exception as error:  # a `__repr__` of the user's, or an integer of more than 4,300 digits
        text = f"(its repr raises {type(error).__name__})"
    return f"{type(value).__name__} {shortened(text, limit)}"


def one_line(text: str) -> str:
    """`text` on one line, cleaned, with single blanks."""
    return " ".join(clean_text(text).split())


def shortened(text: str, limit: int = 80) -> str:
    """At most `limit` characters of `text` on one line, cleaned."""
    line = one_line(text[: 8 * limit])
    return line if len(line) <= limit else f"{line[: limit - 3]}..."


def error_line(error: BaseException) -> str:
    """The message of an error on one line, or its class if it has none. Never raises, even if its `__str__` does."""
    try:
        return shortened(str(error), 500) or type(error).__name__
    except Exception as failure:
        return f"(its text raises {type(failure).__name__})"


def fill_template(tokenizer: Any, chat: list[Any], **options: Any) -> str:
    """The text that a tokenizer's chat template makes of a chat. Raises EnvError where the template refuses it."""
    try:
        return str(tokenizer.apply_chat_template(chat, tokenize=False, **options))
    except Exception as error:  # a template is a program of the base's
        return _with_no_tools(tokenizer, chat, options, error)


def _with_no_tools(tokenizer: Any, chat: list[Any], options: Mapping[str, Any], error: Exception) -> str:
    """The same with an empty list of tools, which some templates cannot do without."""
    roles = ", ".join(message["role"] for message in chat)
    refusal = EnvError(f"The chat template refuses the messages {roles}: {error_line(error)}")
    if options.get("tools"):
        raise refusal from error
    try:
        none = {"tools": [], "functions": "[]", "datetime": "unknown"}
        return str(tokenizer.apply_chat_template(chat, tokenize=False, **{**options, **none}))
    except Exception:
        raise refusal from error


def filled(tokenizer: Any, chat: list[Any], **options: Any) -> str:
    """`fill_template`, but an empty text where the template refuses the chat."""
    try:
        return fill_template(tokenizer, chat, **options)
    except EnvError:
        return ""


def counted(number: int, things: str) -> str:
    """`1 row`, `2 rows`: a number with its noun, which is given in the plural and ends with `s`."""
    return f"{number} {things[:-1] if number == 1 else things}"


def keys_of(record: Mapping[Any, Any]) -> str:
    """`the keys 'a', 'b' and 7 more`, or `no keys`, of a record that may have any number of them."""
    named = ", ".join(shortened(repr(key), 40) for key in itertools.islice(record, MOST_NAMED))
    rest = f" and {len(record) - MOST_NAMED} more" if len(record) > MOST_NAMED else ""
    return f"the keys {named}{rest}" if record else "no keys"


def readable_name(name: str) -> str:
    """A file's name for display: control characters and lone surrogates become U+FFFD."""
    return _IN_NAMES.sub(REPLACEMENT, name.encode("utf-8", "replace").decode())


def has_controls(name: str) -> bool:
    """Whether a name holds control characters, line breaks among them."""
    return _IN_NAMES.search(name) is not None


def readable(data: bytes) -> str:
    """Decode UTF-8 with U+FFFD for invalid bytes and for control characters, which could drive a terminal.

    A carriage return ends a line: alone it would let a program write over what a terminal shows.
    """
    lines = data.decode("utf-8", "replace").replace("\r\n", "\n").replace("\r", "\n")
    return _CONTROLS.sub(REPLACEMENT, lines)


def one_item(value: Any) -> Any:
    """`value`, or the one element of an array as Python has it; None where it holds several, or a masked one."""
    if not callable(getattr(value, "item", None)):
        return value
    # A method of pandas' objects, an array of NumPy's masked ones.
    masked = getattr(getattr(value, "mask", None), "any", bool)()
    try:
        return value.item() if all(size == 1 for size in getattr(value, "shape", ())) and not masked else None
    except (TypeError, ValueError, RuntimeError):
        return None


def real_number(value: Any) -> float | None:
    """`value` as a finite float; None if it is not one real number that a float can hold.

    A bool and an array of one number are numbers; a text is none.
    """
    if not isinstance(value := one_item(value), (numbers.Real, Decimal)):
        return None
    try:
        number = float(value)
    except (OverflowError, ValueError):
        return None
    return number if math.isfinite(number) else None
