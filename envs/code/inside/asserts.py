"""Runs the tests of a data set, `tests.py`, against recorded results of the program's functions.

The program itself is not here, so nothing it does can touch the tests or read their expected values: its functions are
stand-ins that look results up in `table.json`. A call whose result is not known yet is written down instead; the
calls are then made elsewhere (`calls.py`) and the tests run again, until every call is known.

Every `assert` is one test, which passes if it is reached and holds each time; `assert False` passes if it is never
reached, and the code around it raised nothing that the tests do not catch themselves.
"""

from __future__ import annotations

import ast
import builtins
import json
import random

from compare import read
from moving import decode, encode

TYPE_CHECKING = False
"""As in `moving.py`."""
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any


class Missed(BaseException):
    """The result of a call is not known yet."""


def key_of(name: str, args: list[Any], kwargs: dict[str, Any]) -> str:
    return json.dumps([name, args, sorted(kwargs.items())])


class Instrument(ast.NodeTransformer):
    """Numbers the asserts, and continues after a failed statement."""

    def __init__(self) -> None:
        self.never: list[bool] = []
        """per assert: whether it is `assert False`"""
        self.spans: list[tuple[int, int]] = []
        """per statement that may fail: the asserts in it, as (first, behind the last)"""
        self.guarded = 0
        """number of open try and with blocks, which handle failures inside them"""

    def visit_Assert(self, node: ast.Assert) -> ast.stmt:
        number = first = len(self.never)
        self.never.append(isinstance(node.test, ast.Constant) and not node.test.value)
        # The result is noted here, since the program may catch the AssertionError.
        call = ast.Call(
            ast.Name("__holds__", ast.Load()),
            [ast.Constant(number), ast.Lambda(ast.arguments([], [], None, [], [], None, []), node.test)],
            [],
        )
        return self._let_fail(ast.Expr(call), first)

    def _let_fail(self, node: ast.stmt, first: int) -> ast.stmt:
        if self.guarded:
            return node
        span = ast.Constant(len(self.spans))
        self.spans.append((first, len(self.never)))
        told = ast.Expr(ast.Call(ast.Name("__escaped__", ast.Load()), [span], []))
        return ast.Try([node], [ast.ExceptHandler(ast.Name("__Failed__", ast.Load()), None, [told])], [], [])

    def _simple(self, node: ast.stmt) -> ast.stmt:
        return self._let_fail(node, len(self.never))

    visit_Expr = visit_Assign = visit_AugAssign = visit_AnnAssign = visit_Delete = _simple

    def _loop(self, node: ast.stmt) -> ast.stmt:
        first = len(self.never)
        self.generic_visit(node)
        return self._let_fail(node, first)

    visit_For = visit_While = visit_If = _loop

    def _guard(self, node: ast.stmt) -> ast.stmt:
        first = len(self.never)
        self.guarded += 1
        self.generic_visit(node)
        self.guarded -= 1
        return self._let_fail(node, first)

    visit_Try = visit_With = _guard

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.stmt:
        guarded, self.guarded = self.guarded, 0 if node.name == "check" else 1
        # A helper returns or raises as written; only the tests themselves go on after a failure.
        self.generic_visit(node)
        self.guarded = guarded
        return node

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.stmt:
        return node

    def visit_Lambda(self, node: ast.Lambda) -> ast.expr:
        return node


def results_known(rounds: list[dict[str, Any]]) -> tuple[dict[str, Any], str, str]:
    """Call -> result, from the files of the rounds so far; and how the first of them that failed went."""
    known: dict[str, Any] = {}
    status, trace = "ok", ""
    for number, about in enumerate(rounds):
        with open(f"results_{number}.jsonl", "rb") as file:
            results, ended, why = read(file.read(), len(about["calls"]), about["status"], about["stderr"])
        lost: dict[str, Any] = {"error": "RuntimeError", "message": "the call gave no result"}
        results += [lost] * (len(about["calls"]) - len(results))
        if status == "ok":
            status, trace = ended, why
        for record, result in zip(about["calls"], results, strict=True):
            known[key_of(record["f"], record["args"], record["kwargs"])] = result
    return known, status, trace


