"""`calculator`: arithmetic, read by Python's parser and computed from a list of allowed nodes; nothing is evaluated."""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from mafrt.envs.tools.failed import Failed

if TYPE_CHECKING:
    from mafrt.envs.tools.base import Tool, Toolbox

LONGEST = 500
"""Characters of an expression."""
MOST_BITS = 4096
"""Of a whole number on the way."""
MOST_DIGITS = 400
"""Of `round`, before or behind the point; a float has 308 before it."""
_OPERATORS: Mapping[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_MATH = "sqrt exp log log2 log10 sin cos tan floor ceil gcd degrees radians"
_FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    **{name: getattr(math, name) for name in _MATH.split()},
    **{"abs": abs, "min": min, "max": max, "round": lambda *given: _rounded(*given)},
}
_CONSTANTS = {"pi": math.pi, "e": math.e}


def compute(expression: str) -> int | float:
    """The value of an arithmetic expression. Raises Failed with a sentence."""
    if len(expression) > LONGEST:
        raise Failed(f"the expression has {len(expression)} characters, at most {LONGEST} are read.")
    try:
        tree = ast.parse(expression.strip().replace("^", "**"), mode="eval")
        value: int | float = _value(tree.body)
    except (SyntaxError, ValueError, RecursionError, MemoryError, TypeError) as error:
        raise Failed(f"{expression[:80]!r} cannot be computed ({type(error).__name__}).") from error
    except (ArithmeticError, ZeroDivisionError) as error:
        raise Failed(f"{expression[:80]!r} has no value ({error}).") from error
    if isinstance(value, float) and not math.isfinite(value):
        raise Failed(f"{expression[:80]!r} has no finite value.")
    return value


def _value(node: ast.expr) -> Any:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return _bounded(node.value)
    if isinstance(node, ast.Name) and node.id in _CONSTANTS:
        return _CONSTANTS[node.id]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.UAdd, ast.USub)):
        value = _value(node.operand)
        return -value if isinstance(node.op, ast.USub) else value
    if isinstance(node, ast.BinOp):
        left, right = _value(node.left), _value(node.right)
        if isinstance(node.op, ast.Pow):
            return _bounded(_power(left, right))
        if type(node.op) in _OPERATORS:
            return _bounded(_OPERATORS[type(node.op)](left, right))
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.keywords:
        if node.func.id in _FUNCTIONS:
            return _bounded(_FUNCTIONS[node.func.id](*map(_value, node.args)))
        raise Failed(f"there is no function {node.func.id[:40]!r}; there are {', '.join(_FUNCTIONS)}.")
    raise Failed("only numbers, + - * / // % ^, brackets and functions are computed.")


def _power(base: Any, exponent: Any) -> Any:
    if isinstance(base, int) and isinstance(exponent, int):
        if exponent > 0 and base.bit_length() * exponent > MOST_BITS:
            raise Failed("the power is too large.")
        return base**exponent
    return math.pow(base, exponent)


def _rounded(value: Any, digits: Any = None) -> Any:
    # Python computes 10 ** -digits for a whole number, however large that is.
    if isinstance(digits, int) and abs(digits) > MOST_DIGITS:
        raise Failed(f"round takes at most {MOST_DIGITS} digits.")
    return round(value, digits)


def _bounded(value: Any) -> Any:
    if isinstance(value, int) and value.bit_length() > MOST_BITS:
        raise Failed("a number on the way is too large.")
    return value


def _call(arguments: Mapping[str, Any], toolbox: Toolbox) -> str:
    from mafrt.envs.tools.checker import CHECKER

    value = CHECKER.compute(arguments["expression"])
    return str(int(value)) if isinstance(value, float) and value.is_integer() and abs(value) < 1e15 else str(value)


def calculator() -> Tool:
    """The tool. It computes in a process of its own, which can be ended."""
    from mafrt.envs.tools.base import Tool, parameters

    text = "Compute an arithmetic expression, such as (3 + 4) * 2 ^ 3 or sqrt(2)."
    return Tool("calculator", text, parameters({"expression": ("string", "the expression")}), _call, True)
