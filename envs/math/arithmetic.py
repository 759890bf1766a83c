"""Arithmetic and algebra generated from a seed: `arithmetic:SPLIT`, with kinds, a range of numbers and a count.

    arithmetic:train                                 1000 problems of + - * / with numbers from 1 to 99
    arithmetic:test:kinds=+-:low=10:high=999:count=200:steps=2:seed=3
    arithmetic:train:kinds=x<                        equations and inequalities in x; steps=2 has x on both sides
    arithmetic:train:claims=1                        claims such as 3 + 4 = 9, with the answers PRO (true) and CON

A problem is in exactly one split, by the hash of its text, for any settings.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from fractions import Fraction
from functools import partial
from typing import Any

from mafrt.config.schema import unknown
from mafrt.core.errors import DataError
from mafrt.envs.construction import SPLITS

PREFIX = "arithmetic:"
HELD_OUT, VALIDATED = 5, 8
"""one problem in so many is in the test split, and of the others one in so many in the validation split"""
KINDS, ALGEBRA = "+-*/", "x<"
MOST_COUNT = 1_000_000
MOST_DRAWS = 200
"""Draws for each problem before the range counts as too small."""


@dataclass(frozen=True)
class Arithmetic:
    """Settings of a set."""

    split: str = "train"
    kinds: str = KINDS
    low: int = 1
    high: int = 99
    steps: int = 1
    """operations of a problem"""
    count: int = 1000
    seed: int = 1
    claims: int = field(default=0, repr=False)  # not in the seed of the draws, which the other settings make
    """1: claims to debate instead of questions"""

    def __post_init__(self) -> None:
        odd = [
            (self.split not in SPLITS, f"split is {self.split!r}; choose {', '.join(SPLITS)}"),
            (
                not self.kinds or set(self.kinds) - {*KINDS, *ALGEBRA},
                f"kinds is {self.kinds!r}; choose some of {KINDS} (arithmetic), x (equations) and < (inequalities)",
            ),
            (not 0 <= self.low < self.high, f"low is {self.low} and high is {self.high}; choose 0 <= low < high"),
            (not 1 <= self.steps <= 5, f"steps is {self.steps}; choose 1 to 5"),
            (self.claims not in (0, 1), f"claims is {self.claims}; choose 0 or 1"),
            (
                self.claims and set(self.kinds) & set(ALGEBRA),
                f"claims are of {KINDS}, and kinds is {self.kinds!r}; leave x and < out",
            ),
            (not 1 <= self.count <= MOST_COUNT, f"count is {self.count}; choose 1 to {MOST_COUNT}"),
        ]
        for wrong, why in odd:
            if wrong:
                raise DataError(f"{PREFIX} {why}.")


def parse(source: str) -> Arithmetic:
    """`arithmetic:train:kinds=+-:high=20` -> settings. Raises DataError."""
    split, _, rest = source.removeprefix(PREFIX).partition(":")
    names = ("kinds", "low", "high", "steps", "count", "seed", "claims")
    given: dict[str, Any] = {}
    for part in filter(None, rest.split(":")):
        name, _, value = part.partition("=")
        if name not in names:
            raise DataError(f"{source}: {unknown('setting', name, names)}")
        if name != "kinds" and not value.isdigit():
            raise DataError(f"{source}: {name} is {value!r}; expected a whole number.")
        given[name] = value if name == "kinds" else int(value)
    return Arithmetic(split or "train", **given)


def problems(chosen: Arithmetic) -> Iterator[tuple[str, str]]:
    """Distinct (problem, answer) pairs. Raises DataError if the range has too few."""
    # Seeded by all settings, so that two sources of other settings do not begin alike.
    rng = random.Random(f"arithmetic:{chosen}")
    seen: set[str] = set()
    for number in range(chosen.count):
        for _ in range(MOST_DRAWS):
            kind = rng.choice(chosen.kinds) if set(chosen.kinds) & set(ALGEBRA) else KINDS[0]
            expression, value = _solvable(rng, chosen, kind) if kind in ALGEBRA else _draw(rng, chosen)
            # The split follows from the expression itself, so that no other range or count can move a held-out problem
            # into training.
            if value is not None and expression not in seen and _split(expression) == chosen.split:
                break
        else:
            raise DataError(
                f"{PREFIX} the range {chosen.low} to {chosen.high} gives {number} different problems at most; ask for "
                "fewer, or for a larger range."
            )
        seen.add(expression)
        if isinstance(value, str):
            yield f"Solve {expression} for x.", value
        else:
            yield _claim(expression, value) if chosen.claims else (f"What is {expression}?", str(value))


def _solvable(rng: random.Random, chosen: Arithmetic, kind: str) -> tuple[str, str | None]:
    """An equation or an inequality in x and its solution; None if x drops out of it."""
    number = partial(rng.randint, max(chosen.low, 1), chosen.high)
    left, right = (number(), number() if chosen.steps > 1 else 0)
    x, shift = rng.randint(chosen.low, chosen.high), number() * rng.choice((-1, 1))
    relation = "=" if kind == "x" else rng.choice("<>")
    constant = (left - right) * x + shift
    sides = _sum(left, shift), _sum(right, constant) if right else str(constant)
    if kind == "x":
        return " = ".join(sides), None if left == right else str(x)
    # Dividing by a number below 0 turns the relation around.
    solved = relation if left > right else {"<": ">", ">": "<"}[relation]
    return f" {relation} ".join(sides), None if left == right else f"x {solved} {x}"


def _sum(factor: int, constant: int) -> str:
    """`3x - 4`."""
    term = "x" if factor == 1 else f"{factor}x"
    return f"{term} {'+' if constant > 0 else '-'} {abs(constant)}" if constant else term


def _claim(expression: str, value: int) -> tuple[str, str]:
    """A claim about an expression and its answer: half of them are false, by 1 to 9."""
    rng = random.Random(f"claim:{expression}")
    if rng.random() < 0.5:
        return f"{expression} = {value}.", "PRO"
    return f"{expression} = {value + rng.choice((-1, 1)) * rng.randint(1, 9)}.", "CON"


def _draw(rng: random.Random, chosen: Arithmetic) -> tuple[str, int | None]:
    """An expression, worked out from the left, and its value; None if it is not whole."""
    value = Fraction(rng.randint(chosen.low, chosen.high))
    text = str(value)
    kinds = [kind for kind in chosen.kinds if kind in KINDS]
    for step in range(chosen.steps):
        kind, number = rng.choice(kinds), rng.randint(max(chosen.low, 1), chosen.high)
        if kind == "/" and step == 0:  # a quotient that is whole
            value *= number
            text = str(value)
        text = f"({text}) {kind} {number}" if step else f"{text} {kind} {number}"
        value = {"+": value + number, "-": value - number, "*": value * number, "/": value / number}[kind]
    return text, int(value) if value.denominator == 1 else None


def _split(expression: str) -> str:
    # A hash and not Python's own, which differs from process to process.
    digest = hashlib.sha256(expression.encode()).digest()
    if digest[0] % HELD_OUT == 0:
        return "test"
    return "validation" if digest[1] % VALIDATED == 0 else "train"
