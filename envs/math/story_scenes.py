"""Sentences that story problems are put together from: a beginning, one or two events, and a question.

Slots: {n} a name, {t} a thing, {a} the number that the first step begins with, {x} that of an event. Training,
validation and test use the sentences of `KNOWN`, each in sequences of its own; no sentence of `NEW` is among them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product


@dataclass(frozen=True)
class Scenes:
    """Sentences by their part in a problem."""

    beginnings: tuple[str, ...]
    gains: tuple[str, ...]
    losses: tuple[str, ...]
    groups: tuple[str, ...]
    """A beginning with {a} groups of {b} things"""
    shares: tuple[str, ...]
    """The end of a problem whose last step divides, with its question"""
    questions: tuple[str, ...]

    def templates(self, operations: str) -> Iterator[str]:
        """Every text that is solved by `operations`, in order."""
        kinds = {"+": self.gains, "-": self.losses, "/": self.shares}
        grouped = operations[0] == "*"
        starts, rest = (self.groups, operations[1:]) if grouped else (self.beginnings, operations)
        ends = ("",) if rest.endswith("/") else self.questions
        slots = "c" if grouped else "bc"
        for start, *events, end in product(starts, *(kinds[sign] for sign in rest), ends):
            told = [text.replace("{x}", f"{{{slot}}}") for text, slot in zip(events, slots, strict=False)]
            yield " ".join([start, *told, end]).rstrip()


SEQUENCES = ("+", "-", "*", "/", "+-", "-+", "*+", "*-", "-/", "+/")
"""Operations of the problems, each with the same share."""

KNOWN = Scenes(
    beginnings=(
        "{n} has {a} {t}.", "There are {a} {t} in a box.", "{n} starts the day with {a} {t}.", "A shop has {a} {t}.",
        "{n} owns {a} {t}.", "On a table lie {a} {t}.", "{n} counts {a} {t} in a drawer.", "A school keeps {a} {t}.",
        "In the morning {n} had {a} {t}.", "A truck carries {a} {t}.",
    ),
    gains=(
        "{n} buys {x} more.", "{n} finds {x} more.", "A friend brings {x} more.", "{x} more are delivered.",
        "{n} gets {x} as a gift.", "{n} picks up another {x}.", "{n} wins {x} more.", "Then {x} are added.",
        "A neighbor gives {n} {x} more.", "{n} puts {x} more with them.", "{x} new ones come in.",
        "{n} borrows {x} from a friend.",
    ),
    losses=(
        "{n} gives away {x}.", "{n} loses {x}.", "{x} of them break.", "{n} sells {x}.", "{n} throws {x} away.",
        "{x} are stolen.", "{n} lends {x} to a neighbor.", "{n} uses up {x}.", "{x} of them are taken away.",
        "{n} trades {x} for a toy.", "{n} hands {x} to a teacher.", "{x} fall into the water.",
    ),
    groups=(
        "{n} fills {a} bags with {b} {t} each.", "There are {a} boxes with {b} {t} in each.",
        "{n} buys {a} packs of {b} {t}.", "{a} children bring {b} {t} each.", "Each of {a} shelves holds {b} {t}.",
        "{n} makes {b} {t} every day for {a} days.", "{n} lays {a} rows of {b} {t}.",
        "{a} trucks arrive with {b} {t} each.",
    ),
    shares=(
        "They are shared equally among {x} children. How many {t} does each child get?",
        "All of them go into {x} equal piles. How many {t} are in a pile?",
        "{n} packs them into {x} boxes, the same number in each. How many {t} are in one box?",
        "{x} friends split them evenly. How many {t} does one friend get?",
        "They are divided equally between {x} classes. How many {t} go to each class?",
        "They fill {x} equal jars. How many {t} does a jar hold?",
    ),
    questions=(
        "How many {t} are there now?", "How many {t} are there in the end?", "How many {t} does that make?",
        "How many {t} is that?", "What is the number of {t} now?",
    ),
)  # fmt: skip
NEW = Scenes(
    beginnings=(
        "{n} keeps {a} {t} in a bag.",
        "A library owns {a} {t}.",
        "{a} {t} stand on a shelf.",
        "{n} brought {a} {t}.",
        "{n} collected {a} {t}.",
        "A museum shows {a} {t}.",
        "{a} {t} are stored in a cellar.",
        "{n} packs {a} {t}.",
        "Inside a cabinet there are {a} {t}.",
    ),
    gains=(
        "{n} orders {x} more.",
        "An uncle sends {n} {x} more.",
        "{n} makes {x} more.",
        "Another {x} are donated.",
        "{n} receives {x} more by mail.",
        "{n} earns {x} more.",
        "A cousin leaves {n} another {x}.",
        "{x} extra ones turn up.",
        "{n} digs out {x} more.",
    ),
    losses=(
        "{n} drops {x} and cannot use them.",
        "{n} returns {x}.",
        "A dog chews up {x} of them.",
        "{x} go missing.",
        "{n} donates {x}.",
        "{x} are damaged and go in the trash.",
        "{n} mails {x} to an aunt.",
        "{x} disappear.",
        "{n} spends {x}.",
    ),
    groups=(
        "{a} baskets contain {b} {t} each.",
        "{n} stacks {a} layers of {b} {t}.",
        "{a} pupils carry {b} {t} each.",
        "{a} crates arrive, and every crate has {b} {t} in it.",
        "{n} ties {a} bundles of {b} {t}.",
        "Each of {a} guests leaves {b} {t}.",
        "{n} hangs up {a} strings of {b} {t}.",
    ),
    shares=(
        "{n} deals them out evenly to {x} players. How many {t} does a player hold?",
        "They are placed on {x} trays, equally many on each. How many {t} lie on a tray?",
        "{n} hands them out equally to {x} guests. How many {t} does a guest receive?",
        "{x} drawers take them, the same number each. How many {t} are in a drawer?",
        "They are arranged in {x} equal rows. How many {t} stand in a row?",
    ),
    questions=(
        "How many {t} does this give?",
        "Count the {t}: how many are there?",
        "How many {t} are there at last?",
        "How many {t} would you count?",
        "Tell the number of {t}.",
    ),
)
