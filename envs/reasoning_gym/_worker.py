"""Process in which reasoning-gym makes tasks and scores answers: JSON lines in, JSON lines out.

Started by `mafrt.envs.reasoning_gym.env` as `python -m mafrt.envs.reasoning_gym._worker`. Several of the package's
scorers give an answer to `eval`, by themselves or through `sympy.parse_expr`; while one runs, `eval` takes arithmetic,
plain lists and a few functions of sympy only. What else bounds it is in `mafrt.core.bounded_worker`.

    -> {"task": {"name": "leg_counting", ...}, "numbers": {"train": 1000, "validation": 200, "test": 200}, "split": ...}
    <- {"tasks": [[17, "How many legs ...", "42"], ...]}
    -> {"task": {...}, "place": 17, "answer": "42"}
    <- {"score": 1.0}
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import dataclasses
import difflib
import hashlib
import json
import math
import operator
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import zip_longest
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from mafrt.core.bounded_worker import OutOfTime, answer_requests, replies
from mafrt.core.extras import install

MEMORY_MIB = 4096
ANSWER_CPU_S = 5.0
TASKS_CPU_S = 600
TASK_CPU_S = 60.0
"""of one task, with the block of tasks that some data sets prepare with it"""
LONGEST_EXPRESSION = 4000
FIRST = {"test": 0, "validation": 10**5, "train": 10**6}
"""Place of a split's first task. A task is made from its place, so that those of `test` are the same for everybody."""
BLOCK = 1000
"""Tasks of one data set object."""
ROUNDS = 20
"""How many times the tasks asked for are made, at most, to find those of a split."""

_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.Pow: operator.pow, ast.BitAnd: operator.and_,
    ast.BitOr: operator.or_, ast.BitXor: operator.xor, ast.LShift: operator.lshift, ast.RShift: operator.rshift,
}  # fmt: skip
_UNARY: dict[type[ast.unaryop], Callable[[Any], Any]] = {
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
    ast.Invert: operator.invert,
}
_CALLS = frozenset({
    "Integer", "Float", "Rational", "Symbol", "sqrt", "exp", "log", "ln", "sin", "cos", "tan", "cot", "sec", "csc",
    "asin", "acos", "atan", "sinh", "cosh", "tanh", "Abs",
})  # fmt: skip
_NAMES = frozenset({"pi", "E", "I", "oo"})


def arithmetic(source: Any, globals: Any = None, locals: Any = None) -> Any:
    """The value of an expression of numbers, lists and a few functions of sympy, in the place of `eval`.

    Raises ValueError for any other.
    """
    if not isinstance(source, str) or len(source) > LONGEST_EXPRESSION:
        raise ValueError("only a short expression is evaluated")
    return _value(ast.parse(source.strip(), mode="eval").body, dict(globals or {}), dict(locals or {}))


def _value(node: ast.expr, known: Mapping[str, Any], constants: Mapping[str, Any]) -> Any:
    """The value of a part of an expression. `known`: sympy's names; `constants`: the scorer's own."""
    match node:
        case ast.Constant():
            return node.value
        case ast.BinOp() if type(node.op) in _BINARY:
            return _BINARY[type(node.op)](_value(node.left, known, constants), _value(node.right, known, constants))
        case ast.UnaryOp() if type(node.op) in _UNARY:
            return _UNARY[type(node.op)](_value(node.operand, known, constants))
        case ast.List() | ast.Tuple():
            parts = [_value(part, known, constants) for part in node.elts]
            return parts if isinstance(node, ast.List) else tuple(parts)
        case ast.Name(id=name) if name in constants:
            return constants[name]
        case ast.Name(id=name) if name in _NAMES:
            return known[name]
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if name in _CALLS:
            given = [_value(part, known, constants) for part in args]
            # No text reaches a function but a symbol's name and a number's digits: sympy would evaluate it.
            if name in ("Symbol", "Integer", "Float") or not any(isinstance(part, str) for part in given):
                return known[name](*given)
    raise ValueError("the expression holds more than arithmetic")


def names_of_sympy(source: Any, globals: Any = None, locals: Any = None) -> None:
    """What sympy's parser calls `exec` for: its names. Raises ValueError for anything else."""
    if source != "from sympy import *":
        raise ValueError("nothing is executed here")
    import sympy

    globals.update({name: getattr(sympy, name) for name in sympy.__all__})


@contextlib.contextmanager
def only_arithmetic() -> Iterator[None]:
    """While an answer is scored."""
    builtin_functions = builtins.eval, builtins.exec
    builtins.eval, builtins.exec = arithmetic, names_of_sympy  # type: ignore[assignment]
    try:
        yield
    finally:
        builtins.eval, builtins.exec = builtin_functions


