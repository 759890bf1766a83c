"""Makes the calls of `calls.json` on the functions of `solution.py`; writes what came of each to `results.jsonl`.

What is expected is not here: it is compared where the program cannot reach it. A program that forges this file does no
better than one that returns the forged values.

One line for the program itself, `{"ready": true}` or `{"failed": kind, "trace": text}`, then one per call:
`{"value": coded, "after": [coded arguments] or null}` or `{"error": class, "message": text, "trace": text}`.
"""

import builtins
import copy
import json
import linecache
import os
import signal
import sys
import traceback

sys.path.insert(0, os.getcwd())
from moving import decode, encode

SLOW = 2
"""Calls that may run out of time before the others are given up."""


class OutOfTime(BaseException):
    """A call took too long."""


def told(error, source):
    """The end of a traceback, without the lines of this file."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename == "solution.py"]
    head = ["Traceback (most recent call last):\n", *traceback.format_list(frames)[-5:]] if frames else []
    return "".join([*head, *traceback.format_exception_only(type(error), error)])[-2000:]


def main():
    with open("solution.py", encoding="utf-8") as file:
        source = file.read()
    with open("calls.json", encoding="utf-8") as file:
        asked = json.load(file)
    results = open("results.jsonl", "w", encoding="utf-8")  # noqa: SIM115 (kept for as long as there are calls)

    def write(record):
        results.write(json.dumps(record) + "\n")
        results.flush()

    def late(*_):
        raise OutOfTime(f"no result after {asked['call_s']:g} s")

    signal.signal(signal.SIGALRM, late)
    linecache.cache["solution.py"] = (len(source), None, source.splitlines(True), "solution.py")
    space: dict = {"__name__": "solution", "__builtins__": builtins}
    try:
        signal.setitimer(signal.ITIMER_REAL, asked["load_s"])
        exec(compile(asked["before"], "before.py", "exec"), space)
        exec(compile(source, "solution.py", "exec"), space)
        signal.setitimer(signal.ITIMER_REAL, 0)
    except BaseException as error:
        signal.setitimer(signal.ITIMER_REAL, 0)
        write({"failed": type(error).__name__, "trace": told(error, source)})
        return
    write({"ready": True})
    slow = 0
    for call in asked["calls"]:
        if slow == SLOW:
            write({"error": "OutOfTime", "message": "not called: earlier calls took too long", "trace": ""})
            continue
        try:
            arguments = [decode(item) for item in call["args"]]
            keywords = {name: decode(item) for name, item in call["kwargs"].items()}
            function = space.get(call["f"])
            if function is None and "Solution" in space:
                function = getattr(space["Solution"](), call["f"], None)
            if function is None:
                raise NameError(f"the program defines no function {call['f']!r}")
            before = copy.deepcopy(arguments)
            signal.setitimer(signal.ITIMER_REAL, asked["call_s"])
            value = encode(function(*arguments, **keywords))
            signal.setitimer(signal.ITIMER_REAL, 0)
            changed = repr(arguments) != repr(before)
            write({"value": value, "after": [encode(item) for item in arguments] if changed else None})
        except BaseException as error:
            signal.setitimer(signal.ITIMER_REAL, 0)
            name = "TypeError" if type(error).__name__ == "CannotMove" else type(error).__name__
            slow += name == "OutOfTime"
            write({"error": name, "message": str(error)[:500], "trace": told(error, source)})
    sys.stdout.flush()


main()
