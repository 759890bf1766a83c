"""Process in which math-verify parses model-written text: JSON lines in, JSON lines out.

Started by `mafrt.envs.math.verifier` as `python -m mafrt.envs.math._worker`. Only math-verify's LaTeX reader is used:
its reader of plain expressions calls `sympy.parse_expr`, which evaluates its input. As further defences, an audit hook
refuses to start programs, open sockets or write files, and limits bound memory, processor time and file size.

Time is processor time, so that a busy machine makes no right answer wrong: math-verify's own time-outs, which go by
the clock, are off. A signal ends running Python code after `PAIR_CPU_S`; the kernel ends the process some seconds
later if a single operation on huge numbers holds the signal up.

math-verify's comparison of numbers is replaced by `numbers_equal`: its own rounds to six decimal places, and takes
differences below 1e-15 for none, so that all small numbers are equal to one another and to zero.

    -> {"given": "\\frac12", "reference": "0.5"}
    <- {"equal": true, "timeout": false}
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import sys
from typing import Any

MEMORY_MIB = 2048
PAIR_CPU_S = 2.0
KILL_AFTER_CPU_S = 5

_REFUSED = ("os.system", "os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn", "os.kill", "os.remove",
            "os.rename", "os.rmdir", "os.mkdir", "os.link", "os.symlink", "os.truncate", "os.chmod", "os.chown",
            "pty.spawn", "subprocess.Popen", "shutil.rmtree", "ctypes.dlopen")  # fmt: skip


def refuse(event: str, args: tuple[Any, ...]) -> None:
    """Audit hook: nothing that math needs starts a program, opens a socket or writes a file."""
    # sympy evaluates parts of what it parses, so that an answer may try to act; a parser needs none of these.
    if event in _REFUSED or event.startswith("socket."):
        raise PermissionError(f"{event} is refused in the verifier's process")
    if event == "open":
        mode, flags = args[1], args[2]
        writes = any(c in mode for c in "wax+") if isinstance(mode, str) else False
        if writes or (isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC)):
            raise PermissionError("writing a file is refused in the verifier's process")


def limit(kind: int, value: int) -> None:
    """Lower a limit as far as the system lets us; a platform without that limit keeps its own."""
    with contextlib.suppress(ValueError, OSError):
        hard = resource.getrlimit(kind)[1]
        resource.setrlimit(kind, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))


DECIMALS = 6
"""Places to which an answer with a decimal point must agree, as in math-verify."""
SMALL_ERROR = 1e-4
"""Largest relative error of such an answer, which matters for numbers below 0.01: four significant digits."""
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
    # The imaginary unit is a symbol that is not real to math-verify's reader, and in `1.0i` a real one.
    letters = {symbol for x in (a, b) for symbol in x.free_symbols if symbol.name == "i"}
    if any(symbol.is_real is False for symbol in letters):
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
    from sympy import Rational, expand

    if not a.free_symbols and not b.free_symbols:
        left, right = a.evalf(digits), b.evalf(digits)
        if not (left.is_number and right.is_number and left.is_finite and right.is_finite):
            return False
        error, size = abs(left - right), max(abs(left), abs(right))
        if rounded:
            return bool(error <= SMALL_ERROR * size and _round(left) == _round(right))
        return bool(error <= size * Rational(1, 10 ** (digits - 10)))
    # With variables: no term of the difference counts beside the largest term of either side.
    terms = [expand(x).evalf(digits).as_coefficients_dict() for x in (a - b, a, b)]
    left_over, size = (max((abs(c) for d in group for c in d.values()), default=0) for group in (terms[:1], terms[1:]))
    return bool(left_over <= size * Rational(1, 10 ** (digits - (3 if rounded else 10))))


def _round(number: Any) -> Any:
    """Real and imaginary part, to `DECIMALS` places."""
    return tuple(part.round(DECIMALS) for part in number.as_real_imag())


def main() -> None:
    # What a library prints must not end up among the replies.
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)

    def reply(message: dict[str, Any]) -> None:
        replies.write(json.dumps(message) + "\n")
        replies.flush()

    try:
        from math_verify import LatexExtractionConfig, grader, parse, verify
        from math_verify.errors import TimeoutException

        if not hasattr(grader, "sympy_numeric_eq"):
            raise ImportError("its module grader has no sympy_numeric_eq; mafrt is tested with 0.9.0")
        grader.sympy_numeric_eq = numbers_equal
    except ImportError as error:
        reply({"missing": f"checking answers needs math-verify ({error}): pip install math-verify"})
        return
    config = [LatexExtractionConfig(boxed_match_priority=0)]
    late = False

    def read(answer: str) -> list[Any]:
        return parse(f"\\boxed{{{answer}}}", extraction_config=config, parsing_timeout=None)

    def compare(given: str, reference: str) -> bool:
        return bool(verify(read(reference), read(given), timeout_seconds=None))

    def interrupt(signum: int, frame: Any) -> None:
        nonlocal late
        late = True
        raise TimeoutException("out of processor time")

    # The first calls import and compile the grammar; that must not count against an answer.
    for warm_up in ("\\frac{1}{2}", "\\{1, 2\\}", "x^2 + 1"):
        compare(warm_up, "0.5")
    limit(resource.RLIMIT_AS, MEMORY_MIB * 2**20)
    # After the warm-up, which may write caches.
    limit(resource.RLIMIT_FSIZE, 0)
    limit(resource.RLIMIT_CORE, 0)
    # Processor time and not wall time: a busy machine must not make an answer wrong.
    signal.signal(signal.SIGPROF, interrupt)
    sys.addaudithook(refuse)
    reply({"ready": True})
    for line in sys.stdin:
        request = json.loads(line)
        used = resource.getrusage(resource.RUSAGE_SELF)
        # Counted from what the process has used, since the limit is on its whole life.
        limit(resource.RLIMIT_CPU, int(used.ru_utime + used.ru_stime) + KILL_AFTER_CPU_S)
        late, equal = False, False
        # Whatever goes wrong while reading an answer, the answer is not right.
        with contextlib.suppress(Exception, TimeoutException):
            try:
                # It comes again every second: sympy has handlers that catch everything.
                signal.setitimer(signal.ITIMER_PROF, PAIR_CPU_S, 1.0)
                equal = compare(request["given"], request["reference"])
            finally:
                signal.setitimer(signal.ITIMER_PROF, 0)
        # With the request's number, so that a late reply is not taken for the next one's.
        reply({"id": request["id"], "equal": equal and not late, "timeout": late})


if __name__ == "__main__":
    main()
