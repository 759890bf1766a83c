"""Stratified order of tasks: every batch has its share of each stratum, and no task twice.

An epoch plays every task once, so its proportions are exact; within it the strata lie as evenly as whole numbers
allow. Any `apart` draws in a row are different tasks, across the border of two epochs too, so no batch of that size
holds one twice, wherever it begins. (There is no such order for batches larger than the number of tasks: then the
epochs are equal, and a batch holds each task as evenly as can be.)

The order is a pure function of strata, seed, `apart` and the number of the draw.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from mafrt.core.errors import ConfigError
from mafrt.core.seeding import permutation, seed_of
from mafrt.environment.base import Env


class StratifiedOrder:
    """`order(draw)` is the task of that draw.

    Args:
        strata: of each task, the stratum that it belongs to.
        apart: how many draws in a row must be different tasks.
    """

    def __init__(self, strata: Sequence[str], seed: int, apart: int) -> None:
        self.strata, self.seed = tuple(strata), seed
        self.slack = len(strata) - min(apart, len(strata))
        """how much earlier than in the epoch before a task may come"""
        self.pattern = _pattern(self.strata)
        self._epochs: list[list[int]] = []

    def __call__(self, draw: int) -> int:
        epoch, place = divmod(draw, len(self.strata))
        while len(self._epochs) <= epoch:
            self._epochs.append(self._next())
        return self._epochs[epoch][place]

    def _next(self) -> list[int]:
        """The order of the next epoch: chance decides among the tasks that have waited long enough."""
        epoch = len(self._epochs)
        if not epoch:
            waiting: dict[str, list[int]] = {}
            for task in permutation(len(self.strata), self.seed, "strata"):
                waiting.setdefault(self.strata[task], []).append(task)
            return [waiting[stratum].pop() for stratum in self.pattern]
        before = self._epochs[-1]
        rng = random.Random(seed_of(self.seed, "strata", epoch))
        order: list[int] = []
        used: set[int] = set()
        for place, stratum in enumerate(self.pattern):
            # Never empty: the strata have the places of the epoch before, so as many tasks are ready as were needed.
            ready = [
                task for task in before[: place + self.slack + 1] if self.strata[task] == stratum and task not in used
            ]
            order.append(rng.choice(ready))
            used.add(order[-1])
        return order


def _pattern(strata: Sequence[str]) -> list[str]:
    """The stratum of each place of an epoch: the j-th of n lies at (j + 1/2) / n."""
    sizes = {stratum: strata.count(stratum) for stratum in sorted(set(strata))}
    places = [((index + 0.5) / size, stratum) for stratum, size in sizes.items() for index in range(size)]
    return [stratum for _, stratum in sorted(places)]


def strata_of(env: Env, key: str) -> list[str]:
    """The value of each task's record under `key`. Raises ConfigError if a record has no such key."""
    tasks = getattr(env, "tasks", None)
    if not tasks or len(tasks) != env.num_tasks or not all(hasattr(task, "meta") for task in tasks):
        raise ConfigError(
            f"stratify is {key!r}, but {env.class_name} has no tasks with records; leave it out (an environment "
            "gives `tasks`, each with its record's fields in `meta`)."
        )
    for task in tasks:
        if key not in task.meta:
            has = ", ".join(map(str, task.meta)) or "nothing"
            raise ConfigError(f"stratify is {key!r}, which the record of task {task.id} lacks; it has {has}.")
    return [str(task.meta[key]) for task in tasks]
