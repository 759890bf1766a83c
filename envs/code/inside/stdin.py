"""Runs `solution.py` once per input of `inputs.json`; `driving.py` writes down what each run printed.

As in `calls.py`, expected results are not here. A result is `{"printed": text}`.
"""

from __future__ import annotations

import builtins
import linecache
import os
import sys

sys.path.insert(0, os.getcwd())
from driving import drive

TYPE_CHECKING = False
"""As in `moving.py`."""
if TYPE_CHECKING:
    from types import CodeType
    from typing import Any

MOST = 1_000_000
"""Bytes of output that are read."""


def load(asked: dict[str, Any]) -> CodeType:
    """The compiled program."""
    with open("solution.py", encoding="utf-8") as file:
        source = file.read()
    linecache.cache["solution.py"] = (len(source), None, source.splitlines(True), "solution.py")
    return compile(source, "solution.py", "exec", dont_inherit=True)


def run(program: CodeType, text: str, asked: dict[str, Any]) -> dict[str, Any]:
    """Output of the program for the input `text`, read either through Python's streams or through the descriptors."""
    with open("stdin.txt", "w+", encoding="utf-8") as given, open("stdout.txt", "w+b") as taken:
        given.write(text)
        given.flush()
        given.seek(0)
        saved = os.dup(0), os.dup(1)
        os.dup2(given.fileno(), 0)
        os.dup2(taken.fileno(), 1)
        streams = sys.stdin, sys.stdout
        sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115 (it is the program's)
        sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
        try:
            exec(program, {"__name__": "__main__", "__builtins__": builtins})
        except SystemExit as error:
            if error.code not in (None, 0):
                raise
        finally:
            sys.stdout.flush()
            sys.stdin, sys.stdout = streams
            for descriptor, old in enumerate(saved):
                os.dup2(old, descriptor)
                os.close(old)
        taken.seek(0)
        return {"printed": taken.read(MOST).decode("utf-8", "replace")}


drive("inputs.json", "inputs", load, run)
