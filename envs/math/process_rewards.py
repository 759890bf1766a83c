"""Rule-based process rewards: scores in 0..10 backed by the verifier, each with its reason.

    a plan           10 carried out or as stated, it gives the right result; 1 a wrong one; 0 it says nothing
                     neither stated nor computable: by the later result, 7 right, 2 wrong
    a program        10 printed the right number; 3 another one; 2 nothing; 1 failed, or could not be run
    a report of it   10 gives the right number; 5 repeats the output, which is wrong or empty; 0 neither
    an answer        10 right and worked out (steps `12 - 5 = 7` that hold lead to it); 5 right and only stated;
                     2 worked out and wrong; 0 wrong and only stated, or none is boxed
                     with --score_answers_by plan also 10: the result of a wrong plan, worked out
    a verdict        10 approves a right or rejects a wrong answer; 1 the reverse; 0 none

The steps between have their reason: a program that runs is nearer to a right one than one that does not.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

from mafrt.core.types import Scored
from mafrt.environment.python_tool import Ran
from mafrt.envs.math.answers import extract_answer, plain_number, tidy
from mafrt.envs.workflows.state import GradedRules

_NUMBER = r"-?\d{1,12}(?:\.\d{1,9})?"
_STATED = re.compile(rf"=\s*({_NUMBER})(?![\d.]*\d|\s*[-+*/^=])")
_ANY_STATED = re.compile(rf"=\s*({_NUMBER})")
_STEP = re.compile(rf"(?<![\d.])({_NUMBER})\s*([-+*/])\s*({_NUMBER})\s*=\s*({_NUMBER})(?!\.?\d)")
_FIRST = (
    (re.compile(rf"\badd ({_NUMBER}) (?:and|to) ({_NUMBER})", re.IGNORECASE), "+", False),
    (re.compile(rf"\b(?:subtract|take) ({_NUMBER}) (?:away )?from ({_NUMBER})", re.IGNORECASE), "-", True),
    (re.compile(rf"\bmultiply ({_NUMBER}) (?:by|and|with) ({_NUMBER})", re.IGNORECASE), "*", False),
    (re.compile(rf"\bdivide ({_NUMBER}) by ({_NUMBER})", re.IGNORECASE), "/", False),
)
_THEN = re.compile(rf"[\s,;.]*(?:and )?(?:then )?(add|subtract|multiply by|divide by) ({_NUMBER})", re.IGNORECASE)
_THEN_SIGN = {"add": "+", "subtract": "-", "multiply by": "*", "divide by": "/"}
MOST_GUESSES = 2
"""Results that a plan may state without a step that gives them."""
MOST_BITS = 256
"""Of the result of a plan that is carried out; a longer one is no answer."""
_EXPRESSION = re.compile(r"(?!.*(?<!\\)\b[A-Za-z]{4}).{1,200}")
"""A line that may be an answer by itself: no words in it but LaTeX commands."""


Right = Callable[[str], bool]
"""Whether the answer that a text gives is the right one."""


@dataclass(frozen=True)
class MathRules(GradedRules):
    """The scores of this module for one problem, as workflows ask for them (`mafrt.envs.workflows.state.TurnRules`)."""

    right: Right
    problem: str = ""
    by_plan: bool = False
    """Whether an answer that carries out a wrong plan without a mistake is right work."""

    def answer(self, text: str, plan: str | None = None) -> Scored:
        """The team's answer, and whether it is worked out or only stated.

        Worked out: written steps `12 - 5 = 7` all hold, change something, and start from numbers of the problem, if it
        is known, or from earlier results; the last gives the answer.
        """
        given = extract_answer(text)
        if given is None:
            return Scored(0.0, "No answer is boxed.")
        steps, value = steps_of(text, self.problem), plain_number(tidy(given))
        sound = all(step.holds and not step.idle and (step.starts or not self.problem) for step in steps)
        worked = sound and bool(steps) and value == steps[-1].result
        if self.right(text):
            return Scored(10.0, "Right and worked out.") if worked else Scored(5.0, "Right, but only stated.")
        # Otherwise an agent that calculates well is punished for each wrong plan, and unlearns it.
        if worked and self.by_plan and plan is not None and carried_out(plan) == value:
            return Scored(10.0, "The wrong plan is carried out without a mistake.")
        return Scored(2.0, "Worked out, but wrong.") if worked else Scored(0.0, "Wrong, and only stated.")

    def plan(self, text: str) -> Scored | None:
        """Score of a plan that states a result or can be computed; None if only later turns can decide."""
        # Punctuation alone is an empty plan too.
        if not re.search(r"\w", text):
            return Scored(0.0, "The plan is empty.")
        stated = extract_answer(text)
        if stated is None and (equals := _STATED.findall(text)):
            # A list of guesses states no result; results of steps on the way are none.
            guesses = set(_ANY_STATED.findall(text)) - {result for *_, result in _STEP.findall(text)}
            if len(guesses) > MOST_GUESSES:
                return Scored(1.0, f"The plan states {len(guesses)} results.")
            stated = equals[-1]
        # A plan that neither states a result nor can be carried out by reading is judged by what follows from it.
        value = carried_out(text) if stated is None else stated
        if value is None:
            return None
        good = self.right(f"\\boxed{{{value}}}")
        what = "Carried out, the plan gives" if stated is None else "The plan states"
        return Scored(10.0 if good else 1.0, f"{what} the {'right' if good else 'wrong'} result.")

    def program(self, ran: Ran) -> Scored:
        return program(ran, self.right)

    def report(self, text: str, printed: str | None) -> Scored:
        """Score of a text without a program; `printed` is None if the agent ran none."""
        good = gives(text, self.right)
        if printed is None:
            return Scored(4.0 if good else 0.0, "No program was run." + (" The result given is right." if good else ""))
        if good:
            return Scored(10.0, "The report gives the right number.")
        number, shown = _last_number(text), _last_number(printed)
        if number == shown and (number is not None or re.search(r"\w", text)):
            return Scored(5.0, "The report repeats what was printed, which is not the right number.")
        return Scored(0.0, "The report gives neither the right number nor what was printed.")

    def prints_right(self, ran: Ran) -> bool:
        return prints_right(ran, self.right)

    def shows_right(self, output: str) -> bool:
        return gives(output, self.right)


def carried_out(text: str) -> Fraction | None:
    """The result of a plan such as `Subtract 5 from 12, then multiply by 3.`; None for any other text."""
    begun = [(match, sign, swap) for pattern, sign, swap in _FIRST for match in pattern.finditer(text)]
    if len(begun) != 1:
        return None
    match, sign, swap = begun[0]
    left, number = (Fraction(part) for part in (match.groups()[::-1] if swap else match.groups()))
    value, place = _apply(sign, left, number), match.end()
    while value is not None and (then := _THEN.match(text, place)):
        value, place = _apply(_THEN_SIGN[then[1].lower()], value, Fraction(then[2])), then.end()
    # Numbers that the steps left over mean that the plan was not understood.
    if value is None or re.search(r"\d", text[place:]):
        return None
    return value if max(abs(value.numerator), value.denominator).bit_length() <= MOST_BITS else None


def program(ran: Ran, right: Right) -> Scored:
    """Score of a program, by its status and output."""
    if ran.status != "ok":
        last = (ran.stderr.strip().splitlines() or [ran.status])[-1]
        return Scored(1.0, f"The program failed ({ran.status}: {last[:200]}).")
    if not ran.stdout.strip():
        return Scored(2.0, "The program ran and printed nothing.")
    if prints_right(ran, right):
        return Scored(10.0, "The program ran and printed the right number.")
    return Scored(3.0, "The program ran and printed something else than the right number.")


def prints_right(ran: Ran, right: Right) -> bool:
    """Whether a program's output ends in the right answer: as its last line, or as the number at its end."""
    if ran.status != "ok":
        return False
    return gives(ran.stdout, right)


