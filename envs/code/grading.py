"""Grades a program: how many of a problem's tests it passes.

A program never shares a process with its expected results. It runs in the sandbox with the inputs alone, one by one;
its results come back as plain data and are compared in the judging room, a second run in the sandbox that holds the
tests and the data but not the program. So printing success, leaving early with exit code 0, forging the file of results
or searching memory, frames and files for the expected values gain nothing: a test passes if the right value came back
for its input, and in no other way.

The sandbox returns only the program's own claim about the results of its functions. A program with a memorised table of
right answers passes as well; only hidden tests can detect that.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import mafrt.sandbox
from mafrt.core.errors import EnvError, SandboxError
from mafrt.environment.python_tool import PythonTool, Ran
from mafrt.envs.code.inside.moving import encode
from mafrt.envs.code.tasks import Asserts, Call, CodeTask
from mafrt.sandbox.judging import Undecided, judge

INSIDE = Path(__file__).parent / "inside"
MOST_ROUNDS = 6
"""How deep the calls in tests may build on the results of others."""
MOST_CALLS = 5000
RESULTS = "results.jsonl"
COMPARING = ("moving", "compare")
TESTING = ("moving", "compare", "asserts")
"""Modules of the judging room."""
JUDGE_S = 30.0
MOST_ANSWER_KIB = 2048


@dataclass(frozen=True)
class Grade:
    """How a program did."""

    passed: int
    total: int
    status: str = "ok"
    """`ok`; `syntax`, `error`, `timeout`, `memory` or `killed` where it could not be made sense of or failed"""
    trace: str = ""
    """The first failure as shown to the agent, without the expected result."""

    @property
    def fraction(self) -> float:
        return self.passed / self.total


class Grader:
    """Grades programs with one tool; caches everything that does not depend on the program. Thread-safe.

    `call_s`: seconds that one call, or one run on an input, may take.
    """

    def __init__(self, tool: PythonTool, call_s: float = 2.0) -> None:
        self.tool, self.call_s = tool, call_s
        self._first: dict[Asserts, list[Call]] = {}
        self._in_place: dict[Asserts, bool] = {}

    def grade(self, task: CodeTask, program: str) -> Grade:
        """Raises EnvError if the sandbox failed, or if the tests themselves cannot be run."""
        if task.asserts is not None:
            return self._by_asserts(task, task.asserts, program)
        tests: list[Any]
        if task.stdin:
            ran = self._run_inputs(program, [test.given for test in task.stdin])
            kind, tests = "stdin", [test.expected for test in task.stdin]
        else:
            ran = self._run_calls(task, program, [test.call for test in task.calls])
            kind, tests = "calls", [{"expected": encode(t.expected), "loose": t.loose} for t in task.calls]
        expected = {"kind": kind, "tests": tests, "status": ran.status, "stderr": ran.stderr[-1000:]}
        given = {RESULTS: ran.files.get(RESULTS, b""), "expected.json": json.dumps(expected).encode()}
        try:
            told = self._judge("compare", "judge", given, COMPARING)
        except Undecided as undecided:
            return Grade(
                0,
                task.tests,
                ran.status if ran.status != "ok" else "error",
                f"The results cannot be read: {undecided}.",
            )
        return Grade(sum(map(bool, told["good"][: task.tests])), task.tests, str(told["status"]), str(told["trace"]))

    # ------------------------------------------------------------------------------------------------ the program

    def _run_calls(self, task: CodeTask, program: str, calls: Sequence[Call]) -> Ran:
        asked = {"before": task.before, "calls": [call.record() for call in calls]}
        return self._run(program, "calls", asked)

    def _run_inputs(self, program: str, inputs: Sequence[str]) -> Ran:
        return self._run(program, "inputs", {"inputs": list(inputs)})

    def _run(self, program: str, what: str, asked: dict[str, Any]) -> Ran:
        asked |= {"call_s": self.call_s, "load_s": self.tool.timeout_s / 2}
        files = {"solution.py": program.encode("utf-8", "replace"), f"{what}.json": json.dumps(asked).encode()}
        files |= {f"{name}.py": _inside(name).encode() for name in ("driving", "moving")}
        return self.tool.run(_inside("calls" if what == "calls" else "stdin"), files, [RESULTS])

    def _judge(self, module: str, function: str, given: dict[str, bytes], ours: Sequence[str]) -> dict[str, Any]:
        """An answer of the judging room. Raises Undecided."""
        sources = {f"{name}.py": _inside(name).encode() for name in ours}
        try:
            sandbox = mafrt.sandbox.shared_sandbox(self.tool.sandbox)
        except SandboxError as error:
            raise EnvError(f"the sandbox failed, so nothing is known about a program: {error}") from error
        return judge(sandbox, sources, (module, function, ()), given, timeout_s=JUDGE_S, most_kib=MOST_ANSWER_KIB)

    # -------------------------------------------------------------------------------------------------- the tests

    def _by_asserts(self, task: CodeTask, tests: Asserts, program: str) -> Grade:
        if tests not in self._in_place:
            self._in_place[tests] = self._changes_arguments(task, tests)
        return self._ask_asserts(task, tests, program, self._in_place[tests])

    def _changes_arguments(self, task: CodeTask, tests: Asserts) -> bool:
        """Whether the tests look at arguments that a call has changed: the reference fails where it may change none."""
        if task.reference is not None:
            return self._ask_asserts(task, tests, task.reference, False).passed < tests.count
        bare = [node.value for node in ast.walk(ast.parse(tests.source)) if isinstance(node, ast.Expr)]
        called = [node.func for node in bare if isinstance(node, ast.Call)]
        return any(isinstance(name, ast.Name) and name.id in (*tests.names, "candidate") for name in called)

    def _ask_asserts(self, task: CodeTask, tests: Asserts, program: str, in_place: bool) -> Grade:
        rounds: list[tuple[list[Call], Ran]] = []
        missed = self._first.get(tests)
        if missed is None:
            missed = self._first[tests] = self._run_asserts(task, tests, rounds, in_place)["missed"]
        told: dict[str, Any] = {"passed": [], "status": "ok", "trace": ""}
        known = 0
        for _ in range(MOST_ROUNDS):
            if missed:
                rounds.append((missed, self._run_calls(task, program, missed)))
                known += len(missed)
            told = self._run_asserts(task, tests, rounds, in_place)
            missed = told["missed"]
            if not missed or known + len(missed) > MOST_CALLS:
                break
        passed = 0 if missed else sum(map(bool, told["passed"][: tests.count]))
        return Grade(passed, tests.count, str(told["status"]), str(told["trace"]))

    def _run_asserts(
        self, task: CodeTask, tests: Asserts, rounds: Sequence[tuple[list[Call], Ran]], in_place: bool
    ) -> dict[str, Any]:
        """Calls whose results the tests still need (`missed`), and which asserts hold if they need none (`passed`)."""
        about = [
            {"calls": [call.record() for call in calls], "status": ran.status, "stderr": ran.stderr[-1000:]}
            for calls, ran in rounds
        ]
        table = {
            "rounds": about,
            "in_place": in_place,
            "names": list(tests.names),
            "entry": tests.entry,
            "before": task.before if tests.entry else "",
        }
        given = {"tests.py": tests.source.encode(), "table.json": json.dumps(table).encode()}
        given |= {f"results_{number}.jsonl": ran.files.get(RESULTS, b"") for number, (_, ran) in enumerate(rounds)}
        why: str | None
        try:
            told = self._judge("asserts", "main", given, TESTING)
            why = told["unusable"]
        except (Undecided, EnvError) as error:
            if isinstance(error.__cause__, SandboxError):
                raise
            told, why = {}, str(error)
        if why is not None:
            if rounds:  # what the program returned broke them
                return {"missed": [], "passed": [], "status": "error", "trace": ""}
            raise EnvError(f"the tests of {task.id} cannot be run: {why}")
        missed = [Call(c["f"], _frozen(c["args"]), _frozen(sorted(c["kwargs"].items()))) for c in told["missed"]]
        return {**told, "missed": missed}


@cache
def _inside(name: str) -> str:
    return (INSIDE / f"{name}.py").read_text(encoding="utf-8")


def _frozen(value: Any) -> Any:
    return tuple(_frozen(item) for item in value) if isinstance(value, list) else value
