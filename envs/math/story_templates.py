"""Templates of the story problems: a text with open slots, and the operations that solve it, in order.

Some are written out here; the others are put together from the sentences of `story_scenes`.

Slots: {n} a name, {t} a thing, {a} the number that the first step begins with, {b} and {c} those of the steps.
No template stands in two splits; `templates` says how they are divided.
"""

from __future__ import annotations

import functools

from mafrt.core.seeding import seed_of
from mafrt.envs.math import story_scenes

NAMES = (
    "Ada", "Bo", "Cleo", "Dan", "Ella", "Finn", "Gia", "Hal", "Iris", "Jon", "Kim", "Lea", "Max", "Nora", "Otto", "Pia",
)  # fmt: skip
THINGS = ("apples", "pens", "cards", "shells", "stamps", "coins", "eggs", "beads", "books", "cups")

KNOWN: tuple[tuple[str, str], ...] = (
    ("{n} has {a} {t} and buys {b} more. How many {t} does {n} have now?", "+"),
    ("A shop sold {a} {t} on Monday and {b} on Tuesday. How many {t} did it sell on both days?", "+"),
    ("{n} is {a} years old. How old will {n} be in {b} years?", "+"),
    ("There were {a} birds in a tree. Then {b} more came. How many birds are in the tree?", "+"),
    ("{n} has {a} {t} and gives away {b}. How many {t} are left?", "-"),
    ("A class has {a} children. {b} of them are boys. How many are girls?", "-"),
    ("{n} had {a} dollars and paid {b} dollars for a hat. How many dollars are left?", "-"),
    ("A box holds {a} {t}. {b} of them are broken. How many are whole?", "-"),
    ("{n} fills {a} bags with {b} {t} each. How many {t} is that?", "*"),
    ("A ticket costs {b} dollars. How much do {a} tickets cost?", "*"),
    ("{n} runs {b} miles every day. How far does {n} run in {a} days?", "*"),
    ("{n} puts {a} {t} into {b} equal piles. How many {t} are in each pile?", "/"),
    ("{b} friends share {a} {t} equally. How many does each friend get?", "/"),
    ("A rope of {a} feet is cut into pieces of {b} feet. How many pieces are there?", "/"),
    ("{n} had {a} {t}, found {b}, and then lost {c}. How many {t} does {n} have?", "+-"),
    ("A bus has {a} riders. {b} get off and {c} get on. How many riders are on the bus?", "-+"),
    ("{n} buys {a} packs of {b} {t} and gets {c} more as a gift. How many {t} does {n} have?", "*+"),
    ("{n} has {a} boxes with {b} {t} each and sells {c} {t}. How many {t} are left?", "*-"),
    ("{n} has {a} {t} and gives {b} to a friend. The rest go into {c} equal bags. How many are in a bag?", "-/"),
    ("{n} picks {a} {t} and then {b} more, and shares them equally among {c} people. How many does each get?", "+/"),
    ("{a} {t} are packed into {b} equal boxes. {n} adds {c} {t} to one box. How many are in that box?", "/+"),
    ("{n} read {a} pages, then {b} pages, then {c} pages. How many pages is that?", "++"),
    ("{n} walks {a} miles and then {b} more miles. How far does {n} walk?", "+"),
    ("{n} has {a} {t}, and {b} of them are red. How many {t} are not red?", "-"),
    ("There are {a} {t}. {n} takes {b} away. How many {t} remain?", "-"),
    ("Each week has {b} lessons. How many lessons are there in {a} weeks?", "*"),
    ("A teacher gives {a} {t} to {b} pupils, the same number to each. How many does a pupil get?", "/"),
    ("A jar has {a} {t}. {n} adds {b} and then removes {c}. How many {t} are in the jar?", "+-"),
    ("{n} owes {a} dollars, pays back {b}, and borrows {c} again. How many dollars does {n} owe?", "-+"),
    ("{n} earns {b} dollars a day for {a} days and gets a bonus of {c} dollars. How many dollars is that?", "*+"),
    ("{n} draws {a} pages with {b} stars on each and wipes out {c} stars. How many stars are left?", "*-"),
    ("Of {a} {t}, {n} loses {b}. {c} children share the others equally. How many does each child get?", "-/"),
)
NEW: tuple[tuple[str, str], ...] = (
    ("A farmer has {a} hens and gets {b} new ones. How many hens are on the farm?", "+"),
    ("{a} cars stood in the lot and {b} drove away. How many cars are still there?", "-"),
    ("{n} plants {a} rows of {b} trees. How many trees does {n} plant?", "*"),
    ("{a} players form {b} equal teams. How many players are in a team?", "/"),
    ("{n} saved {a} dollars, earned {b} dollars, and spent {c} dollars. How much money is left?", "+-"),
    ("A shelf has {a} {t}. {n} takes {b} of them and later puts {c} back. How many {t} are on the shelf?", "-+"),
    ("{n} works {a} hours for {b} dollars an hour and finds {c} dollars. How much money does {n} have?", "*+"),
    ("{n} baked {a} rolls and ate {b}. The others fill {c} equal trays. How many rolls are on a tray?", "-/"),
    ("A lake has {a} ducks. {b} more land on it. How many ducks swim there?", "+"),
    ("{n} scored {a} points in the first game and {b} in the second. What is the total?", "+"),
    ("{a} guests were at a party and {b} went home. How many guests stayed?", "-"),
    ("A tank holds {a} liters of water. {b} liters leak out. How many liters remain?", "-"),
    ("A hall has {a} tables with {b} chairs at each. How many chairs does it have?", "*"),
    ("{n} drinks {b} cups of tea a day. How many cups does {n} drink in {a} days?", "*"),
    ("{n} cuts {a} inches of ribbon into {b} equal parts. How long is each part?", "/"),
    ("{a} students ride in {b} vans, the same number in each. How many students are in a van?", "/"),
    ("A train carried {a} people. {b} boarded and then {c} left. How many people does it carry?", "+-"),
    ("{n} had {a} stickers, gave {b} to a sister, and won {c} at a fair. How many stickers does {n} have?", "-+"),
    ("A baker makes {a} batches of {b} muffins and {c} extra ones. How many muffins are there?", "*+"),
    ("{n} bought {a} cartons of {b} bottles. {c} bottles fell and broke. How many are still good?", "*-"),
    ("{n} grew {a} melons and kept {b}. The rest were sold to {c} shops equally. How many did a shop get?", "-/"),
    ("A club had {a} members. {b} joined, and all of them split into {c} equal groups. How large is a group?", "+/"),
)
SHARE = {"validation": 0, "test": 1}
"""Split -> which of ten sequences of sentences are its own; training has the other eight."""


def _templates(split: str, operations: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(texts that are written out, texts put together) of a split."""
    if split == "new":
        texts = tuple(text for text, solved_by in NEW if solved_by == operations)
        return texts, tuple(story_scenes.NEW.templates(operations))
    known = sorted(story_scenes.KNOWN.templates(operations), key=lambda text: seed_of(0, text))
    if split in SHARE:
        return (), tuple(known[SHARE[split] :: 10])
    texts = tuple(text for text, solved_by in KNOWN if solved_by == operations)
    return texts, tuple(text for place, text in enumerate(known) if place % 10 not in SHARE.values())


@functools.cache
def templates(split: str) -> dict[str, tuple[tuple[str, ...], tuple[str, ...]]]:
    """Operations -> `_templates` of one of `SPLITS`."""
    return {operations: _templates(split, operations) for operations in story_scenes.SEQUENCES}


SPLITS = ("train", "validation", "test", "new")
