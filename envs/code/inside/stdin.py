"""Runs `solution.py` once per input of `inputs.json`; writes what each run printed to `results.jsonl`.

As in `calls.py`, what is expected is not here. One line `{"ready": true}` or `{"failed": kind, "trace": text}`, then
one per input: `{"printed": text}` or `{"error": class, "message": text, "trace": text}`.
"""

import builtins
import json
import linecache
import os
import signal
import sys
import traceback

MOST = 1_000_000
"""Bytes of output that are read."""
SLOW = 2
"""Runs that may run out of time before the others are given up."""


class OutOfTime(BaseException):
    """A run took too long."""


def told(error):
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename == "solution.py"]
    head = ["Traceback (most recent call last):\n", *traceback.format_list(frames)[-5:]] if frames else []
    return "".join([*head, *traceback.format_exception_only(type(error), error)])[-2000:]


def run(program, text, limit):
    """What the program prints when it reads `text`, whether through Python's streams or through the descriptors."""
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
            signal.setitimer(signal.ITIMER_REAL, limit)
            exec(program, {"__name__": "__main__", "__builtins__": builtins})
        except SystemExit as error:
            if error.code not in (None, 0):
                raise
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            sys.stdout.flush()
            sys.stdin, sys.stdout = streams
            for descriptor, old in enumerate(saved):
                os.dup2(old, descriptor)
                os.close(old)
        taken.seek(0)
        return taken.read(MOST).decode("utf-8", "replace")


def main():
    with open("solution.py", encoding="utf-8") as file:
        source = file.read()
    with open("inputs.json", encoding="utf-8") as file:
        asked = json.load(file)
    results = open("results.jsonl", "w", encoding="utf-8")  # noqa: SIM115

    def write(record):
        results.write(json.dumps(record) + "\n")
        results.flush()

    def late(*_):
        raise OutOfTime(f"no result after {asked['call_s']:g} s")

    signal.signal(signal.SIGALRM, late)
    linecache.cache["solution.py"] = (len(source), None, source.splitlines(True), "solution.py")
    try:
        program = compile(source, "solution.py", "exec")
    except BaseException as error:
        write({"failed": type(error).__name__, "trace": told(error)})
        return
    write({"ready": True})
    slow = 0
    for text in asked["inputs"]:
        if slow == SLOW:
            write({"error": "OutOfTime", "message": "not run: earlier inputs took too long", "trace": ""})
            continue
        try:
            write({"printed": run(program, text, asked["call_s"])})
        except BaseException as error:
            slow += isinstance(error, OutOfTime)
            write({"error": type(error).__name__, "message": str(error)[:500], "trace": told(error)})


main()
