"""Siblings of an environment that share what no episode changes: `spawn` and `fork` for whoever can use them.

class MyGame(Env):
    spawn = spawn_sharing  # tasks are read once, however many siblings play
    fork = fork_sharing    # only if reset() and step() replace attributes and never write into what they hold
"""

from __future__ import annotations

import random
from typing import TypeVar

from mafrt.environment.base import Env

E = TypeVar("E", bound=Env)


def spawn_sharing(env: E) -> E:
    """A fresh sibling that holds the very objects that `env` holds; `reset` has to set whatever an episode changes."""
    sibling = _twin(env)
    sibling.rng, sibling.done, sibling._acting = random.Random(), True, frozenset()
    return sibling


def fork_sharing(env: E) -> E:
    """A sibling in the same place of the same episode; nothing is copied but the generator.

    Right where `reset` and `step` replace attributes and never write into what they hold.

    Raises:
        EnvError: no episode is under way.
    """
    if env.done:
        return Env.fork(env)  # which says what is wrong
    sibling = _twin(env)
    sibling.rng, sibling._played = random.Random(), None
    sibling.rng.setstate(env.rng.getstate())
    return sibling


def _twin(env: E) -> E:
    sibling: E = object.__new__(type(env))
    vars(sibling).update(vars(env))
    return sibling
