"""Chooses the adapter of an environment class that is no `mafrt.Env`, for `make_env`."""

from __future__ import annotations

import sys
from typing import Any

from mafrt.environment.base import Env
from mafrt.environment.from_pettingzoo import FromAec, FromParallel
from mafrt.environment.plain_class import PlainEnv


def adapted(kind: type) -> type[Env] | None:
    """A `mafrt.Env` class around a user's class; None if it has no `reset` and `step`.

    It has the name and the module of the user's class, so that a run records that one and messages name it.
    """
    if not callable(getattr(kind, "reset", None)) or not callable(getattr(kind, "step", None)):
        return None
    names = {"factory": staticmethod(kind), "__doc__": kind.__doc__, "__module__": kind.__module__}
    return type(kind.__name__, (_adapter(kind),), {**names, "__qualname__": kind.__qualname__})


def _adapter(kind: type) -> Any:
    pettingzoo: Any = sys.modules.get("pettingzoo")  # a class of pettingzoo cannot be there without it
    if pettingzoo is not None and issubclass(kind, (pettingzoo.AECEnv, pettingzoo.ParallelEnv)):
        return FromAec if issubclass(kind, pettingzoo.AECEnv) else FromParallel
    return PlainEnv
