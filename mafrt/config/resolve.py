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
import stat
import sys
import sysconfig
import traceback
import types
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from mafrt.config import permission
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
        elsewhere: name in another library, in lower case -> what to give here.
    """

    def __init__(
        self,
        kind: str,
        shipped: Mapping[str, str] | None = None,
        error: type[MafrtError] = ConfigError,
        elsewhere: Mapping[str, str] | None = None,
    ) -> None:
        self.kind, self.error, self.elsewhere = kind, error, elsewhere or {}
        self._known: dict[str, Any] = dict(shipped or {})

    def register(self, name: str, value: Any) -> None:
        """Make `value` available as `name`.

        Registering the same object again changes nothing.

        Raises:
            ConfigError (or the class given as `error`): the name is not a text, holds a colon, or is taken.
        """
        if not isinstance(name, str) or not name or ":" in name:
            raise self.error(f"the name of a registered {self.kind} must be a text without ':', found {name!r}")
        if (known := self._known.get(name, value)) is not value:
            first = f" as {known}" if isinstance(known, str) else place_of(known)
            raise self.error(f"{self.kind} {name!r}{place_of(value)} is registered already{first}; choose another name")
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
                if (advice := self.elsewhere.get(name_or_path.lower())) is not None:
                    raise self.error(f"There is no {self.kind} {name_or_path!r}; {advice} (docs/coming_from.md).")
                sentence = unknown(self.kind, name_or_path, self._known)
                raise self.error(f"{sentence} (One's own is given as package.module:Class.)")
            return load_object(name_or_path, error=self.error)
        return _object(value, self.error) if isinstance(value, str) else value


def load_object(path: str, *, error: type[MafrtError] = ConfigError) -> Any:
    """The class or function that `package.module:Class` or `path/to/file.py:Class` names.

    A module is looked up in the current directory too: scripts have their own folder in `sys.path` instead. A name that
    only the files of a run hold is followed to modules outside that run, see `mafrt.config.permission`.

    Raises:
        ConfigError (or the class given as `error`): a part is missing, the import failed (with file and line of the
            user's code), the object cannot be called, or a run's files name it and may not.
    """
    value = _object(path, error)
    home = str(getattr(value, "__module__", "")) if isinstance(value, _DEFINED) else ""
    if home.partition(".")[0] in sys.stdlib_module_names:
        raise error(f"{path} is a part of Python itself; give a class or function of your own")
    if not permission.is_ours(path) and not _may_be_called(value, home):
        raise error(
            f"{path}: a run's files name a part of an installed package that is none of mafrt's kinds of objects; "
            f"{permission.REMEDY}"
        )
    return value


def declared(path: str) -> Any:
    """The class that a class in use names by its path, such as a rule its updater. Raises ConfigError.

    Unlike `load_object` it asks for no permission: code names it, and not the files of a run.
    """
    return _object(path, ConfigError)


def place_of(value: Any) -> str:
    """` (FILE, line N)` of a class or function; empty if it has none."""
    try:
        return f" ({inspect.getsourcefile(value)}, line {inspect.getsourcelines(value)[1]})"
    except (TypeError, OSError):
        return ""


def check_source(path: str, file: Path, *, error: type[MafrtError] = ConfigError) -> None:
    """The checks of `load_object` for an object whose file is known and which another process will import.

    Raises:
        ConfigError (or the class given as `error`): a run's files name it and may not.
    """
    _refuse_run_file(path, file, error)
    if not permission.is_ours(path) and not is_users(str(file)):
        raise error(f"{path}: a run's files name a part of an installed package; {permission.REMEDY}")


_DEFINED = (type, types.FunctionType, types.BuiltinFunctionType, types.MethodType)
"""Objects that know the module which defines them."""


def _may_be_called(value: Any, home: str) -> bool:
    """Whether an object that a run's files name is the user's own, or a class made for mafrt.

    Installed packages hold functions that do anything with the arguments that `run.json` would give them.
    """
    file = getattr(sys.modules.get(home), "__file__", None)
    if file is None or is_users(file):
        return file is not None
    if not isinstance(value, type):
        return False
    ours = any(kind is not value and kind.__module__.startswith("mafrt.") for kind in value.__mro__)
    return ours or all(callable(getattr(value, name, None)) for name in ("reset", "step"))


def _object(path: str, error: type[MafrtError]) -> Any:
    module_name, _, attribute = path.partition(":")
    if not module_name or not attribute:
        raise error(f"{path!r} is not package.module:NAME or path/to/file.py:NAME; both parts are needed")
    module = _load_file(path, module_name, error) if module_name.endswith(".py") else _import(path, module_name, error)
    value: Any = module
    for part in attribute.split("."):
        # A module's imports and a class's inner parts lead to the whole interpreter.
        if part.startswith("_") or (value is not module and isinstance(value, types.ModuleType)):
            raise error(f"{path}: {attribute!r} is no public class or function of the module; name one")
        if not hasattr(value, part):
            defined = {n: v for n, v in vars(module).items() if getattr(v, "__module__", None) == module.__name__}
            names = [n for n, v in defined.items() if isinstance(v, type) or inspect.isfunction(v)]
            reason = (
                unknown("class or function", attribute, names) if names else "the module defines no class or function"
            )
            raise error(f"{path}: {reason}")
        value = getattr(value, part)
    if not callable(value):
        raise error(f"{path}: {attribute!r} is a {type(value).__name__}, not a class or function")
    return value


def _load_file(path: str, file: str, error: type[MafrtError]) -> ModuleType:
    """The module that a Python file holds, under the file's own name."""
    source = Path(file).expanduser()
    if not source.is_file():
        raise error(f"{path}: there is no file {source}; give package.module:NAME or path/to/file.py:NAME")
    _refuse_run_file(path, source, error)
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
    except (Exception, SystemExit) as failure:  # a script without a guard may end itself
        if loaded is None:
            del sys.modules[source.stem]
        raise error(
            f"{path}: importing the module raised {type(failure).__name__}: {failure}{user_line(failure)}"
        ) from failure
    return module


def _refuse_run_file(path: str, file: str | Path, error: type[MafrtError]) -> None:
    """Raise unless a module's file lies outside the runs that are read, or the user typed its name."""
    if not permission.is_free(path) and (run := permission.run_of(file)) is not None:
        raise error(
            f"{path}: the module {file} lies inside the run {run}, whose files are not run; {permission.REMEDY}"
        )


def add_source_folder(path: str, file: str | None) -> None:
    """Let the module of `package.module:Class` be found although the current directory is another one.

    `file` is the module's source file as it was recorded; its folder (above the packages) goes to the end of
    `sys.path` if it is there and no other user may write to it. Raises ConfigError for a file inside the run.
    """
    if file is not None:
        _refuse_run_file(path, file, ConfigError)
    module_name = path.partition(":")[0]
    above = list(Path(file).parents) if file is not None else []
    if file is None or module_name.endswith(".py") or module_name.count(".") >= len(above):
        return
    folder = above[module_name.count(".")]
    if not folder.is_absolute() or not folder.is_dir() or str(folder) in sys.path:
        return
    if permission.run_of(folder) is None and _is_ours(folder):
        sys.path.append(str(folder))


def _is_ours(folder: Path) -> bool:
    """Whether only this user and the machine's own can put modules into a folder."""
    about = folder.stat()
    return about.st_uid in (os.getuid(), 0) and not about.st_mode & stat.S_IWOTH


def _import(path: str, module_name: str, error: type[MafrtError]) -> ModuleType:
    # A look through every folder of `sys.path` costs a millisecond or more, and a name is resolved many times in a run.
    if (loaded := _finished(module_name)) is not None:
        _refuse_run_file(path, getattr(loaded, "__file__", None) or "", error)
        return loaded
    here = os.getcwd()
    # First for this import: a folder that an earlier import left at the end must not hide this one's module. Not for
    # modules of the library, whose imports nothing in the current directory may answer.
    ours = (here not in sys.path or here in _ADDED) and not module_name.startswith("mafrt.")
    ours = ours and (permission.is_free(path) or permission.run_of(here) is None)
    if ours:
        sys.path[:] = [here, *(folder for folder in sys.path if folder != here)]
    try:
        importlib.invalidate_caches()
        parts = module_name.split(".")
        for length in range(1, len(parts) + 1):
            # Looked up part by part, since looking up a module of a package runs the package.
            spec = importlib.util.find_spec(".".join(parts[:length]))
            for file in [] if spec is None else [spec.origin, *(spec.submodule_search_locations or ())]:
                if file and os.path.isabs(file):
                    _refuse_run_file(path, file, error)
        return importlib.import_module(module_name)
    except MafrtError:
        raise
    except ModuleNotFoundError as failure:
        if failure.name and (module_name == failure.name or module_name.startswith(failure.name + ".")):
            raise error(
                f"{path}: there is no module {failure.name!r} in {here} or among the installed packages"
            ) from failure
        raise error(f"{path}: the module needs {failure.name!r}, which is not installed") from failure
    except (Exception, SystemExit) as failure:
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
    """The module if its import is over; another thread may be in the middle of it.

    One without a spec, such as `__main__` or a module that a program has made itself, was not imported at all.
    """
    loaded = sys.modules.get(module_name)
    return None if getattr(getattr(loaded, "__spec__", None), "_initializing", False) else loaded


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
