"""The schema of a settings dataclass: name, type, default, help and choices of every field.

Flags, `--help`, YAML keys and `args.yaml` are generated from it, so a setting is declared once. Standard library only.
"""

from __future__ import annotations

import ast
import difflib
import inspect
import re
import sys
import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

from mafrt.core.errors import ConfigError
from mafrt.core.text import real_number, shortened

_ARGUMENT = re.compile(r"^ *`?(\w+)`?: (.+(?:\n(?! *`?\w+`?: | *Raises|$).+)*)", re.MULTILINE)
"""An entry `name: text` of a docstring"""


class Bounds(NamedTuple):
    """Values that a number may have, as part of its annotation: `Annotated[int, Bounds(least=2)]`."""

    least: float | None = None
    above: float | None = None
    most: float | None = None
    below: float | None = None


UNBOUNDED = Bounds()
Count = Annotated[int, Bounds(least=1)]
CountOrZero = Annotated[int, Bounds(least=0)]
Port = Annotated[int, Bounds(least=0, most=65535)]
Positive = Annotated[float, Bounds(above=0)]
NotNegative = Annotated[float, Bounds(least=0)]
Share = Annotated[float, Bounds(least=0, most=1)]
PositiveShare = Annotated[float, Bounds(above=0, most=1)]
ClipRange = Annotated[float, Bounds(above=0, below=1)]
AboveOne = Annotated[float, Bounds(above=1)]


@dataclass(frozen=True)
class Setting:
    """One field as the command line sees it."""

    name: str
    kind: type
    """bool, int, float or str; of the elements where `many`"""
    default: Any
    help: str
    optional: bool
    many: bool
    choices: tuple[str, ...] | None
    bounds: Bounds = UNBOUNDED


def describe(kind: type) -> dict[str, Setting]:
    """The settings of a dataclass: types and defaults from the fields, help from the text under each field.

    Inherited fields keep the help of the class that declares them, and bounds that a redeclared one leaves out. Fields
    with `metadata={"flag": False}`, and those of types that no flag can hold (functions, mappings), are left out.
    """
    flags = {item.name for item in fields(kind) if item.metadata.get("flag", True)}
    return {name: setting for name, setting in _described(kind).items() if name in flags}


@cache
def _described(kind: Any) -> dict[str, Setting]:
    helps: dict[str, str] = {}
    bounds: dict[str, Bounds] = {}
    for base in reversed(kind.__mro__[:-1]):
        helps |= _help_texts(base)
        if base is not kind and hasattr(base, "__dataclass_fields__"):
            bounds |= {name: setting.bounds for name, setting in _described(base).items()}
    hints = get_type_hints(kind, include_extras=True)
    described = {}
    for item in fields(kind):
        setting = _setting(item.name, hints[item.name], item.default, helps.get(item.name, ""))
        if setting is not None:
            inherited = bounds.get(item.name, UNBOUNDED)
            described[item.name] = replace(setting, bounds=inherited) if setting.bounds == UNBOUNDED else setting
    return described


def _help_texts(kind: type) -> dict[str, str]:
    """The text under each field that the class itself declares; empty if its source is not at hand."""
    tree = _top_classes(kind.__module__).get(kind.__qualname__)
    if tree is None:  # a class inside of a function or another class
        try:
            definition = ast.parse(textwrap.dedent(inspect.getsource(kind))).body[0]
        except (OSError, TypeError, SyntaxError):
            return {}
        assert isinstance(definition, ast.ClassDef)
        tree = definition
    return {
        before.target.id: str(ast.literal_eval(after.value))
        for before, after in zip(tree.body, tree.body[1:], strict=False)
        if isinstance(before, ast.AnnAssign) and isinstance(before.target, ast.Name)
        if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
    }


@cache
def _top_classes(module: str) -> dict[str, ast.ClassDef]:
    """Name -> definition of a module's classes; `inspect` would parse the module again for each of them."""
    try:
        body = ast.parse(inspect.getsource(sys.modules[module])).body
    except (KeyError, OSError, TypeError, SyntaxError):
        return {}
    return {node.name: node for node in body if isinstance(node, ast.ClassDef)}


def describe_parameters(function: Any, parameters: Mapping[str, Any], text: str) -> dict[str, Setting]:
    """The parameters of a function that a flag can hold: types by its annotations, help by `text`, its docstring."""
    try:
        hints = get_type_hints(function)
    except Exception:  # a name that only type checkers import
        return {}
    helps = {name: " ".join(words.split()) for name, words in _ARGUMENT.findall(text)}
    described = {}
    for name, parameter in parameters.items():
        default = None if parameter.default is parameter.empty else parameter.default
        if name in hints and (setting := _setting(name, hints[name], default, helps.get(name, "").rstrip("."))):
            described[name] = setting
    return described