class Unusable(ValueError):
    """A data set cannot be made as asked; the text is a sentence."""


def _check(name: Any, config: Mapping[str, Any]) -> None:
    """Raises Unusable for a data set that is not there, and for a setting that it has not or that is of another type.

    The package checks ranges only: it compares a text with a number, and says so in Python's words.
    """
    from reasoning_gym import factory

    if name not in factory.DATASETS:
        near = difflib.get_close_matches(str(name), factory.DATASETS, 1)
        hint = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(sorted(factory.DATASETS)[:5])} and others."
        raise Unusable(f"reasoning-gym has no data set {name!r}; {hint}")
    fields = {item.name: item for item in dataclasses.fields(factory.DATASETS[name][1])}
    known = fields.keys() - {"size", "seed"}
    if odd := sorted(config.keys() - known):
        near = difflib.get_close_matches(odd[0], known, 1)
        raise Unusable(
            f"reasoning-gym's {name} has no setting {odd[0]!r}; "
            + (f"did you mean {near[0]!r}?" if near else f"it has {', '.join(sorted(known))}.")
        )
    hints = get_type_hints(factory.DATASETS[name][1])
    for setting, value in config.items():
        kind = float if isinstance(fields[setting].default, float) else hints[setting]
        if not _fits(value, kind):
            expected = _KINDS.get(kind) or str(kind).replace("typing.", "")
            raise Unusable(f"reasoning-gym's {name}: {setting} is {value!r}; expected {expected}.")


_KINDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}


def _fits(value: Any, kind: Any) -> bool:
    """Whether a value of JSON is of an annotated type, as far as that can be told."""
    origin, parts = get_origin(kind) or kind, get_args(kind)
    if origin is Union:
        return any(_fits(value, part) for part in parts)
    if origin is Literal:
        return value in parts
    if origin in (list, tuple, Sequence):
        return isinstance(value, list) and (not parts or all(_fits(one, parts[0]) for one in value))
    if origin in (int, float):
        return type(value) is int or (type(value) is float and origin is float)
    return isinstance(value, origin) if origin in (bool, str, type(None)) else True


def _parts(given: Any) -> list[Any]:
    """The data sets of a composite. Raises Unusable."""
    from reasoning_gym.composite import DatasetSpec

    form = "a list of {name, weight, config}"
    if not isinstance(given, list) or not all(isinstance(one, dict) for one in given):
        raise Unusable(f"reasoning-gym's composite: datasets is {given!r}; expected {form}.")
    parts = [{"weight": 1.0, "config": {}, **one} for one in given]
    for part in parts:
        weight = part["weight"]
        if part.keys() != {"name", "weight", "config"} or not isinstance(part["config"], dict):
            raise Unusable(f"reasoning-gym's composite: datasets holds {part!r}; expected {form}.")
        if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not 0 < weight < math.inf:
            raise Unusable(f"reasoning-gym's composite: a weight is {weight!r}; expected a number above 0.")
        if part["name"] == "composite":
            raise Unusable("reasoning-gym's composite holds no other composite; list its data sets.")
        _check(part["name"], part["config"])
    return [DatasetSpec(**part) for part in parts]


@lru_cache(maxsize=64)
def _dataset(text: str, size: int, seed: int) -> Any:
    """A data set of `size` tasks by its name, level and config as JSON; task i is made from `seed + i`."""
    import reasoning_gym
    from reasoning_gym import factory

    asked = json.loads(text)
    name, level, config = asked["name"], asked["level"], dict(asked["config"])
    if name == "composite":
        config["datasets"] = _parts(config.get("datasets", []))
    _check(name, config)
    kind, settings = factory.DATASETS[name]
    try:
        if level is not None:
            if not factory.has_curriculum(name):
                raise Unusable(f"reasoning-gym's {name} has no levels; leave level out.")
            curriculum = reasoning_gym.factory.create_curriculum(name)
            most = max((len(curriculum.get_attribute(each).levels) for each in curriculum.attributes), default=1) - 1
            if level > most:  # the package would take its hardest without a word
                raise Unusable(f"reasoning-gym's {name} has the levels 0 to {most}, and level is {level}.")
            curriculum.set_global_level(level)
            made = curriculum.generate_configuration({"size": size, "seed": seed})
            made = dataclasses.replace(made, **config)
        else:
            made = settings(size=size, seed=seed, **config)
        if hasattr(made, "validate"):
            made.validate()
        return kind(config=made)
    except Unusable:
        raise
    except Exception as error:
        why = str(error) or "a value is out of its range"
        raise Unusable(f"reasoning-gym's {name} cannot be made with these settings: {why}") from error


