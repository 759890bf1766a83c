"""Environments by name (`math`) or by path (`my_game:MyGame`), as `--env` takes them."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from mafrt.config.schema import unknown
from mafrt.core.errors import EnvError, MafrtError
from mafrt.environment.base import Env

# Built-in environments are named by path, so that nothing is imported before it is asked for.
_FACTORIES: dict[str, str | Callable[..., Env]] = {
    "math": "mafrt.envs.math:MathEnv",
    "code": "mafrt.envs.code:CodeEnv",
    "dsbench": "mafrt.envs.dsbench:DSBenchEnv",
}


def register_env(name: str, factory: Callable[..., Env]) -> None:
    """Make `factory` (a class or a function that returns an Env) available as `make_env(name)`.

    Registering the same factory again changes nothing; another one under a name that is taken is an EnvError.
    """
    if not isinstance(name, str) or not name or ":" in name:
        raise EnvError(f"an environment's name must be a text without ':', found {name!r}")
    if not callable(factory):
        raise EnvError(f"the factory of environment {name!r} must be a class or function, found {factory!r}")
    if _FACTORIES.get(name, factory) is not factory:
        raise EnvError(f"environment {name!r} is registered already; choose another name")
    _FACTORIES[name] = factory


def env_names() -> tuple[str, ...]:
    """The names that `make_env` knows."""
    return tuple(sorted(_FACTORIES))


def make_env(name_or_path: str, **kwargs: Any) -> Env:
    """An environment from its registered name or from `package.module:Class`, built with `kwargs`.

    A module is looked up in the current directory as well. EnvError says what is missing: the name, the module, the
    class, or the setting that the constructor does not take.
    """
    known = _FACTORIES.get(name_or_path)
    if known is None and ":" not in name_or_path:
        raise EnvError(
            f"{unknown('environment', name_or_path, _FACTORIES)} (One's own is given as package.module:Class.)"
        )
    factory = load_object(name_or_path if known is None else known) if not callable(known) else known
    if isinstance(factory, type) and not issubclass(factory, Env):
        raise EnvError(f"{name_or_path}: the class {factory.__name__} is not a subclass of mafrt.Env")
    _check_kwargs(name_or_path, factory, kwargs)
    try:
        env = factory(**kwargs)
    except MafrtError:
        raise
    except Exception as error:
        raise EnvError(f"{name_or_path} could not be built: {type(error).__name__}: {error}") from error
    if not isinstance(env, Env):
        raise EnvError(f"{name_or_path} made a {type(env).__name__}, which is not a mafrt.Env")
    return env


def takes(name_or_path: str, setting: str) -> bool:
    """Whether the environment's constructor names this setting. EnvError as `make_env` for one that is not there."""
    known = _FACTORIES.get(name_or_path)
    if known is None and ":" not in name_or_path:
        return False  # make_env says what is wrong
    factory = load_object(name_or_path if known is None else known) if not callable(known) else known
    try:
        return setting in inspect.signature(factory).parameters
    except (TypeError, ValueError):
        return False


def load_object(path: str) -> Callable[..., Any]:
    """The class or function that `package.module:Class` names. Raises EnvError, which says what is missing."""
    module_name, _, attribute = path.partition(":")
    if not module_name or not attribute:
        raise EnvError(f"{path!r} is not package.module:Class; both parts are needed")
    module = _import(path, module_name)
    found = module
    for part in attribute.split("."):
        if not hasattr(found, part):
            names = [n for n, v in vars(module).items() if isinstance(v, type) and v.__module__ == module.__name__]
            raise EnvError(f"{path}: {unknown('class', attribute, names) if names else 'the module has no classes'}")
        found = getattr(found, part)
    if not callable(found):
        raise EnvError(f"{path}: {attribute!r} is a {type(found).__name__}, not a class")
    return found


def _import(path: str, module_name: str) -> ModuleType:
    """Import a module that may lie where the command was typed; scripts have their own folder in sys.path instead."""
    here = os.getcwd()
    ours = here not in sys.path
    if ours:
        sys.path.insert(0, here)
    try:
        importlib.invalidate_caches()
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name and (module_name == error.name or module_name.startswith(error.name + ".")):
            raise EnvError(
                f"{path}: there is no module {error.name!r} in {here} or among the installed packages"
            ) from error
        raise EnvError(f"{path}: the module needs {error.name!r}, which is not installed") from error
    except Exception as error:
        raise EnvError(f"{path}: importing the module raised {type(error).__name__}: {error}") from error
    finally:
        if ours:
            # Last from now on: what the module imports later is found, and nothing installed is hidden.
            sys.path.remove(here)
            sys.path.append(here)


def _check_kwargs(what: str, factory: Callable[..., Any], kwargs: dict[str, Any]) -> None:
    """EnvError for a setting that the constructor does not take, or one that it needs and was not given."""
    target: Any = factory
    if isinstance(factory, type):
        target = target.__init__ if target.__init__ is not object.__init__ else lambda self: None
    try:
        parameters = inspect.signature(target).parameters
    except (TypeError, ValueError):
        return
    named = {
        name: p
        for index, (name, p) in enumerate(parameters.items())
        if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) and not (index == 0 and isinstance(factory, type))
    }
    if not any(p.kind == p.VAR_KEYWORD for p in parameters.values()):
        for name in kwargs:
            if name not in named:
                why = unknown("setting", name, named) if named else f"it takes no settings, found {name!r}"
                raise EnvError(f"environment {what}: {why}")
    for name, p in named.items():
        if p.default is p.empty and name not in kwargs:
            raise EnvError(f"{what} needs the setting {name!r}; give it, or give it a default in the constructor")