def _setting(name: str, hint: Any, default: Any, text: str) -> Setting | None:
    """The setting of an annotation, with `text` as its help; None if no flag can hold it."""
    optional = many = False
    choices, bounds = None, UNBOUNDED
    if type(None) in get_args(hint):
        optional = True
        hint = next(arg for arg in get_args(hint) if arg is not type(None))
    if get_origin(hint) is tuple:
        many, hint = True, get_args(hint)[0]
    if get_origin(hint) is Annotated:
        hint, *notes = get_args(hint)
        bounds = next((note for note in notes if isinstance(note, Bounds)), bounds)
    if get_origin(hint) is Literal:
        choices, hint = get_args(hint), str
    return (
        Setting(name, hint, default, text, optional, many, choices, bounds) if hint in (bool, int, float, str) else None
    )


LISTED = 30
"""Names that an error lists where none is near."""


def unknown(kind: str, name: object, known: Iterable[str] | Mapping[str, Any]) -> str:
    """The sentence for an unknown name, with the nearest known one."""
    names = sorted(known)
    # A weaker likeness misleads: `defaults` is like `sides`. Dashes are no likeness: `--env` would be like `--level`.
    bare, plain = str(name).lstrip("-"), {other.lstrip("-"): other for other in names}
    near = [other for like, other in plain.items() if like.lower() == bare.lower()]
    near = near or [other for like, other in plain.items() if sorted(like) == sorted(bare)]  # two letters swapped
    near = near or [plain[like] for like in difflib.get_close_matches(bare, plain, n=1, cutoff=0.65)]
    # Half of a name, or its beginning: `size` would be like `critic_hidden_size`.
    within = [other for like, other in plain.items() if len(bare) > 2 and bare.lower() in like.lower()]
    near = near or [name for name in within if len(name) <= 2 * len(bare) or name.lstrip("-").startswith(bare)]
    few = len(names) <= LISTED
    hint = (
        f"did you mean {near[0]!r}?" if near else f"known are {', '.join(names)}." if few else "--help all lists them."
    )
    return f"There is no {kind} {name!r}; {hint}"


class Checked:
    """Root of settings dataclasses: `__post_init__` checks every field, and a class's own checks follow it."""

    def __post_init__(self) -> None:
        check_fields(self)


def check_fields(config: Any, where: str = "") -> None:
    """Raise ConfigError, `where` before it, unless every field of a settings dataclass has a value of its type.

    Numbers have to be finite, an int is taken for a float, and a Literal has to be one of its values.
    """
    kind: type = type(config)
    for field, setting in _described(kind).items():
        name, value = f"{where}{field}", getattr(config, field)
        if value is None and setting.optional:
            continue
        if setting.many:
            if not isinstance(value, tuple):
                raise ConfigError(f"{name} is {value!r}; expected a tuple.")
        elif setting.choices:
            check_choice(name, value, setting.choices)
        elif setting.kind is bool:
            check_bool(name, value)
        elif setting.kind in (int, float):
            check_number(name, value, whole=setting.kind is int, **setting.bounds._asdict())
        elif not isinstance(value, str):
            raise ConfigError(f"{name} is {value!r}; expected text.")


def check_bool(name: str, value: object) -> None:
    """Raise ConfigError unless `value` is True or False."""
    if not isinstance(value, bool):
        raise ConfigError(f"{name} is {shortened(repr(value))}; expected true or false.")


def check_choice(name: str, value: object, choices: Iterable[str]) -> None:
    """Raise ConfigError unless `value` is one of `choices`."""
    known = tuple(choices)
    if value not in known:
        raise ConfigError(f"{name} is {shortened(repr(value))}; choose one of {', '.join(known)}.")


def check_number(
    name: str,
    value: Any,
    *,
    least: float | None = None,
    above: float | None = None,
    most: float | None = None,
    below: float | None = None,
    whole: bool = False,
) -> None:
    """Raise ConfigError unless `value` is a finite number within the bounds that are given."""
    wrong_type = isinstance(value, bool) or not isinstance(value, int if whole else (int, float))
    if wrong_type or real_number(value) is None:
        expected = "a whole number" if whole else "a finite number"
        raise ConfigError(f"{name} is {shortened(repr(value))}; expected {expected}.")
    low = (least is None or value >= least) and (above is None or value > above)
    if low and (most is None or value <= most) and (below is None or value < below):
        return
    if most is not None or below is not None:
        first = f"({above:g}" if above is not None else f"[{least:g}" if least is not None else "(-inf"
        last = f"{most:g}]" if most is not None else f"{below:g})"
        raise ConfigError(f"{name} is {value!r}; choose a value in {first}, {last}.")
    bounds = f"of at least {least:g}" if least is not None else f"above {above:g}"
    raise ConfigError(f"{name} is {value!r}; choose a value {bounds}.")
