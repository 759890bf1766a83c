"""Environments built from settings, for training and for evaluation, with notes for the user."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from mafrt.core.errors import ConfigError
from mafrt.core.text import counted
from mafrt.environment.base import Env

T = TypeVar("T")

SPLITS = ("train", "validation", "test")
"""Of environments that make or hold their own tasks: learnt from, chosen by, and reported only."""
TEST = "test"
HELD_OUT_SHARE, HELD_OUT_MOST = 0.1, 200
"""Share of a file that is not trained on where no other file is given, and records at most."""


@dataclass(frozen=True)
class Construction:
    """Built from settings alone, before any model is loaded."""

    train_env: Env
    eval_env: Env | None
    """on held-out tasks; None: there are none, so that evaluations play the training tasks"""
    notes: tuple[str, ...] = ()
    """lines for the user, such as how many tasks are held out"""


def hold_out(tasks: Sequence[T], split: str = TEST) -> tuple[Sequence[T], Sequence[T]]:
    """Tasks to train on and, from the end, a tenth that is held out; a file too small for that holds out none.

    Of these, `split` chooses the part (`part_of`).
    """
    count = min(HELD_OUT_MOST, int(len(tasks) * HELD_OUT_SHARE))
    return tasks[: len(tasks) - count], part_of(tasks[len(tasks) - count :], split)


def part_of(held_out: Sequence[T], split: str) -> Sequence[T]:
    """The first half of held-out tasks for `validation`, the other for `test`; a single task serves as both."""
    half = len(held_out) // 2
    return held_out[half:] if split == TEST or not half else held_out[:half]


def evaluated_split(settings: Mapping[str, Any]) -> str:
    """The split that evaluations are to play: `eval_split` of the settings, `validation` where they do not say."""
    return str(settings.get("eval_split", "validation"))


def named_split(source: object) -> str | None:
    """The split that a source names as its last word, as `stories:test`, `arithmetic:train:low=1` and `ID:main:test`
    do; None if it names none."""
    words = [word for word in re.split(r"[:,@]", str(source)) if word in SPLITS]
    return TEST if TEST in words else words[-1] if words else None


def subset(tasks: Sequence[T], limit: int | None, seed: int, name: str = "train_limit") -> Sequence[T]:
    """A random subset of `limit` tasks in their order, drawn with `seed`; all for None. `name` is the setting's.

    Raises:
        ConfigError: `limit` is below 1, or there are fewer tasks.
    """
    if limit is None:
        return tasks
    if not 1 <= limit <= len(tasks):
        raise ConfigError(f"{name} is {limit}; choose a value in [1, {len(tasks)}], the number of tasks.")
    return [tasks[index] for index in sorted(random.Random(f"subset:{seed}").sample(range(len(tasks)), limit))]


def held_out_note(source: str, train: int, held_out: int) -> str:
    """How a file of the user's was divided."""
    few = "too few to hold any out: they serve for both"
    which = f"{held_out} of the last tenth, which is held out" if held_out else few
    rest = "; mafrt evaluate plays the other half" if held_out > 1 else ""
    return f"Training on {counted(train, 'problems')} of {source}; for evaluation, {which}{rest}."
