"""Templates of the story problems: a text with open slots, and the operations that solve it, in order.

Some are written out in `data/story_sentences.yaml`; the others are put together from the sentences there. No template
stands in two splits; `templates` says how they are divided.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from mafrt.core.seeding import seed_of
from mafrt.core.shipped import shipped_table

NAMES = (
    "Ada", "Bo", "Cleo", "Dan", "Ella", "Finn", "Gia", "Hal", "Iris", "Jon", "Kim", "Lea", "Max", "Nora", "Otto", "Pia",
)  # fmt: skip
THINGS = ("apples", "pens", "cards", "shells", "stamps", "coins", "eggs", "beads", "books", "cups")

SEQUENCES = ("+", "-", "*", "/", "+-", "-+", "*+", "*-", "-/", "+/")
"""Operations of the problems, each with the same share."""
SHARE = {"validation": 0, "test": 1}
"""Split -> which of ten sequences of sentences are its own; training has the other eight."""


@dataclass(frozen=True)
class Scenes:
    """Texts that are written out, and sentences by their part in a problem."""

    texts: Mapping[str, Sequence[str]]
    """operations -> texts that they solve"""
    beginnings: Sequence[str]
    gains: Sequence[str]
    losses: Sequence[str]
    groups: Sequence[str]
    """A beginning with {a} groups of {b} things"""
    shares: Sequence[str]
    """The end of a problem whose last step divides, with its question"""
    questions: Sequence[str]

    def written(self, operations: str) -> tuple[str, ...]:
        return tuple(self.texts.get(operations, ()))

    def templates(self, operations: str) -> Iterator[str]:
        """Every text that is solved by `operations`, in order."""
        kinds = {"+": self.gains, "-": self.losses, "/": self.shares}
        grouped = operations[0] == "*"
        starts, rest = (self.groups, operations[1:]) if grouped else (self.beginnings, operations)
        ends: Sequence[str] = ("",) if rest.endswith("/") else self.questions
        slots = "c" if grouped else "bc"
        for start, *events, end in product(starts, *(kinds[sign] for sign in rest), ends):
            told = [text.replace("{x}", f"{{{slot}}}") for text, slot in zip(events, slots, strict=False)]
            yield " ".join([start, *told, end]).rstrip()


@functools.cache
def sentences(part: str) -> Scenes:
    """The part `known` or `new` of the file."""
    return Scenes(**shipped_table(__file__, "data/story_sentences.yaml")[part])


def _templates(split: str, operations: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(texts that are written out, texts put together) of a split."""
    if split == "new":
        return sentences("new").written(operations), tuple(sentences("new").templates(operations))
    known = sorted(sentences("known").templates(operations), key=lambda text: seed_of(0, text))
    if split in SHARE:
        return (), tuple(known[SHARE[split] :: 10])
    composed = tuple(text for place, text in enumerate(known) if place % 10 not in SHARE.values())
    return sentences("known").written(operations), composed


@functools.cache
def templates(split: str) -> dict[str, tuple[tuple[str, ...], tuple[str, ...]]]:
    """Operations -> `_templates` of one of `SPLITS`."""
    return {operations: _templates(split, operations) for operations in SEQUENCES}


SPLITS = ("train", "validation", "test", "new")