class TestRun:
    """One run of the tests: the stand-ins look results up, and the instrumented asserts report here."""

    def __init__(self, known: dict[str, Any], in_place: bool, instrument: Instrument) -> None:
        self.known, self.in_place, self.instrument = known, in_place, instrument
        self.missed: dict[str, dict[str, Any]] = {}
        self.held: dict[int, bool] = {}
        self.asserting: list[int] = []

    def stand_in(self, name: str) -> Callable[..., Any]:
        """The program's function `name`, as a look-up of its recorded results."""

        def call(*args: Any, **kwargs: Any) -> Any:
            coded, named = [encode(a) for a in args], {k: encode(v) for k, v in kwargs.items()}
            key = key_of(name, coded, named)
            if key not in self.known:
                self.missed[key] = {"f": name, "args": coded, "kwargs": named}
                raise Missed(name)
            result = self.known[key]
            if "value" not in result:
                kind = getattr(builtins, str(result.get("error")), RuntimeError)
                plain = isinstance(kind, type) and issubclass(kind, Exception)
                raise (kind if plain else RuntimeError)(str(result.get("message")))
            after = result.get("after")
            # Within an assert, the result is held against the arguments as they were: a program that empties a list
            # and returns it would otherwise be right about any function of it.
            if self.in_place and not self.asserting and isinstance(after, list):
                for before, changed in zip(args, after, strict=False):
                    _set(before, decode(changed))
            return decode(result["value"])

        call.__name__ = name
        return call

    def holds(self, number: int, test: Callable[[], object]) -> None:
        """Called in place of assert `number`."""
        self.asserting.append(number)
        try:
            good = bool(test())
        except BaseException:
            self.held[number] = False
            raise
        finally:
            self.asserting.pop()
        self.held[number] = self.held.get(number, True) and good
        if not good:
            raise AssertionError

    def escaped(self, span: int) -> None:
        """A statement has failed: each `assert False` in it fails too, since an error has passed it over."""
        first, behind = self.instrument.spans[span]
        for number in range(first, behind):
            if self.instrument.never[number]:
                self.held[number] = False

    def passed(self) -> list[bool]:
        never = self.instrument.never
        return [number not in self.held if n else self.held.get(number, False) for number, n in enumerate(never)]


def main() -> dict[str, Any]:
    """`{"missed": [calls], "passed": [bool], "unusable": text or null, "status": text, "trace": text}`."""
    with open("tests.py", encoding="utf-8") as file:
        source = file.read()
    with open("table.json", encoding="utf-8") as file:
        given = json.load(file)
    known, status, trace = results_known(given["rounds"])
    instrument = Instrument()
    tree = instrument.visit(ast.parse(source, "tests.py"))
    program = compile(ast.fix_missing_locations(tree), "tests.py", "exec", dont_inherit=True)
    trial = TestRun(known, given["in_place"], instrument)
    asked = {"__holds__": trial.holds, "__escaped__": trial.escaped, "__Failed__": (Exception, Missed)}
    space: dict[str, Any] = {"__name__": "tests", **asked}
    # Tests that draw at random must ask for the same calls in every round.
    random.seed(0)
    try:
        if given["before"]:
            exec(compile(given["before"], "before.py", "exec", dont_inherit=True), space)
        space.update({name: trial.stand_in(name) for name in given["names"]})
        exec(program, space)
        if "check" in space and given["entry"]:
            space["check"](space[given["entry"]])
        unusable = None
    except Missed:
        unusable = None
    except Exception as error:
        unusable = f"{type(error).__name__}: {error}"[:300]
    outcome = {"missed": list(trial.missed.values()), "passed": trial.passed(), "unusable": unusable}
    return {**outcome, "status": status, "trace": trace}


def _set(before: Any, after: Any) -> None:
    """Apply the call's changes to a mutable argument."""
    if isinstance(before, list):
        before[:] = after
    elif isinstance(before, (dict, set)):
        before.clear()
        before.update(after)
