"""Runs a program in a process of its own, and hands it one input at a time. Runs in the sandbox.

The process that holds the inputs and the results is not the program's: the file of inputs is gone before the program
starts, so that nothing of a later input can be read, and only the process outside writes the file of results.
"""

from __future__ import annotations

import builtins
import contextlib
import ctypes
import json
import os
import select
import signal
import time

TYPE_CHECKING = False
"""As in `moving.py`."""
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, TextIO

RESULTS = "results.jsonl"
MOST_BYTES = 16 * 2**20
"""Of all results together."""
SLOW = 2
"""Inputs that may run out of time before the others are given up."""


class OutOfTime(BaseException):
    """An input took too long."""


def drive(file: str, items: str, load: Callable[..., Any], handle: Callable[..., dict[str, Any]]) -> None:
    """Write a first line, `{"ready": true}` or `{"failed": kind, "trace": text}`, then a result per input.

    `items`: key of the inputs in the JSON of `file`. In the program's process, `load(asked)` gives the first
    argument of `handle(loaded, item, asked)`; `asked` is the rest of the file. An exception becomes
    `{"error": class, "message": text, "trace": text}`.
    """
    down, up = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        os.close(down[1])
        os.close(up[0])
        try:
            _serve(open(down[0]), up[1], load, handle)  # noqa: SIM115 (it is open as long as the process lives)
        finally:
            os._exit(0)
    os.close(down[0])
    os.close(up[1])
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)  # not dumpable: its memory is closed to the program
    with open(file, encoding="utf-8") as opened:
        asked = json.load(opened)
    os.remove(file)
    waiting = asked.pop(items)
    lines = _ask(child, down[1], up[0], asked, waiting)
    with contextlib.suppress(OSError):
        os.kill(child, signal.SIGKILL)
    with contextlib.suppress(OSError):
        os.remove(RESULTS)
    with open(RESULTS, "x", encoding="utf-8") as opened:
        opened.write("".join(line + "\n" for line in lines))


def _ask(child: int, down: int, up: int, asked: dict[str, Any], waiting: list[Any]) -> list[str]:
    """Lines of the program's process, as far as they come."""
    lines: list[str] = []
    buffer, slow = bytearray(), 0
    _send(down, asked)
    first = _line(up, buffer, asked["load_s"] + 2.0)
    if not first:
        return lines if first is None else [json.dumps({"failed": "OutOfTime", "trace": "OutOfTime: it did not load"})]
    lines.append(first)
    for item in waiting if '"ready"' in first else ():
        if slow >= SLOW:
            lines.append(json.dumps(_error("OutOfTime", "not run: earlier inputs took too long")))
            continue
        if not _send(down, item):
            break
        line = _line(up, buffer, asked["call_s"] + 2.0)
        if not line:
            lines += [] if line is None else [json.dumps(_error("OutOfTime", "no result in time"))]
            break
        slow += '"error": "OutOfTime"' in line[:40]
        lines.append(line)
        if sum(map(len, lines)) > MOST_BYTES:
            break
    return lines


def _send(down: int, message: Any) -> bool:
    data = json.dumps(message).encode() + b"\n"
    try:
        while data:
            data = data[os.write(down, data) :]
    except OSError:
        return False
    return True


def _line(up: int, buffer: bytearray, timeout_s: float) -> str | None:
    """The next line; None where the process ended or wrote too much, empty where it is late in spite of its alarm."""
    until = time.monotonic() + timeout_s
    while b"\n" not in buffer:
        left = until - time.monotonic()
        if left <= 0 or not select.select([up], [], [], left)[0]:
            return ""
        if len(buffer) > MOST_BYTES:
            return None
        data = os.read(up, 65536)
        if not data:
            return None
        buffer += data
    line, _, rest = bytes(buffer).partition(b"\n")
    buffer[:] = rest
    return line.decode("utf-8", "replace") or " "


def _serve(messages: TextIO, up: int, load: Callable[..., Any], handle: Callable[..., dict[str, Any]]) -> None:
    """In the program's process: answer every line."""

    def write(record: dict[str, Any]) -> None:
        data = json.dumps(record).encode() + b"\n"
        while data:
            data = data[os.write(up, data) :]

    def late(*_: object) -> None:
        raise OutOfTime("no result in time")

    asked = json.loads(messages.readline())
    signal.signal(signal.SIGALRM, late)
    try:
        signal.setitimer(signal.ITIMER_REAL, asked["load_s"])
        loaded = load(asked)
        signal.setitimer(signal.ITIMER_REAL, 0)
    except BaseException as error:
        signal.setitimer(signal.ITIMER_REAL, 0)
        write({"failed": type(error).__name__, "trace": told(error)})
        return
    write({"ready": True})
    for line in messages:
        try:
            signal.setitimer(signal.ITIMER_REAL, asked["call_s"])
            record = handle(loaded, json.loads(line), asked)
            signal.setitimer(signal.ITIMER_REAL, 0)
            write(record)
        except BaseException as error:
            signal.setitimer(signal.ITIMER_REAL, 0)
            write(_error(_kind(error), str(error)[:500], told(error)))


NOT_OF_A_TEXT = (UnicodeDecodeError, UnicodeEncodeError, UnicodeTranslateError, BaseExceptionGroup)


def _kind(error: BaseException) -> str:
    """The class that stands for an error outside: itself, or the nearest built-in one that takes a text.

    A test that expects a ValueError also takes an error of the program's own that is one, and a UnicodeDecodeError,
    which no text alone can make.
    """
    if type(error) is OutOfTime:
        return "OutOfTime"
    if type(error).__name__ == "CannotMove":
        return "TypeError"
    for kind in type(error).__mro__:
        if getattr(builtins, kind.__name__, None) is kind and not issubclass(kind, NOT_OF_A_TEXT):
            return str(kind.__name__)
    return "RuntimeError"


def _error(name: str, message: str, trace: str = "") -> dict[str, str]:
    return {"error": name, "message": message, "trace": trace}


def told(error: BaseException) -> str:
    """The end of a traceback, with the program's own lines only."""
    import traceback

    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename == "solution.py"]
    head = ["Traceback (most recent call last):\n", *traceback.format_list(frames)[-5:]] if frames else []
    return "".join([*head, *traceback.format_exception_only(type(error), error)])[-2000:]
