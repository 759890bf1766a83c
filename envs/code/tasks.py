"""Reads programming problems from the files in which people have them, as JSON lines.

    HumanEval  {"prompt", "entry_point", "test"}            `test` defines check(candidate)
    MBPP       {"text" or "prompt", "test_list"}            asserts; `test_setup_code` or `test_imports` before them
    APPS       {"question", "input_output"}                 {"inputs", "outputs"}, with "fn_name" for calls, else stdin

`canonical_solution`, `code` and `solutions` are read as reference solutions where they are there. Nothing of a record
is run here; tests are parsed, so that a record that cannot be graded is found before any model is loaded.
"""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mafrt.core.errors import DataError
from mafrt.core.reading import parse_json
from mafrt.core.text import brief, clean_deep, error_line, keys_of
from mafrt.envs.code.inside.moving import CannotMove, encode
from mafrt.envs.data_files import clean_record, file_records

SHIPPED = Path(__file__).parent / "data"
SETS = ("functions", "programs")
"""Shipped problems: functions to write, and word problems whose result a program prints, which a small base can do."""
STATEMENTS = ("text", "prompt", "question", "problem", "statement", "description")


@dataclass(frozen=True)
class Call:
    """One call of a function of the program, arguments encoded by `inside.moving`."""

    function: str
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...] = ()

    def record(self) -> dict[str, Any]:
        """As `inside/calls.py` reads it."""
        return {"f": self.function, "args": list(self.args), "kwargs": dict(self.kwargs)}


@dataclass(frozen=True)
class CallTest:
    """A call and the value that it must return. Values are compared here; the sandbox never sees expected values."""

    call: Call
    expected: Any
    loose: bool = False
    """as APPS compares: tuples equal lists, floats to six digits, an answer may stand in a list of its own"""


@dataclass(frozen=True)
class StdinTest:
    """Input of the program and its required output."""

    given: str
    expected: str


@dataclass(frozen=True)
class Asserts:
    """Tests that are code. They run where the program is not (`inside/asserts.py`); each assert is one test."""

    source: str
    names: tuple[str, ...]
    """functions of the program that the tests call"""
    count: int
    entry: str = ""
    """argument of `check(candidate)`; empty if the tests define no check"""


@dataclass(frozen=True)
class CodeTask:
    """One problem. `id` is unique within its source."""

    id: str
    statement: str
    signature: str = ""
    """`f(a, b)`: required definitions, several with backticks between; empty for a program that reads and prints"""
    before: str = ""
    """code that stands before the program: imports and helpers that the statement promises"""
    calls: tuple[CallTest, ...] = ()
    stdin: tuple[StdinTest, ...] = ()
    asserts: Asserts | None = None
    reference: str | None = None

    @property
    def tests(self) -> int:
        """How many there are."""
        return len(self.calls) + len(self.stdin) + (self.asserts.count if self.asserts else 0)

    @property
    def functions(self) -> tuple[str, ...]:
        """Names that a program has to define; none for a program that reads and prints."""
        if self.asserts is not None:
            return self.asserts.names
        return tuple(dict.fromkeys(test.call.function for test in self.calls))

    @property
    def shown(self) -> str:
        """The problem as shown to the agents."""
        if not self.signature:
            return self.statement
        return f"{self.statement}\nDefine `{self.signature}`."


def load_tasks(source: str | Path | None = None, *, split: str = "train") -> tuple[CodeTask, ...]:
    """All problems of a JSON, JSONL or Parquet file, or of shipped ones: `functions` (also None) or `programs`.

    `split` is `train`, `validation` or `test`, of shipped problems. Raises DataError that names file, line and fault.
    """
    path = Path("functions" if source is None else source)
    if str(path) in SETS and not path.exists():
        name, path = path, SHIPPED / f"{path}_{split}.jsonl"
        if not path.is_file():
            raise DataError(f"there is no split {split!r} of the shipped {name}; there are train, validation, test")
    tasks: list[CodeTask] = []
    seen: dict[str, str] = {}
    for where, record in _records(path):
        task = _task(where, record, f"{path.stem}:{len(tasks)}")
        if task.id in seen:
            raise DataError(f"{where}: the id {task.id!r} is that of {seen[task.id]} too; ids must differ")
        seen[task.id] = where
        tasks.append(task)
    if not tasks:
        raise DataError(f"{path}: holds no records; expected one JSON object a line")
    return tuple(tasks)


