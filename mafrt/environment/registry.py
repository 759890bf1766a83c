"""Environments by name (`math`) or by path (`my_game:MyGame`), as `--env` takes them."""

from __future__ import annotations

import difflib
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from types import UnionType
from typing import Any, Literal, Union, Unpack, get_args, get_origin, get_type_hints

from mafrt.config.resolve import Registry, user_line
from mafrt.config.schema import Setting, describe_parameters, unknown
from mafrt.core.errors import EnvError, MafrtError
from mafrt.core.extras import package
from mafrt.core.text import error_line, shortened
from mafrt.environment.base import Env
from mafrt.environment.from_mrlm import standing_in
from mafrt.environment.from_pettingzoo import FromAec, FromParallel
from mafrt.environment.plain_class import PlainEnv
from mafrt.environment.session import Session, session_of

REMOTE = "grpc://"
"""Scheme of environments that are played on servers (`mafrt.environment.remote`)."""

PACKAGES = frozenset({"openenv", "reasoning_gym", "textarena", "verifiers"})
"""Environments that hold those of another project, named as PACKAGE:NAME."""

ENVIRONMENTS = Registry(
    "environment",
    {
        "math": "mafrt.envs.math:MathEnv",
        "debate": "mafrt.envs.math.env:DebateEnv",
        "tool": "mafrt.envs.math.env:ToolEnv",
        "code": "mafrt.envs.code:code_env",
        "tasks": "mafrt.envs.tasks:RewardEnv",
        "dsbench": "mafrt.envs.dsbench:DSBenchEnv",
        "search": "mafrt.envs.search:SearchEnv",
        "program": "mafrt.envs.program:ProgramEnv",
        "reasoning_gym": "mafrt.envs.reasoning_gym:ReasoningGym",
        "textarena": "mafrt.envs.textarena:TextArena",
        "openenv": "mafrt.envs.openenv:OpenEnv",
        "verifiers": "mafrt.envs.verifiers:VerifiersEnv",
        "referential": "mafrt.envs.games:Referential",
        "plan_path": "mafrt.envs.games:PlanPath",
        "sokoban": "mafrt.envs.games:Sokoban",
        "haggle": "mafrt.envs.games:Haggle",
        "tic_tac_toe": "mafrt.envs.games:TicTacToe",
        "sudoku": "mafrt.envs.games:Sudoku",
        "propose_solve": "mafrt.envs.games:ProposeSolve",
    },
    EnvError,
)


def register_env(name: str, factory: Callable[..., Env]) -> None:
    """Make `factory` (a class or a function that returns an Env) available as `make_env(name)`.

    Registering the same factory again changes nothing; another one under a name that is taken is an EnvError.

    >>> class Endless(mafrt.Env):
    ...     agents = ("walker",)
    >>> mafrt.register_env("endless", Endless)
    >>> mafrt.make_env("endless").agents
    ('walker',)
    """
    if not callable(factory):
        raise EnvError(f"the factory of environment {name!r} must be a class or function, found {factory!r}")
    ENVIRONMENTS.register(name, factory)


def env_names() -> tuple[str, ...]:
    """The names that `make_env` knows."""
    return ENVIRONMENTS.names()


