"""The one resolver of names and paths: `--env`, `--workflow`, `--algorithm`, `--engine` and `--coach` all use it.

A `Registry` maps short names to objects. User-defined objects need no registration: `package.module:Class` names them,
and the module may lie in the current directory. Shipped objects are listed as such paths too, so that nothing is
imported before it is asked for.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import sys
import sysconfig
import traceback
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from mafrt.config.schema import unknown
from mafrt.core.errors import ConfigError, MafrtError

_LIBRARY = Path(__file__).resolve().parents[1]
_PYTHON = tuple(Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "purelib", "platlib"))


_ADDED: set[str] = set()
"""Folders that an import from here has added to the end of `sys.path`."""


class Registry:
    """Names of one kind of object, such as environments.

    Args:
        kind: noun for error messages, such as `environment`.
        shipped: name -> `package.module:Class` of the shipped classes.
        error: class of the errors.
    """

    def __init__(
        self, kind: str, shipped: Mapping[str, str] | None = None, error: type[MafrtError] = ConfigError
    ) -> None:
        self.kind, self.error = kind, error
        self._known: dict[str, Any] = dict(shipped or {})

    def register(self, name: str, value: Any) -> None:
        """Make `value` available as `name`.

        Registering the same object again changes nothing.

        Raises:
            ConfigError (or the class given as `error`): the name is not a text, holds a colon, or is taken.
        """
        if not isinstance(name, str) or not name or ":" in name:
            raise self.error(f"the name of a registered {self.kind} must be a text without ':', found {name!r}")
        if self._known.get(name, value) is not value:
            raise self.error(f"{self.kind} {name!r} is registered already; choose another name")
        self._known[name] = value

    def names(self) -> tuple[str, ...]:
        """All registered names, sorted."""
        return tuple(sorted(self._known))

    def path_of(self, name: str) -> str | None:
        """`module:Class` of a registered object; None for an unknown name."""
        value = self._known.get(name)
        return value if value is None or isinstance(value, str) else f"{value.__module__}:{value.__qualname__}"

    def __contains__(self, name: object) -> bool:
        return name in self._known

    def resolve(self, name_or_path: str) -> Any:
        """The object that a name or a `package.module:Class` stands for.

        Raises:
            ConfigError (or the class given as `error`): no such name, module or class, or the import failed.
        """
        value = self._known.get(name_or_path)
        if value is None:
            if ":" not in name_or_path:
                sentence = unknown(self.kind, name_or_path, self._known)
                raise self.error(f"{sentence} (One's own is given as package.module:Class.)")
            value = name_or_path
        return load_object(value, error=self.error) if isinstance(value, str) else value


def load_object(path: str, *, error: type[MafrtError] = ConfigError) -> Any:
    """The class or function that `package.module:Class` or `path/to/file.py:Class` names.

    A module is looked up in the current directory too: scripts have their own folder in `sys.path` instead.

    Raises:
        ConfigError (or the class given as `error`): a part is missing, the import failed (with file and line of the
            user's code), or the object cannot be called.
    """
    module_name, _, attribute = path.partition(":")
    if not module_name or not attribute:
        raise error(f"{path!r} is not package.module:Class; both parts are needed")
    module = _load_file(path, module_name, error) if module_name.endswith(".py") else _import(path, module_name, error)
    value: Any = module
    for part in attribute.split("."):
        if not hasattr(value, part):
            own = {n: v for n, v in vars(module).items() if getattr(v, "__module__", None) == module.__name__}
            names = [n for n, v in own.items() if isinstance(v, type)]
            functions = [n for n, v in own.items() if inspect.isfunction(v)]
            if names or not functions:
                raise error(f"{path}: {unknown('class', attribute, names) if names else 'the module has no classes'}")
            raise error(f"{path}: {unknown('function', attribute, functions)}")
        value = getattr(value, part)
    if not callable(value):
        raise error(f"{path}: {attribute!r} is a {type(value).__name__}, not a class")
    return value


def _load_file(path: str, file: str, error: type[MafrtError]) -> ModuleType:
    """The module that a Python file holds, under the file's own name."""
    source = Path(file).expanduser()
    if not source.is_file():
        raise error(f"{path}: there is no file {source}; give package.module:NAME or path/to/file.py:NAME")
    loaded = sys.modules.get(source.stem)
    if loaded is not None and getattr(loaded, "__file__", None) == str(source.resolve()):
        return loaded
    spec = importlib.util.spec_from_file_location(source.stem, source.resolve())
    if spec is None or spec.loader is None:
        raise error(f"{path}: {source} cannot be loaded as a Python module")
    module = importlib.util.module_from_spec(spec)
    if loaded is None:
        sys.modules[source.stem] = module  # so that its classes can be found by name
    try:
        spec.loader.exec_module(module)
    except Exception as failure:
        if loaded is None:
            del sys.modules[source.stem]
        raise error(
            f"{path}: importing the module raised {type(failure).__name__}: {failure}{user_line(failure)}"
        ) from failure
    return module


def add_source_folder(path: str, file: str | None) -> None:
    """Let the module of `package.module:Class` be found although the current directory is another one.

    `file` is the module's source file as it was recorded; its folder (above the packages) goes to the end of
    `sys.path` if it is there.
    """
    module_name = path.partition(":")[0]
    if file is None or module_name.endswith(".py"):
        return
    folder = Path(file).parents[module_name.count(".")]
    if folder.is_dir() and str(folder) not in sys.path:
        sys.path.append(str(folder))


def _import(path: str, module_name: str, error: type[MafrtError]) -> ModuleType:
    # A look through every folder of `sys.path` costs a millisecond or more, and a name is resolved many times in a run.
    if (loaded := _finished(module_name)) is not None:
        return loaded
    here = os.getcwd()
    # First for this import: a folder that an earlier import left at the end must not hide this one's module.
    ours = here not in sys.path or here in _ADDED
    if ours:
        sys.path[:] = [here, *(folder for folder in sys.path if folder != here)]
    try:
        importlib.invalidate_caches()
        return importlib.import_module(module_name)
    except ModuleNotFoundError as failure:
        if failure.name and (module_name == failure.name or module_name.startswith(failure.name + ".")):
            raise error(
                f"{path}: there is no module {failure.name!r} in {here} or among the installed packages"
            ) from failure
        raise error(f"{path}: the module needs {failure.name!r}, which is not installed") from failure
    except Exception as failure:
        raise error(
            f"{path}: importing the module raised {type(failure).__name__}: {failure}{user_line(failure)}"
        ) from failure
    finally:
        if ours:
            # Moved to the end: later imports of the module still work, and no installed package is hidden.
            sys.path.remove(here)
            sys.path.append(here)
            _ADDED.add(here)


def _finished(module_name: str) -> ModuleType | None:
    """The module if its import is over; another thread may be in the middle of it."""
    loaded = sys.modules.get(module_name)
    spec = getattr(loaded, "__spec__", None)
    return None if spec is None or getattr(spec, "_initializing", False) else loaded


def user_line(failure: BaseException) -> str:
    """` (FILE, line N)` of the user's own code that raised `failure`; empty if no frame of it is the user's.

    Frames of mafrt itself, of the standard library and of installed packages are passed over.
    """
    if isinstance(failure, SyntaxError) and failure.filename:
        return f" ({failure.filename}, line {failure.lineno})"
    for frame in reversed(traceback.extract_tb(failure.__traceback__)):
        if is_users(frame.filename):
            return f" ({frame.filename}, line {frame.lineno})"
    return ""


def is_users(filename: str) -> bool:
    """Whether a frame's file is the user's own: a real file outside mafrt, the standard library and packages."""
    file = Path(filename)
    if not file.is_file():
        return False  # <string>, <frozen importlib>
    if {"site-packages", "dist-packages"} & set(file.parts):
        return False  # also of another environment that `.pth` files or PYTHONPATH add
    return not any(file.resolve().is_relative_to(folder) for folder in (_LIBRARY, *_PYTHON))