def _records(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for place, record in file_records(path):
        where = f"{path}, {place}"
        if not isinstance(record, dict):
            raise DataError(f"{where}: expected an object, found {brief(record)}")
        yield where, clean_record(where, record)


def _task(where: str, record: Mapping[str, Any], default_id: str) -> CodeTask:
    name = next((record[key] for key in ("task_id", "problem_id", "id") if record.get(key) is not None), default_id)
    if "test" in record and "entry_point" in record:
        return _human_eval(where, record, str(name))
    if "test_list" in record:
        return _mbpp(where, record, str(name))
    if "input_output" in record:
        return _apps(where, record, str(name))
    raise DataError(
        f"{where}: holds no tests; it has {keys_of(record)}, expected test and "
        "entry_point (HumanEval), test_list (MBPP) or input_output (APPS)"
    )


# ------------------------------------------------------------------------------------------------------- the formats


def _human_eval(where: str, record: Mapping[str, Any], name: str) -> CodeTask:
    prompt, entry = _text(where, record, "prompt"), _text(where, record, "entry_point")
    source = _text(where, record, "test")
    tree = _parsed(where, "test", source)
    if not any(isinstance(node, ast.FunctionDef) and node.name == "check" for node in tree.body):
        raise DataError(f"{where}: 'test' must define check(candidate)")
    stub = prompt if _parses(prompt) else prompt.rstrip() + "\n    pass\n"
    signature = _signature_of(stub, entry)
    if signature is None:
        raise DataError(f"{where}: the prompt defines no function {entry!r}, which entry_point names")
    solution = record.get("canonical_solution")
    reference = prompt + solution if isinstance(solution, str) else None
    return CodeTask(
        name,
        f"Complete this function.\n{prompt.rstrip()}",
        before=stub,
        asserts=Asserts(source, (entry,), _count(where, "test", tree), entry),
        reference=reference,
    )


def _mbpp(where: str, record: Mapping[str, Any], name: str) -> CodeTask:
    statement = _statement(where, record)
    listed = record["test_list"]
    if not isinstance(listed, list) or not listed or not all(isinstance(item, str) for item in listed):
        raise DataError(f"{where}: 'test_list' must be a list of asserts that is not empty, found {brief(listed)}")
    setup = record.get("test_setup_code") or record.get("test_imports") or ""
    setup = "\n".join(map(str, setup)) if isinstance(setup, list) else str(setup)
    source = "\n".join([*([setup] if setup else []), *listed])
    tree = _parsed(where, "test_list", source)
    for item in listed:
        _parsed(where, f"the test {brief(item)}", item)
    reference = record.get("code") or record.get("solution")
    reference = reference if isinstance(reference, str) else None
    names = _called(tree)
    if reference is not None:
        defined = {node.name for node in _parsed(where, "code", reference).body if isinstance(node, _DEFINES)}
        names = tuple(n for n in names if n in defined) or names
    if not names:
        raise DataError(f"{where}: no test calls a function of the program")
    signature = "`, `".join((reference and _signature_of(reference, n)) or _signature_from_call(tree, n) for n in names)
    calls = () if setup else tuple(_equality(node, names) for node in tree.body)
    task = CodeTask(name, statement, signature, before=setup, reference=reference)
    if calls and all(calls):
        return replace(task, calls=tuple(call for call in calls if call))
    return replace(task, asserts=Asserts(source, names, _count(where, "test_list", tree)))


def _apps(where: str, record: Mapping[str, Any], name: str) -> CodeTask:
    statement = _statement(where, record)
    tests = record["input_output"]
    if isinstance(tests, str):
        try:
            tests = clean_deep(parse_json(tests))
        except ValueError as error:
            raise DataError(f"{where}: 'input_output' is not JSON ({error_line(error)})") from error
    inputs, outputs = (tests.get("inputs"), tests.get("outputs")) if isinstance(tests, dict) else (None, None)
    if not isinstance(inputs, list) or not isinstance(outputs, list) or not inputs or len(inputs) != len(outputs):
        raise DataError(
            f"{where}: 'input_output' must hold lists 'inputs' and 'outputs' of the same length, at least 1"
        )
    solutions = record.get("solutions")
    if isinstance(solutions, str) and solutions.strip():
        try:
            solutions = clean_deep(parse_json(solutions))
        except ValueError:
            solutions = [solutions]
    reference = solutions[0] if isinstance(solutions, list) and solutions and isinstance(solutions[0], str) else None
    function = tests.get("fn_name")
    if function is None:
        # Some records list the lines of an input or output.
        texts = [("\n".join(map(str, t)) if isinstance(t, list) else str(t)) for t in (*inputs, *outputs)]
        pairs = zip(texts[: len(inputs)], texts[len(inputs) :], strict=True)
        return CodeTask(name, statement, stdin=tuple(StdinTest(*pair) for pair in pairs), reference=reference)
    if not isinstance(function, str) or not all(isinstance(args, list) for args in inputs):
        raise DataError(f"{where}: with 'fn_name', every input must be a list of arguments")
    starter = str(record.get("starter_code") or "")
    calls = tuple(
        CallTest(Call(function, tuple(encode(arg) for arg in args)), expected, loose=True)
        for args, expected in zip(inputs, outputs, strict=True)
    )
    signature = _signature_of(starter.rstrip() + "\n        pass\n", function) if starter else None
    signature = signature or f"{function}({', '.join('abcdefghij'[: len(inputs[0])])})"
    return CodeTask(name, statement, signature, calls=calls, reference=reference)


# -------------------------------------------------------------------------------------------------- reading of code

_DEFINES = (ast.FunctionDef, ast.ClassDef)


def _equality(node: ast.stmt, names: Sequence[str]) -> CallTest | None:
    """`assert f(1, [2]) == 3` as a call and a value; None for any other statement."""
    if not (isinstance(node, ast.Assert) and isinstance(node.test, ast.Compare) and len(node.test.ops) == 1):
        return None
    call = node.test.left
    if not isinstance(node.test.ops[0], ast.Eq) or not isinstance(call, ast.Call):
        return None
    if not isinstance(call.func, ast.Name) or call.func.id not in names:
        return None
    try:
        args = tuple(encode(ast.literal_eval(arg)) for arg in call.args)
        kwargs = tuple((str(k.arg), encode(ast.literal_eval(k.value))) for k in call.keywords if k.arg)
        expected = ast.literal_eval(node.test.comparators[0])
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError, CannotMove):
        return None
    if len(kwargs) < len(call.keywords):
        return None
    return CallTest(Call(call.func.id, args, kwargs), expected)


