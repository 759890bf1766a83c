"""Values as JSON and back: plain data only, so that nothing a program made can act where it is read.

Kinds that JSON lacks are lists that begin with a letter: tuples, sets, dictionaries of any keys, bytes, numbers that
are large or not finite. An object of another class does not travel; an iterator travels as the list of its items.
"""

from __future__ import annotations

import collections.abc

TYPE_CHECKING = False
"""Type checkers take it for true; here nothing of typing is imported."""
if TYPE_CHECKING:
    from typing import Any

DEEPEST = 40
LONGEST = 200_000
"""Items of one value, all levels together."""


class CannotMove(Exception):
    """The value is not plain data, or too large."""


def encode(value: Any) -> Any:
    """JSON-able form of `value`. Raises CannotMove."""
    room = [LONGEST]
    return _encode(value, DEEPEST, room)


def decode(coded: Any) -> Any:
    """The value that `encode` was given. Raises CannotMove for anything that `encode` does not make."""
    try:
        return _decode(coded)
    except (TypeError, ValueError, IndexError, KeyError, RecursionError, OverflowError) as error:
        raise CannotMove(f"this is no encoded value: {error}") from None


def _encode(value: Any, depth: int, room: list[int]) -> Any:
    room[0] -= 1
    if depth < 0 or room[0] < 0:
        raise CannotMove("the value is too large or nested too deeply")
    # Numbers and arrays of numpy, by what they offer rather than by name.
    if type(value).__module__.split(".")[0] == "numpy" and hasattr(value, "tolist"):
        value = value.tolist()
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        _take(room, len(value))
        return str.__str__(value)
    if isinstance(value, int):
        return int(value) if abs(value) < 2**53 else ["i", hex(value)]
    if isinstance(value, float):
        return ["f", float.__repr__(value)]
    if isinstance(value, complex):
        return ["c", float.__repr__(value.real), float.__repr__(value.imag)]
    if isinstance(value, (bytes, bytearray)):
        _take(room, len(value))
        return ["b", bytes(value).hex()]
    if isinstance(value, dict):
        return ["d", [[_encode(k, depth - 1, room), _encode(v, depth - 1, room)] for k, v in value.items()]]
    if isinstance(value, range):
        if abs(value.stop - value.start) // abs(value.step) > LONGEST:
            raise CannotMove("the value is too large")  # few digits, but a comparison may walk through it
        return ["r", value.start, value.stop, value.step]
    if isinstance(value, (list, tuple)):
        return ["l" if isinstance(value, list) else "t", [_encode(item, depth - 1, room) for item in value]]
    if isinstance(value, (set, frozenset)):
        letter = "s" if isinstance(value, set) else "z"
        return [letter, sorted((_encode(item, depth - 1, room) for item in value), key=repr)]
    if isinstance(value, (collections.abc.Iterator, collections.deque)):
        items = []
        for item in value:
            items.append(_encode(item, depth - 1, room))
        return ["n", items]
    raise CannotMove(f"a value of type {type(value).__name__} is not plain data")


def _take(room: list[int], characters: int) -> None:
    room[0] -= characters // 100
    if room[0] < 0:
        raise CannotMove("the value is too large")


def _decode(coded: Any) -> Any:
    if coded is None or isinstance(coded, (bool, int, str)):
        return coded
    if not isinstance(coded, list):
        raise TypeError(f"unexpected {type(coded).__name__}")
    letter, *rest = coded
    if letter == "i":
        return int(rest[0], 16)
    if letter == "f":
        return float(rest[0])
    if letter == "c":
        return complex(float(rest[0]), float(rest[1]))
    if letter == "b":
        return bytes.fromhex(rest[0])
    if letter == "r":
        return range(*rest)
    if letter == "d":
        return {_decode(key): _decode(value) for key, value in rest[0]}
    items = [_decode(item) for item in rest[0]]
    if letter == "n":
        return iter(items)
    return {"l": list, "t": tuple, "s": set, "z": frozenset}[letter](items)
