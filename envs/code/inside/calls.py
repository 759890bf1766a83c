"""Makes the calls of `calls.json` on the functions of `solution.py`; `driving.py` writes down what each returns.

Expected results are not here: they are compared out of the program's reach. A program that forges a result does no
better than one that returns the forged value. A result is `{"value": coded, "after": [coded arguments] or null}`.
"""

from __future__ import annotations

import builtins
import copy
import linecache
import os
import sys

sys.path.insert(0, os.getcwd())
from driving import drive
from moving import decode, encode

TYPE_CHECKING = False
"""As in `moving.py`."""
if TYPE_CHECKING:
    from typing import Any


def load(asked: dict[str, Any]) -> dict[str, Any]:
    """The names that the program defines."""
    with open("solution.py", encoding="utf-8") as file:
        source = file.read()
    linecache.cache["solution.py"] = (len(source), None, source.splitlines(True), "solution.py")
    space: dict[str, Any] = {"__name__": "solution", "__builtins__": builtins}
    exec(compile(asked["before"], "before.py", "exec", dont_inherit=True), space)
    exec(compile(source, "solution.py", "exec", dont_inherit=True), space)
    return space


def call(space: dict[str, Any], item: dict[str, Any], asked: dict[str, Any]) -> dict[str, Any]:
    """One call's result."""
    arguments = [decode(argument) for argument in item["args"]]
    keywords = {name: decode(argument) for name, argument in item["kwargs"].items()}
    function = space.get(item["f"])
    if function is None and "Solution" in space:
        function = getattr(space["Solution"](), item["f"], None)
    if function is None:
        raise NameError(f"the program defines no function {item['f']!r}")
    before = copy.deepcopy(arguments)
    value = encode(function(*arguments, **keywords))
    changed = repr(arguments) != repr(before)
    return {"value": value, "after": [encode(argument) for argument in arguments] if changed else None}


drive("calls.json", "calls", load, call)
