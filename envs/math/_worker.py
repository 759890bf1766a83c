"""Process in which math-verify parses model-written text: JSON lines in, JSON lines out.

Started by `mafrt.envs.math.verifier` as `python -m mafrt.envs.math._worker`. Only math-verify's LaTeX reader is used:
its reader of plain expressions calls `sympy.parse_expr`, which evaluates its input. What else bounds it is in
`mafrt.core.bounded_worker`; math-verify's own time-outs, which go by the clock, are off.

math-verify's comparison of numbers is replaced by `numbers_equal`: its own rounds to six decimal places, and takes
differences below 1e-15 for none, so that all small numbers are equal to one another and to zero.

    -> {"given": "\\frac12", "reference": "0.5"}
    <- {"equal": true, "timeout": false}
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

from mafrt.core.bounded_worker import answer_requests, replies

MEMORY_MIB = 2048
PAIR_CPU_S = 2.0
KILL_AFTER_CPU_S = 5

DECIMALS = 6
"""Places to which an answer with a decimal point must agree, as in math-verify."""
SMALL_ERROR = 1e-4
"""Largest relative error of such an answer, which matters for numbers below 0.01: four significant digits."""
FLOAT_DIGITS = 15
"""Significant digits that a float holds."""
DIGITS = 50
"""Significant digits to which exact numbers, such as roots and powers, are compared first."""
LEAST_DIGITS, MOST_DIGITS = 500, 20_000
"""Bounds of those to which they are compared if these agree."""


def numbers_equal(a: Any, b: Any, float_rounding: int = DECIMALS, numeric_precision: int = DIGITS) -> bool:
    """Whether two sympy expressions without a set or relation are equal in value; False where that is not certain.

    In the place of `math_verify.grader.sympy_numeric_eq`, which also compares the parts of sets, tuples, intervals and
    relations; where it says False, math-verify tries to simplify the difference.
    """
    from math_verify.grader import get_pct_val
    from sympy import Basic, Float, I, MatrixBase, Rational

    # A reference of 50% is met by 50% and by 0.5, and by 50 if that is asked for in percent.
    percent = get_pct_val(a)
    if percent is not None and get_pct_val(b) is None and numbers_equal(percent, b):
        return True
    # The imaginary unit is a symbol that is not real to math-verify's reader, and in `1.0i` and `2i` a real one.
    letters = {symbol for x in (a, b) for symbol in x.free_symbols if symbol.name == "i"}
    if any(x.is_real is False for x in (*letters, *(x for x in (a, b) if letters and isinstance(x, Basic)))):
        a, b = (x.subs(dict.fromkeys(letters, I)) for x in (a, b))
    a, b = a.doit(), b.doit()
    if isinstance(a, MatrixBase) or isinstance(b, MatrixBase):
        return (
            isinstance(a, MatrixBase)
            and isinstance(b, MatrixBase)
            and a.shape == b.shape
            and all(numbers_equal(x, y) for x, y in zip(a.flat(), b.flat(), strict=True))
        )
    if not (isinstance(a, Basic) and isinstance(b, Basic)):
        return False
    if isinstance(a, Rational) and isinstance(b, Rational):
        return bool(a == b)
    rounded = a.has(Float) or b.has(Float)
    if rounded:
        return _agree(a, b, 15, rounded)
    return _agree(a, b, DIGITS) and _agree(a, b, _decisive_digits(a, b))


def _decisive_digits(a: Any, b: Any) -> int:
    """Digits by which two exact numbers of this size that are not equal do differ, as the root of 10^40 + 1 and 10^20.

    Roots of integers of D digits together that are not equal differ within a few times D digits, by the product of
    their conjugates; so do powers and functions within the size of their arguments.
    """
    from sympy import Function, Integer, Pow, Rational, preorder_traversal
    from sympy.concrete.expr_with_limits import ExprWithLimits

    if any(x.has(ExprWithLimits) for x in (a, b)):
        return DIGITS  # an integral or a sum without a closed form takes too long
    size = 0
    for part in (part for x in (a, b) for part in preorder_traversal(x)):
        if isinstance(part, Rational):
            size += len(str(abs(part.p))) + len(str(part.q))
        elif isinstance(part, Pow | Function):
            size += sum(int(min(abs(n), 2 * MOST_DIGITS)) for n in part.args[-1].atoms(Integer))
    return min(max(LEAST_DIGITS, 8 * size), MOST_DIGITS)


def _agree(a: Any, b: Any, digits: int, rounded: bool = False) -> bool:
    """Whether two expressions are equal to so many digits, or to those of an answer that is `rounded`."""
    from sympy import Rational, expand, nan, oo, zoo

    if not a.free_symbols and not b.free_symbols:
        left, right = a.evalf(digits), b.evalf(digits)
        if not (left.is_number and right.is_number and left.is_finite and right.is_finite):
            return False
        error, size = abs(left - right), max(abs(left), abs(right))
        if rounded:
            return bool(error <= SMALL_ERROR * size and _round(left) == _round(right)) and _is_rounding(a, b)
        return bool(error <= size * Rational(1, 10 ** (digits - 10)))
    if any(x.has(oo, -oo, zoo, nan) for x in (a, b)):
        return False  # every term is small beside infinity
    # With variables: no term of the difference counts beside the largest term of either side.
    terms = [expand(x).evalf(digits).as_coefficients_dict() for x in (a - b, a, b)]
    left_over, size = (max((abs(c) for d in group for c in d.values()), default=0) for group in (terms[:1], terms[1:]))
    return bool(left_over <= size * Rational(1, 10 ** (digits - (3 if rounded else 10))))


def _is_rounding(a: Any, b: Any) -> bool:
    """Whether two numbers, of which one at least is a decimal, differ by less than a unit of its last place.

    So 1.00000001 is not 1, and 0.33333333 is a third. Of a decimal with fewer places `DECIMALS` decide.
    """
    from sympy import Float, Rational

    exact, units = [], []
    for number in (a, b):
        if isinstance(number, Float):
            shown = Rational(f"{number:.{FLOAT_DIGITS}g}")
            places = next((n for n in range(400) if (shown * 10**n).q == 1), 400)
            units += [Rational(1, 10**places)] if places >= DECIMALS else []
            number = shown
        exact.append(number)
    error = abs(exact[0] - exact[1])
    return not units or bool((error if error.is_Rational else error.evalf(30)) < max(units))


def _round(number: Any) -> Any:
    """Real and imaginary part, to `DECIMALS` places."""
    return tuple(part.round(DECIMALS) for part in number.as_real_imag())


def main() -> None:
    reply = replies()
    try:
        from math_verify import LatexExtractionConfig, grader, parse, verify

        if not hasattr(grader, "sympy_numeric_eq"):
            raise ImportError("its module grader has no sympy_numeric_eq; mafrt is tested with 0.9.0")
        grader.sympy_numeric_eq = numbers_equal
    except ImportError as error:
        reply({"missing": f"checking answers needs math-verify ({error}): pip install math-verify"})
        return
    config = [LatexExtractionConfig(boxed_match_priority=0)]

    def read(answer: str) -> list[Any]:
        return list(parse(f"\\boxed{{{answer}}}", extraction_config=config, parsing_timeout=None))

    def compare(given: str, reference: str) -> bool:
        return bool(verify(read(reference), read(given), timeout_seconds=None))

    def answer(request: Mapping[str, Any]) -> dict[str, Any]:
        equal = False
        # Whatever goes wrong while reading an answer, the answer is not right.
        with contextlib.suppress(Exception):
            equal = compare(request["given"], request["reference"])
        return {"equal": equal}

    # The first calls import and compile the grammar; that must not count against an answer.
    for warm_up in ("\\frac{1}{2}", "\\{1, 2\\}", "x^2 + 1"):
        compare(warm_up, "0.5")
    answer_requests(
        reply, answer, {"equal": False}, memory_mib=MEMORY_MIB, cpu_s=PAIR_CPU_S, kill_after_s=KILL_AFTER_CPU_S
    )


if __name__ == "__main__":
    main()
