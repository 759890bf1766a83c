"""The sentences, names and things that word problems are made of.

Slots: {n} name, {p} pronoun, {o} another name, {t} things, {c} containers, {x} {y} numbers. An event
or a frame belongs to exactly one operation, so that its wording tells which operation is right.
"""

from __future__ import annotations

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
# The question has to fit the last event; a gain or a loss ends with a person who has things.
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
