"""Chooses the adapter of an environment class that is no `mafrt.Env`, for `make_env`."""

from __future__ import annotations

import sys
from typing import Any

from mafrt.environment.base import Env
from mafrt.environment.from_pettingzoo import FromAec, FromParallel
from mafrt.environment.plain_class import PlainEnv


def adapted(kind: type, factory: Any = None) -> type[Env] | None:
    """A `mafrt.Env` class around a user's class; None if it has no `reset` and `step`.

    It has the name and the module of the user's class, so that a run records that one and messages name it; or those
    of `factory`, a function that makes its instances, such as the `env` and `parallel_env` of PettingZoo's modules.
    """
    factory = factory or kind
    if not callable(getattr(kind, "reset", None)) or not callable(getattr(kind, "step", None)):
        return None
    told = factory if hasattr(factory, "__qualname__") else kind
    names = {"factory": staticmethod(factory), "__doc__": kind.__doc__, "__module__": told.__module__}
    return type(told.__name__, (_adapter(kind),), {**names, "__qualname__": told.__qualname__})


def _adapter(kind: type) -> Any:
    pettingzoo: Any = sys.modules.get("pettingzoo")  # a class of pettingzoo cannot be there without it
    if pettingzoo is not None and issubclass(kind, (pettingzoo.AECEnv, pettingzoo.ParallelEnv)):
        return FromAec if issubclass(kind, pettingzoo.AECEnv) else FromParallel
    return PlainEnv
