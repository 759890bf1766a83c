"""Runs the tests of a data set, `tests.py`, against what the program's functions were seen to return.

The program itself is not here, so nothing it does can touch the tests or read what they expect: its functions are
stand-ins that look results up in `table.json`. A call whose result is not known yet is written down instead; the
calls are then made elsewhere (`calls.py`) and the tests run again, until every call is known.

Every `assert` is one test, which passes if it is reached and holds each time; `assert False` passes if it is never
reached. Writes `outcome.json`: `{"missed": [calls], "passed": [bool], "unusable": text or null}`.
"""

import ast
import builtins
import json
import os
import random
import sys

sys.path.insert(0, os.getcwd())
from moving import decode, encode


class Missed(BaseException):
    """The result of a call is not known yet."""


def key_of(name, args, kwargs):
    return json.dumps([name, args, sorted(kwargs.items())])


class Instrument(ast.NodeTransformer):
    """Numbers the asserts, and lets what follows a statement that failed go on."""

    def __init__(self):
        self.never = []
        """per assert: whether it is `assert False`"""
        self.guarded = 0
        """how many try and with blocks are open: what fails in there is theirs to handle"""

    def visit_Assert(self, node):
        number = len(self.never)
        self.never.append(isinstance(node.test, ast.Constant) and not node.test.value)
        # Whether it holds is noted even where somebody catches the AssertionError.
        call = ast.Call(
            ast.Name("__holds__", ast.Load()),
            [ast.Constant(number), ast.Lambda(ast.arguments([], [], None, [], [], None, []), node.test)],
            [],
        )
        return self._let_fail(ast.Expr(call))

    def _let_fail(self, node):
        if self.guarded:
            return node
        return ast.Try([node], [ast.ExceptHandler(ast.Name("__Failed__", ast.Load()), None, [ast.Pass()])], [], [])

    def _simple(self, node):
        return self._let_fail(node)

    visit_Expr = visit_Assign = visit_AugAssign = visit_AnnAssign = visit_Delete = _simple

    def _loop(self, node):
        self.generic_visit(node)
        return self._let_fail(node)

    visit_For = visit_While = visit_If = _loop

    def _guard(self, node):
        self.guarded += 1
        self.generic_visit(node)
        self.guarded -= 1
        return self._let_fail(node)

    visit_Try = visit_With = _guard

    def visit_FunctionDef(self, node):
        guarded, self.guarded = self.guarded, 0 if node.name == "check" else 1
        # A helper returns or raises as written; only the tests themselves go on after a failure.
        self.generic_visit(node)
        self.guarded = guarded
        return node

    def visit_ClassDef(self, node):
        return node

    def visit_Lambda(self, node):
        return node


def main():
    with open("tests.py", encoding="utf-8") as file:
        source = file.read()
    with open("table.json", encoding="utf-8") as file:
        given = json.load(file)
    known = {key_of(r["f"], r["args"], r["kwargs"]): r["result"] for r in given["known"]}
    missed, held = {}, {}

    def stand_in(name):
        def call(*args, **kwargs):
            coded, named = [encode(a) for a in args], {k: encode(v) for k, v in kwargs.items()}
            key = key_of(name, coded, named)
            if key not in known:
                missed[key] = {"f": name, "args": coded, "kwargs": named}
                raise Missed(name)
            result = known[key]
            if "error" in result:
                kind = getattr(builtins, result["error"], RuntimeError)
                plain = isinstance(kind, type) and issubclass(kind, Exception)
                raise (kind if plain else RuntimeError)(result["message"])
            for before, after in zip(args, result["after"] or (), strict=False):
                _set(before, decode(after))
            return decode(result["value"])

        call.__name__ = name
        return call

    def holds(number, test):
        try:
            good = bool(test())
        except BaseException:
            held[number] = False
            raise
        held[number] = held.get(number, True) and good
        if not good:
            raise AssertionError

    instrument = Instrument()
    tree = instrument.visit(ast.parse(source, "tests.py"))
    program = compile(ast.fix_missing_locations(tree), "tests.py", "exec")
    space: dict = {"__name__": "tests", "__holds__": holds, "__Failed__": (Exception, Missed)}
    random.seed(0)
    try:
        if given["before"]:
            exec(compile(given["before"], "before.py", "exec"), space)
        space.update({name: stand_in(name) for name in given["names"]})
        exec(program, space)
        if "check" in space and given["entry"]:
            space["check"](space[given["entry"]])
        unusable = None
    except Missed:
        unusable = None
    except Exception as error:
        unusable = f"{type(error).__name__}: {error}"[:300]
    passed = [number not in held if never else held.get(number, False) for number, never in enumerate(instrument.never)]
    with open("outcome.json", "w", encoding="utf-8") as file:
        json.dump({"missed": list(missed.values()), "passed": passed, "unusable": unusable}, file)


def _set(before, after):
    """Make a mutable argument what the call has made of it."""
    if isinstance(before, list):
        before[:] = after
    elif isinstance(before, (dict, set)):
        before.clear()
        before.update(after)


main()