def make_env(name_or_path: str, **kwargs: Any) -> Session:
    """A session of an environment, by its registered name or `package.module:Class`, built with `kwargs`.

    The session checks every call; `unwrapped` is the object itself. A class without our base class is adapted: a plain
    one with `reset` and `step`, a Gymnasium or a PettingZoo environment of texts.

    A module is looked up in the current directory as well. EnvError names the missing part: the name, the module, the
    class, or the setting that the constructor does not take.

    >>> mafrt.make_env("sudoku", empty=3)
    <Session of <Sudoku: chooser, filler>>
    """
    if name_or_path.startswith(REMOTE):
        return _remote(name_or_path, kwargs)
    factory = _factory(name_or_path)
    if name_or_path in PACKAGES and "name" not in kwargs:
        raise EnvError(f"{name_or_path} alone names no environment; expected {name_or_path}:NAME")
    if (package := _package(name_or_path)) is not None:
        named = {"name": name_or_path.partition(":")[2], **kwargs}  # a run records the name with its settings
        if not name_or_path.endswith(f":{named['name']}"):
            raise EnvError(f"{name_or_path} has its name already; leave the setting name={named['name']!r} out")
        name_or_path, kwargs = package, named
    _check_kwargs(name_or_path, factory, kwargs)
    if isinstance(factory, type) and not issubclass(factory, Env):
        wrapped = adapted(factory)
        if wrapped is None:
            raise EnvError(
                f"{name_or_path}: the class {factory.__name__} is not a subclass of mafrt.Env, and it has no "
                "reset() and step() of its own"
            )
        factory = wrapped
    try:
        env = factory(**kwargs)
        if not isinstance(env, Env) and (wrapped := adapted(type(env), factory)) is not None:
            # By a function that makes an environment of another library; the first has told its kind.
            getattr(env, "close", bool)()
            env = wrapped(**kwargs)
    except MafrtError:
        raise
    except Exception as error:
        raise EnvError(
            f"{name_or_path} could not be built: {type(error).__name__}: {error_line(error)}{user_line(error)}"
        ) from error
    if not isinstance(env, Env):
        raise EnvError(f"{name_or_path} made a {type(env).__name__}, which is not a mafrt.Env")
    return session_of(env)


def _package(name_or_path: str) -> str | None:
    """The package of PACKAGE:NAME; None for other names."""
    package, colon, _ = name_or_path.partition(":")
    return package if colon and package in PACKAGES else None


def _factory(name_or_path: str) -> Any:
    name_or_path = _package(name_or_path) or name_or_path
    if "://" in name_or_path:
        raise EnvError(
            f"{name_or_path}: an environment on a server is named as {REMOTE}HOST:PORT/NAME, or one of OpenEnv as "
            "openenv:http://HOST:PORT"
        )
    try:
        return ENVIRONMENTS.resolve(name_or_path)
    except EnvError as error:
        package, colon, rest = name_or_path.partition(":")
        if colon and (near := difflib.get_close_matches(package, PACKAGES, 1, cutoff=0.8)):
            raise EnvError(f"{error}; did you mean '{near[0]}:{rest}'?") from error
        if not standing_in(error):
            raise
    return ENVIRONMENTS.resolve(name_or_path)


def _remote(address: str, kwargs: dict[str, Any]) -> Session:
    """The environment of `grpc://HOST:PORT/NAME`."""
    package(f"the environment {address}", "grpc", "grpc", "grpc_health")
    from mafrt.environment.remote.client import RemoteEnv

    if other := sorted(kwargs.keys() - {"held_out"}):
        raise EnvError(f"{address}: found the setting {other[0]!r}; settings of an environment go to mafrt serve")
    return session_of(RemoteEnv(address, **kwargs))


def takes(name_or_path: str, setting: str) -> bool:
    """Whether the environment's constructor names this setting. EnvError as `make_env` for one that is not there."""
    if name_or_path.startswith(REMOTE) or (name_or_path not in ENVIRONMENTS and ":" not in name_or_path):
        return False  # make_env says that there is none
    factory = _factory(name_or_path)
    try:
        parameters = inspect.signature(factory).parameters
    except (TypeError, ValueError):
        return False
    return setting in parameters or setting in (_options(factory, parameters) or ())


def settings_of(name_or_path: str) -> dict[str, Setting]:
    """The settings of an environment: the parameters of its constructor that a flag can hold."""
    if name_or_path.startswith(REMOTE) or (name_or_path not in ENVIRONMENTS and ":" not in name_or_path):
        return {}
    factory = _factory(name_or_path)
    function: Any = getattr(factory, "__init__") if isinstance(factory, type) else factory  # noqa: B009
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return {}
    text = "\n\n".join(inspect.getdoc(part) or "" for part in (factory, function))
    found = describe_parameters(function, parameters, text)
    if _package(name_or_path) is not None:
        found.pop("name", None)  # it stands behind the colon
    return found