def _at(task: Mapping[str, Any], place: int) -> tuple[Any, dict[str, Any]]:
    """The data set that holds the task at a place, and the task."""
    levels = task["levels"] or [None]
    level = levels[place % len(levels)]
    text = json.dumps({"name": task["name"], "level": level, "config": task["config"]}, sort_keys=True)
    # In blocks, since some data sets prepare all that they are going to hold.
    dataset = _dataset(text, BLOCK, place - place % BLOCK)
    return dataset, dataset[place % BLOCK]


@contextlib.contextmanager
def _one_task(task: Mapping[str, Any]) -> Iterator[None]:
    """Bound the processor time of a task: some settings make it exponential. Raises Unusable."""
    try:
        signal.setitimer(signal.ITIMER_PROF, TASK_CPU_S, 1.0)
        yield
    except OutOfTime:
        raise Unusable(
            f"reasoning-gym's {task['name']} makes no task within {TASK_CPU_S:g} s of a processor with these settings; "
            "make them smaller."
        ) from None
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def split_of(question: str) -> str:
    """The split that a question belongs to, whatever else is made: three of five train."""
    share = hashlib.sha256(question.encode()).digest()[0] % 5
    return {0: "test", 1: "validation"}.get(share, "train")


def tasks_of(task: Mapping[str, Any], numbers: Mapping[str, int], split: str, shift: int) -> list[list[Any]]:
    """`[place, question, answer]` of each task of a split; those of `validation` and `test` differ from each other.

    Where few questions can be asked, each split has its share of them, and a held-out one fewer tasks than asked for.
    Levels take turns.
    """
    levels = len(task["levels"]) or 1
    found: list[list[list[Any]]] = [[] for _ in range(levels)]
    seen: set[str] = set()
    most = -(-numbers[split] // levels)
    first = FIRST[split] + (shift if split == "train" else 0)
    for place in range(first, first + ROUNDS * numbers[split]):
        of_level = found[place % levels]
        if len(of_level) == most:
            if all(len(each) == most for each in found):
                break
            continue
        with _one_task(task):
            entry = _at(task, place)[1]
        question = str(entry["question"])
        if split_of(question) == split and (split == "train" or question not in seen):
            seen.add(question)
            of_level.append([place, question, None if entry["answer"] is None else str(entry["answer"])])
    tasks = [each for turn in zip_longest(*found) for each in turn if each is not None][: numbers[split]]
    if not tasks:
        raise Unusable(
            f"reasoning-gym's {task['name']} asks so few questions with these settings that {split} has none of them; "
            "make them more varied."
        )
    return tasks


def score_of(task: Mapping[str, Any], place: int, answer: str | None) -> float:
    """The package's own score of an answer, 0 to 1."""
    dataset, entry = _at(task, place)
    with only_arithmetic():
        return float(dataset.score_answer(answer, entry))


def answer(request: Mapping[str, Any]) -> dict[str, Any]:
    """The score of an answer. A scorer that fails on one does not take it."""
    try:
        return {"score": score_of(request["task"], request["place"], request["answer"])}
    except Unusable as error:
        return {"unusable": str(error)}
    except Exception:
        return {"score": 0.0}


def prepare(request: dict[str, Any]) -> dict[str, Any] | None:
    """The tasks that are asked for; of a request for a score, its task is made, which does not count as the answer's.

    None: there is an answer to score.
    """
    try:
        if "place" in request:
            with _one_task(request["task"]):
                _at(request["task"], request["place"])
            return None
        return {"tasks": tasks_of(request["task"], request["numbers"], request["split"], request["shift"])}
    except Unusable as error:
        return {"unusable": str(error)}
    except Exception as error:
        return {"unusable": f"reasoning-gym failed: {type(error).__name__}: {error}"}


def main() -> None:
    reply = replies()
    try:
        import reasoning_gym  # noqa: F401
    except ImportError as error:
        reply({"missing": f"tasks of reasoning-gym need its package ({error}); run: {install('reasoning_gym')}"})
        return
    answer_requests(
        reply,
        answer,
        {"score": 0.0},
        memory_mib=MEMORY_MIB,
        cpu_s=ANSWER_CPU_S,
        kill_after_s=2 * ANSWER_CPU_S,
        prepare=prepare,
        prepare_s=TASKS_CPU_S,
    )


if __name__ == "__main__":
    main()
