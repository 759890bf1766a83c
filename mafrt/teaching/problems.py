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

Steps = tuple[tuple[str, int], ...]

NAMES = (
    ("Mia", "She"), ("Ben", "He"), ("Ana", "She"), ("Tom", "He"), ("Lily", "She"), ("Omar", "He"),
    ("Zoe", "She"), ("Sam", "He"), ("Nina", "She"), ("Leo", "He"), ("Ruth", "She"), ("Ivan", "He"),
    ("Aisha", "She"), ("Hugo", "He"), ("Clara", "She"), ("Raj", "He"), ("Emma", "She"), ("Noah", "He"),
    ("Mei", "She"), ("Carl", "He"),
)  # fmt: skip
THINGS = (
    "apples", "pens", "books", "coins", "cards", "shells", "stamps", "stones", "cookies", "pears",
    "marbles", "stickers", "flowers", "eggs", "balls", "toys", "keys", "nuts", "plums", "buttons",
)  # fmt: skip
BOXES = ("boxes", "bags", "jars", "trays", "shelves", "baskets")

# Slots: {n} name, {p} pronoun, {o} another name, {t} things, {c} containers, {x} {y} numbers.
OPENINGS = (
    "{n} has {x} {t}.",
    "{n} had {x} {t}.",
    "{n} starts with {x} {t}.",
    "There are {x} {t} on the table of {n}.",
    "In the morning {n} counts {x} {t}.",
)
EVENTS = {
    "+": (
        "{p} finds {y} more.",
        "{p} buys {y} more.",
        "{o} brings {y} more.",
        "{p} gets {y} more from {o}.",
        "Then {y} more are added.",
        "{p} wins {y} new ones.",
        "{o} gives {n} {y} more.",
        "{p} picks up another {y}.",
    ),
    "-": (
        "{p} loses {y}.",
        "{p} gives {y} to {o}.",
        "{p} sells {y} of them.",
        "{o} takes {y} away.",
        "{y} of them break.",
        "{p} throws away {y}.",
        "{p} uses {y} of them.",
        "{p} leaves {y} at home.",
    ),
    "*": (
        "Each one is worth {y} points.",
        "{p} trades every one of them for {y} others.",
        "Every one of them turns into {y}.",
        "{o} has {y} times as many.",
    ),
    "/": (
        "{p} shares them equally among {y} friends.",
        "{p} puts them in {y} equal piles.",
        "{p} packs them in groups of {y}.",
        "{p} splits them evenly into {y} {c}.",
    ),
}
# The question has to fit the last event; a gain or a loss leaves things with somebody.
QUESTIONS = {
    "+": ("How many {t} does {n} have now?", "How many {t} are there now?", "How many {t} are there in all?"),
    "-": ("How many {t} are left?", "How many {t} does {n} have left?", "How many {t} remain?"),
    "*": (
        ("How many points is that?", "How many points does {n} have?"),
        ("How many {t} are there then?", "How many does {n} have then?"),
        ("How many {t} are there then?", "How many are there after that?"),
        ("How many {t} does {o} have?", "How many {t} is that for {o}?"),
    ),
    "/": (
        ("How many {t} does each friend get?", "How many does each get?"),
        ("How many {t} are in each pile?", "How many {t} does one pile hold?"),
        ("How many groups are there?", "How many groups does {n} make?"),
        ("How many {t} are in each of them?", "How many {t} does each hold?"),
    ),
}
# Groups as an opening: the first step multiplies, and a gain or a loss may follow.
GROUPS = (
    "{n} fills {x} {c} with {y} {t} each.",
    "{n} has {x} {c}. Each holds {y} {t}.",
    "There are {x} {c} with {y} {t} in each at the house of {n}.",
    "{n} buys {x} {c} of {y} {t}.",
    "For {x} days {n} collects {y} {t} a day.",
)
GROUP_QUESTIONS = ("How many {t} are there?", "How many {t} is that in total?", "How many {t} does {n} have in all?")
FRAMES = {
    "+": (
        "{n} is {x} years old. {o} is {y} years older. How old is {o}?",
        "A pen costs {x} dollars and a book costs {y} dollars. What do both cost?",
        "{n} walks {x} miles on Monday and {y} miles on Tuesday. How far does {n} walk in total?",
        "{x} boys and {y} girls are on the bus. How many children ride the bus?",
        "{n} has {x} {t} and {o} has {y}. How many {t} do they have together?",
        "{o} has {x} {t}. {n} has {y} more than {o}. How many {t} does {n} have?",
    ),
    "-": (
        "{n} is {x} years old. {o} is {y} years younger. How old is {o}?",
        "{n} has {x} {t} and {o} has {y}. How many more {t} does {n} have than {o}?",
        "A book costs {x} dollars. {n} has only {y} dollars. How many dollars are missing?",
        "There are {x} children and {y} of them are girls. How many are boys?",
        "The road is {x} miles long. {n} has walked {y} miles. How many miles are left?",
        "{o} has {x} {t}. {n} has {y} fewer than {o}. How many {t} does {n} have?",
    ),
    "*": (
        "One ticket costs {x} dollars. How much do {y} tickets cost?",
        "There are {x} rows of {y} chairs. How many chairs are there?",
        "{n} reads {x} pages a day. How many pages does {n} read in {y} days?",
        "A room is {x} feet long and {y} feet wide. What is its area?",
        "{n} earns {x} dollars an hour. How much does {n} earn in {y} hours?",
        "{o} has {x} {t}. {n} has {y} times as many. How many {t} does {n} have?",
    ),
    "/": (
        "{n} pays {x} dollars for {y} equal tickets. How much is one ticket?",
        "{x} children form {y} equal teams. How many children are in each team?",
        "{n} reads {x} pages in {y} days, the same number each day. How many pages a day is that?",
        "{x} {t} fill {y} {c} evenly. How many {t} go in one?",
        "A rope of {x} feet is cut into {y} equal pieces. How long is each piece?",
        "{n} walks {x} miles in {y} hours at a steady pace. How many miles is that per hour?",
    ),
}


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
    """One word problem: what is asked, and how it is rightly solved."""

    text: str
    start: int
    """The number that the first step begins with."""
    steps: Steps
    """What is done to it: (operation, number), one or two of them."""
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

    def pick(options: tuple) -> str | tuple:
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
        value = apply(operations[1], middle, second)
        if value and middle <= 30 and value <= 30:
            return start, first, second


def draw(rng: random.Random, two_step_share: float = 1 / 3) -> Problem:
    """One random problem of any split."""
    if rng.random() < two_step_share:
        operations: tuple[str, ...] = rng.choice(TWO_STEPS)
        start, *others = _two_step_numbers(rng, operations)
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
    found: dict[str, Problem] = {}
    for problem in stream(seed, split):
        found.setdefault(problem.text, problem)
        if len(found) == count:
            break
    return list(found.values())
