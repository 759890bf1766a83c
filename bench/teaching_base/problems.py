"""The generator of grade-school word problems.

A problem is a short story with one or two arithmetic steps. Stories are put together from
sentences (an opening, one or two events, a question) or taken from a list of whole frames
(ages, prices, comparisons), and filled with names, things and numbers. The wording always
tells which operation is right; the numbers stay small enough for a tiny model to know every
fact by heart.

Every problem belongs to exactly one `split`, decided by a hash of its sentences and numbers.
So no problem of the corpus shares both its wording and its numbers with a problem that an agent
is trained on, nor with one that it is tested on, whatever the names and things in it.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from bench.teaching_base.wordings import (
    BOXES,
    EVENTS,
    FRAMES,
    GROUP_QUESTIONS,
    GROUPS,
    NAMES,
    OPENINGS,
    QUESTIONS,
    THINGS,
)

Steps = tuple[tuple[str, int], ...]


def apply(operation: str, left: int, right: int) -> int | None:
    """Result of one written step, or None where it leaves the tables that the base knows.

    Wider than the numbers of the problems themselves, because a wrong operation on the numbers of
    a problem has to have a result as well.
    """
    if operation == "+":
        return left + right if left + right <= 90 else None
    if operation == "-":
        return left - right if left >= right else None
    if operation == "*":
        return left * right if left <= 9 and right <= 9 else None
    if operation == "/":
        return left // right if right > 1 and left % right == 0 and left <= 81 else None
    raise ValueError(f"unknown operation {operation!r}; expected one of + - * /")


def results(start: int, steps: Steps) -> list[int] | None:
    """The number after each step, or None if one of them leaves the tables."""
    values: list[int] = []
    for operation, right in steps:
        value = apply(operation, values[-1] if values else start, right)
        if value is None:
            return None
        values.append(value)
    return values


@dataclass(frozen=True)
class Problem:
    """One word problem with its correct solution."""

    text: str
    start: int
    """The number that the first step begins with."""
    steps: Steps
    """Operations on the start value: one or two of (operation, number)."""
    frame: str = field(compare=False)
    """Which sentences it is made of, without names and numbers."""

    @property
    def answer(self) -> int:
        values = results(self.start, self.steps)
        assert values is not None
        return values[-1]

    @property
    def numbers(self) -> tuple[int, ...]:
        return (self.start, *(number for _, number in self.steps))

    @property
    def split(self) -> str:
        """`test` (a tenth), `train` (a fifth) or `corpus`."""
        digest = hashlib.sha256(f"{self.frame}|{self.numbers}".encode()).digest()
        return ("test", "train", "train")[digest[0] % 10] if digest[0] % 10 < 3 else "corpus"


def _numbers(rng: random.Random, operation: str) -> tuple[int, int]:
    """Operands of a right single step: sums and differences within 30, products up to 9 x 9."""
    if operation in "*/":
        left, right = rng.randint(2, 9), rng.randint(2, 9)
        return (left, right) if operation == "*" else (left * right, right)
    left, right = rng.randint(2, 28), rng.randint(2, 20)
    while left + right > 30:
        left, right = rng.randint(2, 28), rng.randint(2, 20)
    return (left, right) if operation == "+" else (left + right, right)


def _story(rng: random.Random, operations: tuple[str, ...]) -> tuple[str, str]:
    """Sentences with open slots and the name of their combination.

    `{x}` is the number of the opening, `{y}` that of the first event, `{z}` that of the second.
    """
    picks: list[int] = []

    def pick(options: Any) -> Any:
        picks.append(rng.randrange(len(options)))
        return options[picks[-1]]

    sentences: list[str] = []
    rest = operations
    if operations[0] == "*" and (len(operations) == 2 or rng.random() < 0.6):
        sentences.append(pick(GROUPS))
        rest = operations[1:]
        if not rest:
            sentences.append(pick(GROUP_QUESTIONS))
    else:
        sentences.append(pick(OPENINGS))
    for index, operation in enumerate(rest):
        event = pick(EVENTS[operation])
        sentences.append(event if len(rest) == len(operations) and index == 0 else event.replace("{y}", "{z}"))
    if rest:
        questions = QUESTIONS[rest[-1]]
        sentences.append(pick(questions if isinstance(questions[0], str) else questions[picks[-1]]))
    return " ".join(sentences), f"{''.join(operations)}{'s' if rest != operations else 'o'}{picks}"


TWO_STEPS = (("+", "-"), ("-", "+"), ("+", "+"), ("-", "-"), ("*", "+"), ("*", "-"), ("+", "/"), ("-", "/"))


def _two_step_numbers(rng: random.Random, operations: tuple[str, str]) -> tuple[int, int, int]:
    while True:
        start, first = _numbers(rng, operations[0])
        middle = apply(operations[0], start, first)
        second = rng.randint(2, 9)
        value = None if middle is None else apply(operations[1], middle, second)
        if value and middle is not None and middle <= 30 and value <= 30:
            return start, first, second


def draw(rng: random.Random, two_step_share: float = 1 / 3) -> Problem:
    """One random problem of any split."""
    if rng.random() < two_step_share:
        pair = rng.choice(TWO_STEPS)
        operations: tuple[str, ...] = pair
        start, *others = _two_step_numbers(rng, pair)
    else:
        operations = (rng.choice("+-*/"),)
        start, *others = _numbers(rng, operations[0])
    if len(operations) == 1 and rng.random() < 0.4:
        index = rng.randrange(len(FRAMES[operations[0]]))
        text, frame = FRAMES[operations[0]][index], f"{operations[0]}f{index}"
    else:
        text, frame = _story(rng, operations)
    (name, pronoun), (other, _) = rng.sample(NAMES, 2)
    slots = dict(zip("xyz", (start, *others), strict=False))
    text = text.format(n=name, p=pronoun, o=other, t=rng.choice(THINGS), c=rng.choice(BOXES), **slots)
    return Problem(text, start, tuple(zip(operations, others, strict=True)), frame)


def stream(seed: int, split: str) -> Iterator[Problem]:
    """Endless problems of one split; the same seed gives the same ones."""
    rng = random.Random(f"{split}-{seed}")
    while True:
        problem = draw(rng)
        if problem.split == split:
            yield problem


def distinct(seed: int, split: str, count: int) -> list[Problem]:
    """The first `count` problems of a split's stream that differ in their text."""
    by_text: dict[str, Problem] = {}
    for problem in stream(seed, split):
        by_text.setdefault(problem.text, problem)
        if len(by_text) == count:
            break
    return list(by_text.values())
