"""Siblings of an environment that share the data that no episode changes: ready-made `spawn` and `fork`.

class MyGame(Env):
    spawn = spawn_sharing  # tasks are read once, however many siblings play
    fork = fork_sharing    # only if reset() and step() replace attributes and never write into their values
"""

from __future__ import annotations

import random
from typing import TypeVar

from mafrt.environment.base import Env

E = TypeVar("E", bound=Env)


def spawn_sharing(env: E) -> E:
    """A fresh sibling that holds the very objects that `env` holds; `reset` has to set all that an episode changes."""
    sibling = fork_sharing(env)
    sibling.rng, sibling.step_count = random.Random(), 0
    return sibling


def fork_sharing(env: E) -> E:
    """A sibling at the same point of the same episode; nothing is copied but the generator.

    Right where `reset` and `step` replace attributes and never write into their values.
    """
    sibling: E = object.__new__(type(env))
    vars(sibling).update(vars(env))
    sibling.rng = random.Random()
    sibling.rng.setstate(env.rng.getstate())
    return sibling
