"""Environments built from settings, for training and for evaluation, with notes for the user."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from mafrt.core.errors import ConfigError
from mafrt.environment.base import Env

T = TypeVar("T")

SPLITS = ("train", "validation", "test")
"""Of environments that make or hold their own tasks: learnt from, chosen by, and reported only."""
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


def hold_out(tasks: Sequence[T]) -> tuple[Sequence[T], Sequence[T]]:
    """Tasks to train on and, from the end, a tenth that is held out; a file too small for that holds out none."""
    count = min(HELD_OUT_MOST, int(len(tasks) * HELD_OUT_SHARE))
    return tasks[: len(tasks) - count], tasks[len(tasks) - count :]


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
    kept = f"the last {held_out} are held out" if held_out else "too few to hold any out: they serve for both"
    return f"Training on {train} problems of {source}; for evaluation, {kept}."