@dataclass(frozen=True)
class WrittenStep:
    """A calculation `12 - 5 = 7` of a text."""

    numbers: tuple[Fraction, str, Fraction]
    result: Fraction | None
    """the true one; None for a division by zero"""
    holds: bool
    starts: bool
    """from a number of the problem or the result of an earlier step that holds"""
    idle: bool
    """it gives back one of its numbers whatever the other is"""
    repeats: bool
    """the problem states it itself"""


def steps_of(text: str, problem: str) -> list[WrittenStep]:
    """The calculations that a text writes, in order."""
    asserted = set(_STEP.findall(problem))
    known = {Fraction(number) for number in re.findall(_NUMBER, problem.replace(",", ""))}
    steps = []
    for written in _STEP.findall(text):
        left, sign, right, stated = written
        first, second = Fraction(left), Fraction(right)
        result, starts = _apply(sign, first, second), bool({first, second} & known)
        holds = result == Fraction(stated)
        idle = second == (0 if sign in "+-" else 1) or (sign, first) in (("+", Fraction(0)), ("*", Fraction(1)))
        steps.append(WrittenStep((first, sign, second), result, holds, starts, idle, written in asserted))
        if holds:
            known.add(Fraction(stated))
    return steps


def gives(text: str, right: Right) -> bool:
    """Whether a text marks the right answer, or ends in it."""
    if right(text):  # it marks its answer
        return True
    lines = text.strip().splitlines()
    line = lines[-1].strip() if lines else ""
    number = _last_number(text)
    return (number is not None and right(f"\\boxed{{{number}}}")) or (
        line != number and bool(_EXPRESSION.fullmatch(line)) and right(f"\\boxed{{{line}}}")
    )


def _last_number(text: str) -> str | None:
    return extract_answer(text, last_number=True)


def _apply(sign: str, left: Fraction, right: Fraction) -> Fraction | None:
    if sign == "/":
        return left / right if right else None
    return left + right if sign == "+" else left - right if sign == "-" else left * right
