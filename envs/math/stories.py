"""Story problems of one and two steps, generated from a seed, with splits that share neither template nor numbers.

`stories:train`, `stories:validation` and `stories:test` name them where a data set is asked for. The splits have
templates of their own (`story_templates`): validation and test are sequences of sentences that training never shows,
although it shows each sentence in others. The largest number of a problem's first step (a sum, minuend, product or
dividend) is one of the split's own, so a held-out problem is neither a known text nor a known calculation.
`stories:new` shares no sentence with the others.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from mafrt.core.errors import DataError
from mafrt.envs.math.story_templates import NAMES, SEQUENCES, SPLITS, THINGS, templates

PREFIX = "stories:"
_PERIOD = 7
_REMAINDERS = {"train": range(5), "validation": range(5, 6), "test": range(6, 7), "new": range(6, 7)}
RANGES: dict[str, tuple[int, ...]] = {
    split: tuple(n for n in range(5, 41) if n % _PERIOD in remainders) for split, remainders in _REMAINDERS.items()
}
"""Split -> values of the largest number of the first step: 7 to 11, 14 to 18, ... in training, one of each gap between
them in validation, the other in test. Held-out numbers lie between training ones, not beyond them: where they lay
beyond, a team learnt which operation goes with which size of number, and that was of no use there."""
COUNTS = {"train": 8000, "validation": 200, "test": 400, "new": 400}
SEED = 1
_SENTENCES = {
    "+": "Add {b} to {a}",
    "-": "Subtract {b} from {a}",
    "*": "Multiply {a} by {b}",
    "/": "Divide {a} by {b}",
}
_THEN = {"+": "add {b}", "-": "subtract {b}", "*": "multiply by {b}", "/": "divide by {b}"}


@dataclass(frozen=True)
class Story:
    """One problem with its solution."""

    problem: str
    start: int
    steps: tuple[tuple[str, int], ...]
    """(operation, number), one or two"""

    @property
    def values(self) -> tuple[int, ...]:
        """Result of each step."""
        values, value = [], self.start
        for operation, number in self.steps:
            value = _apply(operation, value, number)
            values.append(value)
        return tuple(values)

    @property
    def answer(self) -> int:
        return self.values[-1]

    @property
    def plan(self) -> str:
        """A Reasoner's turn: the steps in words, without a result."""
        (operation, number), *rest = self.steps
        first = _SENTENCES[operation].format(a=self.start, b=number)
        return ", then ".join([first, *(_THEN[sign].format(b=number) for sign, number in rest)]) + "."

    @property
    def solution(self) -> str:
        """An Actor's turn: the calculations and the boxed answer."""
        value, lines = self.start, []
        for (operation, number), result in zip(self.steps, self.values, strict=True):
            lines.append(f"{value}{operation}{number}={result}")
            value = result
        return f"{' '.join(lines)} \\boxed{{{value}}}"


def _apply(operation: str, left: int, right: int) -> int:
    if operation == "/":
        return left // right
    return left + right if operation == "+" else left - right if operation == "-" else left * right


def draw(rng: random.Random, split: str) -> Story:
    """One random problem of a split."""
    operations = rng.choice(SEQUENCES)
    written, composed = templates(split)[operations]
    # Either kind alike: texts that are written out are few, and vary more.
    text = rng.choice(written if written and rng.random() < 0.5 else composed)
    while True:
        start, first = _operands(rng, operations[0], rng.choice(RANGES[split]))
        if min(start, first) < 2:
            continue
        steps = [(operations[0], first)]
        if len(operations) == 2:
            second = _second(rng, operations[1], _apply(operations[0], start, first))
            if second is None:
                continue
            steps.append((operations[1], second))
        slots = {"a": start, **dict(zip("bc", (number for _, number in steps), strict=False))}
        return Story(text.format(n=rng.choice(NAMES), t=rng.choice(THINGS), **slots), start, tuple(steps))


def _operands(rng: random.Random, operation: str, largest: int) -> tuple[int, int]:
    """Operands of a first step whose largest number is `largest`; below 2 where there are none."""
    if operation == "+":
        right = rng.randint(2, max(2, largest // 2))
        return largest - right, right
    if operation == "-":
        return largest, rng.randint(2, max(2, largest - 3))
    divisors = [d for d in range(2, 10) if largest % d == 0 and 2 <= largest // d <= 20]
    if not divisors:
        return 0, 0
    right = rng.choice(divisors)
    return (largest // right, right) if operation == "*" else (largest, right)


def _second(rng: random.Random, operation: str, value: int) -> int | None:
    """Number of a second step on `value`; None where there is none."""
    if operation == "+":
        return rng.randint(2, 9)
    if operation == "-":
        return rng.randint(2, min(value - 1, 9)) if value > 3 else None
    divisors = [d for d in range(2, 10) if value % d == 0 and value // d >= 2]
    return rng.choice(divisors) if divisors else None


def stream(seed: int, split: str) -> Iterator[Story]:
    """Endless problems of a split; the same seed gives the same ones."""
    rng = random.Random(f"stories-{split}-{seed}")
    while True:
        yield draw(rng, split)


def distinct(split: str, count: int | None = None, seed: int = SEED) -> list[Story]:
    """The first `count` problems of a split that differ in their text.

    Raises DataError for a split that does not exist.
    """
    if split not in SPLITS:
        raise DataError(f"found {PREFIX}{split}, expected {', '.join(PREFIX + name for name in SPLITS)}")
    by_text: dict[str, Story] = {}
    for story in stream(seed, split):
        by_text.setdefault(story.problem, story)
        if len(by_text) == (COUNTS[split] if count is None else count):
            break
    return list(by_text.values())