def held_out_of(env: Env, split: str) -> Mapping[str, Any]:
    """Arguments that give an environment's held-out instances of `validation` or `test`, so far as it has them."""
    return env.held_out if split == "test" or not env.validation else env.validation


def profile_of(name_or_path: str) -> str | None:
    """The team file that an environment's class names as its own (`Env.profile`); None if it names none."""
    known = name_or_path in ENVIRONMENTS or (":" in name_or_path and not name_or_path.startswith(REMOTE))
    return getattr(_factory(name_or_path), "profile", None) if known else None


def _options(factory: Callable[..., Any], parameters: Mapping[str, inspect.Parameter]) -> tuple[str, ...] | None:
    """Names behind `**options: Unpack[Options]`; () if there are no `**`; None if any name is taken."""
    taking = next((p.name for p in parameters.values() if p.kind == p.VAR_KEYWORD), None)
    if taking is None:
        return ()
    function: Any = factory
    try:
        kind = get_type_hints(function.__init__ if isinstance(factory, type) else function)[taking]
    except Exception:  # a name that only type checkers import
        return None
    return tuple(get_args(kind)[0].__annotations__) if get_origin(kind) is Unpack else None


def check_types(env_name: str, function: Any, kwargs: Mapping[str, Any]) -> None:
    """EnvError for an argument of another type than the one that the function names."""
    try:
        hints = get_type_hints(function)
    except Exception:  # a name that only type checkers import
        return
    for name, value in kwargs.items():
        if (wanted := _expected(value, hints.get(name, Any))) is not None:
            raise EnvError(f"environment {env_name}: {name} is {shortened(repr(value), 100)}; expected {wanted}.")


_WORDS: Mapping[Any, str] = {
    int: "a whole number", float: "a number", str: "a text", bool: "true or false", type(None): "nothing",
}  # fmt: skip


def _expected(value: Any, hint: Any) -> str | None:
    """What a type hint asks for where `value` is something else; None if it fits, or cannot be told."""
    kind, parts = get_origin(hint) or hint, get_args(hint)
    if kind in (Union, UnionType):
        faults = [_expected(value, part) for part in parts]
        shown = [fault for fault in faults if fault is not None and fault != _WORDS[type(None)]]
        return None if None in faults else " or ".join(sorted(shown, key=len))
    if kind is Literal:
        return None if value in parts else f"one of {', '.join(map(str, parts))}"
    if kind in _WORDS:
        good = isinstance(value, (int, float) if kind is float else kind)
        return None if good and isinstance(value, bool) <= (kind is bool) else _WORDS[kind]
    if kind in (tuple, list, Sequence):
        inner = next((part for part in parts if part is not ...), Any)
        if isinstance(value, (tuple, list)) and all(_expected(entry, inner) is None for entry in value):
            return None
        return f"a list with {_WORDS[inner]} for each entry" if inner in _WORDS else "a list"
    if kind in (dict, Mapping):
        return None if isinstance(value, Mapping) else "an object of names and values"
    return None


def _check_kwargs(env_name: str, factory: Callable[..., Any], kwargs: dict[str, Any]) -> None:
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
    options = _options(target, parameters)
    if options is not None:
        known = [*named, *options]
        for name in kwargs:
            if name not in known:
                if (reason := getattr(factory, "refused", {}).get(name)) is not None:
                    raise EnvError(f"environment {env_name} has no setting {name!r}: {reason}")
                why = unknown("setting", name, known) if known else f"it takes no settings, found {name!r}"
                raise EnvError(f"environment {env_name}: {why}")
    if str(getattr(target, "__module__", "")).startswith("mafrt."):
        check_types(env_name, target, kwargs)
    for name, p in named.items():
        if p.default is p.empty and name not in kwargs:
            raise EnvError(f"{env_name} needs the setting {name!r}; give it, or give it a default in the constructor")


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
