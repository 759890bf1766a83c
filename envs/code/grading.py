"""Grades a program: how many of a problem's tests it passes.

A program is never in one place with what is expected of it. It runs in the sandbox with the inputs alone; what it
returned or printed comes back as plain data and is compared here, or, where tests are code, by a second run in the
sandbox that holds the tests and the data but not the program. So printing success, leaving early with exit code 0,
forging the file of results or searching memory, frames and files for the expected values gain nothing: a test passes
if the right value came back for its input, and in no other way.

What leaves the sandbox is the program's word for what its functions return. A table of right answers that a program
holds by itself passes as well; only tests that are not shown can tell that apart.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from mafrt.core.errors import EnvError
from mafrt.environment.python_tool import PythonTool, Ran
from mafrt.envs.code.inside.moving import CannotMove, decode
from mafrt.envs.code.tasks import Asserts, Call, CallTest, CodeTask, StdinTest

INSIDE = Path(__file__).parent / "inside"
MOST_ROUNDS = 6
"""How deep the calls in tests may build on the results of others."""
MOST_CALLS = 5000
RESULTS = "results.jsonl"


@dataclass(frozen=True)
class Grade:
    """How a program did."""

    passed: int
    total: int
    status: str = "ok"
    """`ok`; `syntax`, `error`, `timeout`, `memory` or `killed` where it could not be made sense of or failed"""
    trace: str = ""
    """The first failure as the agent may see it: never what was expected."""

    @property
    def fraction(self) -> float:
        return self.passed / self.total


@dataclass(frozen=True)
class _Run:
    """What one run of a program left."""

    results: list[dict[str, Any]]
    """one per call or input, as far as it came"""
    status: str
    trace: str


class Grader:
    """Grades programs with one tool; keeps what does not depend on the program. Safe to share among threads.

    `call_s`: seconds that one call, or one run on an input, may take.
    """

    def __init__(self, tool: PythonTool, call_s: float = 2.0) -> None:
        self.tool, self.call_s = tool, call_s
        self._first: dict[Asserts, list[Call]] = {}

    def grade(self, task: CodeTask, program: str) -> Grade:
        """Raises EnvError if the sandbox failed, or if the tests themselves cannot be run."""
        if task.asserts is not None:
            return self._by_asserts(task, task.asserts, program)
        if task.stdin:
            run = self._run_inputs(program, [test.given for test in task.stdin])
            good = [_printed_right(result, test) for result, test in zip(run.results, task.stdin, strict=False)]
        else:
            run = self._run_calls(task, program, [test.call for test in task.calls])
            good = [_returned_right(result, test) for result, test in zip(run.results, task.calls, strict=False)]
        return Grade(sum(good), task.tests, run.status, run.trace)

    # ------------------------------------------------------------------------------------------------ the program

    def _run_calls(self, task: CodeTask, program: str, calls: Sequence[Call]) -> _Run:
        asked = {
            "before": task.before,
            "calls": [call.record() for call in calls],
            "call_s": self.call_s,
            "load_s": self.tool.timeout_s / 2,
        }
        files = {"solution.py": program.encode("utf-8", "replace"), "calls.json": json.dumps(asked).encode()}
        files["moving.py"] = _inside("moving").encode()
        return _read(self.tool.run(_inside("calls"), files, [RESULTS]), len(calls))

    def _run_inputs(self, program: str, inputs: Sequence[str]) -> _Run:
        asked = {"inputs": list(inputs), "call_s": self.call_s}
        files = {"solution.py": program.encode("utf-8", "replace"), "inputs.json": json.dumps(asked).encode()}
        return _read(self.tool.run(_inside("stdin"), files, [RESULTS]), len(inputs))

    # -------------------------------------------------------------------------------------------------- the tests

    def _by_asserts(self, task: CodeTask, tests: Asserts, program: str) -> Grade:
        known: dict[Call, dict[str, Any]] = {}
        missed = self._first.get(tests)
        if missed is None:
            missed = self._first[tests] = self._run_asserts(task, tests, {})[0]
        status, trace, passed = "ok", "", [False] * tests.count
        for _ in range(MOST_ROUNDS):
            if missed:
                run = self._run_calls(task, program, missed)
                if status == "ok":
                    status, trace = run.status, run.trace
                lost = {"error": "RuntimeError", "message": "the call gave no result"}
                results = run.results + [lost] * (len(missed) - len(run.results))
                known |= zip(missed, results, strict=True)
                if not run.results:
                    break
            missed, passed = self._run_asserts(task, tests, known)
            if not missed or len(known) + len(missed) > MOST_CALLS:
                break
        return Grade(0 if missed else sum(passed), tests.count, status, trace)

    def _run_asserts(
        self, task: CodeTask, tests: Asserts, known: Mapping[Call, dict[str, Any]]
    ) -> tuple[list[Call], list[bool]]:
        """Calls whose results the tests still need, and which asserts hold if they need none."""
        table = {
            "known": [{**call.record(), "result": result} for call, result in known.items()],
            "names": list(tests.names),
            "entry": tests.entry,
            "before": task.before if tests.entry else "",
        }
        files = {"tests.py": tests.source.encode(), "table.json": json.dumps(table).encode()}
        files["moving.py"] = _inside("moving").encode()
        ran = self.tool.run(_inside("asserts"), files, ["outcome.json"])
        outcome = _json(ran.files.get("outcome.json"))
        if not isinstance(outcome, dict) or outcome["unusable"]:
            why = outcome["unusable"] if isinstance(outcome, dict) else f"{ran.status}: {ran.stderr.strip()[-200:]}"
            if known:  # what the program returned broke them
                return [], [False] * tests.count
            raise EnvError(f"the tests of {task.id} cannot be run: {why}")
        missed = [Call(c["f"], _frozen(c["args"]), _frozen(sorted(c["kwargs"].items()))) for c in outcome["missed"]]
        return missed, outcome["passed"]


@cache
def _inside(name: str) -> str:
    return (INSIDE / f"{name}.py").read_text(encoding="utf-8")


def _read(ran: Ran, asked: int) -> _Run:
    """The results file of a run; whatever is wrong with it is the program's fault."""
    lines = [_json(line) for line in ran.files.get(RESULTS, b"").split(b"\n") if line.strip()]
    records = [line for line in lines if isinstance(line, dict)]
    first = records[0] if records else {}
    if "failed" in first:
        kind = str(first["failed"])
        status = "syntax" if kind in ("SyntaxError", "IndentationError", "TabError") else "error"
        return _Run([], "timeout" if kind == "OutOfTime" else status, str(first.get("trace", "")))
    results = records[1 : 1 + asked] if first.get("ready") is True else []
    failed = next((r for r in results if "error" in r), None)
    if len(results) < asked:
        status = ran.status if ran.status != "ok" else "error"
        said = "The program ended before all its tests were through" + (
            "." if ran.status in ("ok", "error") else f" ({ran.status})."
        )
        return _Run(results, status, "\n".join(part for part in (ran.stderr.strip()[-1000:], said) if part))
    if failed is None:
        return _Run(results, "ok", "")
    status = "timeout" if failed["error"] == "OutOfTime" else "error"
    return _Run(results, status, str(failed.get("trace", "")))