def _called(tree: ast.Module) -> tuple[str, ...]:
    """Names that are called and that neither Python nor the tests themselves define, in order."""
    known = set(vars(builtins))
    for node in ast.walk(tree):
        if isinstance(node, (*_DEFINES, ast.AsyncFunctionDef)):
            known.add(node.name)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            known |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            known.add(node.id)
    calls = [n.func for n in ast.walk(tree) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)]
    calls.sort(key=lambda name: (name.lineno, name.col_offset))
    return tuple(dict.fromkeys(name.id for name in calls if name.id not in known))


def _count(where: str, what: str, tree: ast.Module) -> int:
    count = sum(isinstance(node, ast.Assert) for node in ast.walk(tree))
    if not count:
        raise DataError(f"{where}: {what} holds no assert, so nothing would be tested")
    return count


def _signature_of(source: str, name: str) -> str | None:
    """`name(a, b=1)` from its definition; a method's without `self`."""
    if not _parses(source):
        return None
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef) and node.name == name:
            try:
                arguments = ast.unparse(node.args).split(", ")
            except RecursionError:  # a default value of thousands of terms
                return None
            return f"{name}({', '.join(a for a in arguments if a and a.split(':')[0] != 'self')})"
    return None


def _signature_from_call(tree: ast.Module, name: str) -> str:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == name:
            return f"{name}({', '.join('abcdefghij'[: len(node.args)])})"
    return f"{name}(...)"


def _parses(source: str) -> bool:
    try:
        ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True


def _parsed(where: str, what: str, source: str) -> ast.Module:
    try:
        return ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        line = f" in its line {error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
        message = error.msg if isinstance(error, SyntaxError) else str(error)
        raise DataError(f"{where}: {what} is not Python ({message}{line})") from error


def _statement(where: str, record: Mapping[str, Any]) -> str:
    for key in STATEMENTS:
        if isinstance(record.get(key), str) and record[key].strip():
            return str(record[key]).strip()
    raise DataError(
        f"{where}: no statement found; it has {keys_of(record)}, expected a text under one of {', '.join(STATEMENTS)}"
    )


def _text(where: str, record: Mapping[str, Any], key: str) -> str:
    value = record.get(key)
    if not isinstance(value, str) or not value.strip():
        has = f"found {brief(value)}" if key in record else f"it has {keys_of(record)}"
        raise DataError(f"{where}: {key!r} must be a text that is not empty, {has}")
    return value
