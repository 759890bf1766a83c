"""A small world of facts and questions about it, within the vocabulary of the shipped base.

Facts are `Box 341 holds 570 pens.` and, where a second search is needed, `Box 127 holds as many keys as box 341 holds
pens.` Training and held-out questions are about different boxes, and their numbers are different ones: no held-out
answer stands in the training corpus.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cache

from mafrt.config.schema import check_choice
from mafrt.envs.construction import SPLITS
from mafrt.envs.search.questions import Question
from mafrt.envs.search.retrieval import Passage

THINGS = (
    "apples", "pens", "books", "coins", "cards", "shells", "stamps", "stones", "cookies", "pears",
    "marbles", "stickers", "flowers", "eggs", "balls", "toys", "keys", "nuts", "plums", "buttons",
)  # fmt: skip
NUMBERS = range(100, 1000)
TWO_HOP = 0.25
"""share of facts that refer to another one"""


@dataclass(frozen=True)
class CorpusFact:
    """Box `box` holds `number` of `thing`, told by referring to `other` (box, thing) or not."""

    box: int
    thing: str
    number: int
    other: tuple[int, str] | None = None

    @property
    def text(self) -> str:
        if self.other is None:
            return f"Box {self.box} holds {self.number} {self.thing}."
        return f"Box {self.box} holds as many {self.thing} as box {self.other[0]} holds {self.other[1]}."

    @property
    def question(self) -> str:
        return f"How many {self.thing} does box {self.box} hold?"


@dataclass(frozen=True)
class World:
    """Facts with their questions; question i asks for fact i."""

    facts: tuple[CorpusFact, ...]
    questions: tuple[Question, ...]

    def fact(self, box: int) -> CorpusFact:
        """The fact about a box."""
        return next(fact for fact in self.facts if fact.box == box)


def numbers_of(split: str) -> list[int]:
    """Boxes of a split and numbers of things in them: every third is of the test, every sixth of the validation."""
    remainders = {"test": (0, 3), "validation": (1,), "train": (2, 4, 5)}[split]
    return [number for number in NUMBERS if number % 6 in remainders]


@cache
def generated(split: str = "train", seed: int = 0) -> World:
    """The world of a split. Raises ConfigError for another one than train, validation and test."""
    check_choice("split", split, SPLITS)
    rng = random.Random(f"search:{split}:{seed}")
    boxes = numbers_of(split)
    rng.shuffle(boxes)
    told, further = boxes[: (most := round(len(boxes) * (1 - TWO_HOP)))], boxes[most:]
    # No number stands in more than three facts, so that a search for it alone can find all of them.
    facts = [
        CorpusFact(box, rng.choice(THINGS), number)
        for box, number in zip(told, rng.sample(boxes, len(told)), strict=True)
    ]
    for box, other in zip(further, rng.sample(facts, len(further)), strict=True):
        facts.append(CorpusFact(box, rng.choice(THINGS), other.number, (other.box, other.thing)))
    passages = tuple(Passage(f"{split}:{n}", "", fact.text) for n, fact in enumerate(facts))
    kinds = ["two_hop" if fact.other else "one_hop" for fact in facts]
    questions = tuple(
        Question(f"{split}:{n}", fact.question, (str(fact.number),), {"type": kind}, passages)
        for n, (fact, kind) in enumerate(zip(facts, kinds, strict=True))
    )
    return World(tuple(facts), questions)