def _json(data: bytes | None) -> Any:
    try:
        return None if data is None else json.loads(data)
    except (ValueError, RecursionError):
        return None


def _frozen(value: Any) -> Any:
    return tuple(_frozen(item) for item in value) if isinstance(value, list) else value


# ------------------------------------------------------------------------------------------------------- comparison


def _returned_right(result: Mapping[str, Any], test: CallTest) -> bool:
    if "value" not in result:
        return False
    try:
        value = decode(result["value"])
        if not test.loose:
            return bool(value == test.expected)
        return _alike(value, test.expected) or (
            isinstance(test.expected, list) and len(test.expected) == 1 and _alike(value, test.expected[0])
        )
    except (CannotMove, RecursionError):
        return False


def _alike(value: Any, expected: Any) -> bool:
    if isinstance(value, (list, tuple)) and isinstance(expected, (list, tuple)):
        return len(value) == len(expected) and all(map(_alike, value, expected))
    if isinstance(value, float) or isinstance(expected, float):
        numbers = (int, float)
        if not isinstance(value, numbers) or not isinstance(expected, numbers):
            return False
        return math.isclose(value, expected, rel_tol=1e-6, abs_tol=1e-6)
    return bool(value == expected)


def _printed_right(result: Mapping[str, Any], test: StdinTest) -> bool:
    """Lines are compared without the spaces at their ends, numbers with a point in them to six digits."""
    if not isinstance(result.get("printed"), str):
        return False
    printed, wanted = (
        [line.strip() for line in text.strip().split("\n")] for text in (result["printed"], test.expected)
    )
    if printed == wanted:
        return True
    pairs = list(zip(printed, wanted, strict=False))
    return len(printed) == len(wanted) and all(_same_line(a.split(), b.split()) for a, b in pairs)


def _lines(text: str) -> list[str]:
    return [line.strip() for line in text.strip().split("\n")]


def _same_line(printed: Sequence[str], wanted: Sequence[str]) -> bool:
    return len(printed) == len(wanted) and all(
        a == b or (_decimal(a) is not None and "." in b and _near(_decimal(a), _decimal(b)))
        for a, b in zip(printed, wanted, strict=True)
    )


def _decimal(word: str) -> float | None:
    try:
        return float(word) if len(word) < 40 else None
    except ValueError:
        return None


def _near(left: float | None, right: float | None) -> bool:
    return left is not None and right is not None and math.isclose(left, right, rel_tol=1e-6, abs_tol=1e-6)
