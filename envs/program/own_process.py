"""A process for each episode of a program that needs its own globals or environment.

Many programs name the address of their model in the environment (`OPENAI_BASE_URL`), or in a client that the whole
process shares. Several episodes in one process would then call each other's address. Such a program, found by its
source before it is imported, runs in a fork of a process that has its libraries loaded (`program_worker.py`).
"""

from __future__ import annotations

import ast
import importlib.util
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mafrt.core.errors import EnvError
from mafrt.core.reading import read_text
from mafrt.environment.worker_process import receive, send
from mafrt.envs.program.episode import ProgramEnd, ProgramEpisode

START_S = 120.0
"""for the libraries, or the program's own file, to be imported"""

_FRAMEWORKS = {"agents", "langchain_openai", "langchain_anthropic", "langgraph", "litellm", "autogen_ext", "crewai",
               "dspy", "smolagents", "pydantic_ai", "google"}  # fmt: skip
_CLIENTS = {"OpenAI", "AsyncOpenAI", "ChatOpenAI", "Anthropic", "AsyncAnthropic", "ChatAnthropic"}
_ADDRESSES = {"base_url", "openai_api_base", "api_base", "anthropic_api_url"}
_SETTERS = ("set", "configure", "register", "init", "update")
_ADDERS = ("append", "appendleft", "extend", "insert", "add")
"""of a value that other episodes see"""


_PROCESS_WIDE = {
    *("chdir", "fchdir", "umask", "redirect_stdout", "redirect_stderr"),
    # Of the event loop that coroutine programs share.
    *("all_tasks", "set_default_executor", "shutdown_default_executor", "set_event_loop_policy", "set_task_factory"),
}
"""Functions whose effect all episodes in a process would see."""
_OWN_LOOPS = {"run_until_complete", "async_to_sync"}


class Source:
    """A program's source, read without being run.

    Args:
        file: of its module.
        tree: of the same.
        function: of the episode.
    """

    def __init__(self, file: Path, tree: ast.Module, function: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        self.file, self.tree, self.function = file, tree, function

    @staticmethod
    def read(path: str) -> Source | None:
        """The source of `file.py:function` or `package.module:function`; None if it is not found."""
        module, _, name = path.partition(":")
        file = Path(module).expanduser() if module.endswith(".py") else _file_of(module)
        if file is None:
            return None
        try:
            tree = _Renamed().visit(ast.parse(read_text(file)))
        except (OSError, ValueError, SyntaxError, RecursionError):
            return None  # the import tells what is wrong
        for node in tree.body:
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name == name:
                return Source(file, tree, node)
            if isinstance(node, ast.Assign) and name in map(ast.unparse, node.targets):
                method = _method(tree, node.value)
                return None if method is None else Source(file, tree, method)
        return None

    @property
    def parameters(self) -> int:
        """Arguments that it takes, of (task, base_url)."""
        given = self.function.args
        return 2 if given.vararg is not None else min(2, len(given.posonlyargs) + len(given.args))

    @property
    def callable(self) -> bool:
        """Whether it can be called with these arguments."""
        given = self.function.args
        required = len(given.posonlyargs) + len(given.args) - len(given.defaults)
        return required <= self.parameters and None not in given.kw_defaults

    @property
    def agents(self) -> Any:
        """`AGENTS` of the module, or `agents` of the function, as it stands there."""
        for node in self.tree.body:
            target = node.targets[0] if isinstance(node, ast.Assign) else None
            if target is not None and ast.unparse(target) in ("AGENTS", f"{self.function.name}.agents"):
                try:
                    return ast.literal_eval(node.value)  # type: ignore[attr-defined]
                except (ValueError, TypeError):
                    return None  # computed; the first episodes tell
        return None

    @property
    def imports(self) -> list[str]:
        """Modules that the file imports at its head."""
        names: list[str] = []
        for node in self.tree.body:
            if isinstance(node, ast.Import):
                names += [each.name for each in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                names.append(node.module)
        return names

    @property
    def needs_process(self) -> bool:
        """Whether it takes its address from the environment, or puts it where the whole process sees it."""
        nodes = list(ast.walk(self.tree))
        if self.parameters < 2 or any(map(_writes_environment, nodes)) or any(map(_is_process_wide, nodes)):
            return True
        if self._keeps_async_client() and any(map(_runs_own_loop, nodes)):
            return True  # what it keeps belongs to the loop of the first episode
        given = [*self.function.args.posonlyargs, *self.function.args.args]
        name = given[1].arg if len(given) > 1 else None
        used = name is None or name in _names(self.function)
        if not used and (_FRAMEWORKS & {each.partition(".")[0] for each in self.imports} or self._own_client()):
            return True
        functions = [each for each in ast.walk(self.tree) if isinstance(each, (ast.FunctionDef, ast.AsyncFunctionDef))]
        return any(_shares(each, {name, "base_url", "client"} - {None}) for each in functions)

    def _keeps_async_client(self) -> bool:
        """Whether the module makes a client of coroutines that all episodes use."""
        made = [_last_name(call.func) for node in self.tree.body if isinstance(node, (ast.Assign, ast.AnnAssign))
                for call in ast.walk(node) if isinstance(call, ast.Call)]  # fmt: skip
        return any(name in _CLIENTS and name.startswith("Async") for name in made)

    def _own_client(self) -> bool:
        """Whether a client is made without an address."""
        return any(
            isinstance(node, ast.Call)
            and _last_name(node.func) in _CLIENTS
            and not any(each.arg is None or each.arg in _ADDRESSES for each in node.keywords)
            for node in ast.walk(self.tree)
        )


def _method(tree: ast.Module, made: ast.AST) -> ast.FunctionDef | ast.AsyncFunctionDef | None:
    """What `Class(...)` or `Class(...).method` calls, without its `self`: the object is one for all episodes."""
    name = "__call__"
    if isinstance(made, ast.Attribute):
        name, made = made.attr, made.value
    if not isinstance(made, ast.Call):
        return None
    for kind in tree.body:
        for node in kind.body if isinstance(kind, ast.ClassDef) and kind.name == _last_name(made.func) else ():
            if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) or node.name != name:
                continue
            if node.args.args and not node.decorator_list:
                del node.args.args[0]
                return node
    return None


def _file_of(module: str) -> Path | None:
    """The file of a module that is imported already, or lies in the current folder or on the path."""
    if module in sys.modules:
        file = getattr(sys.modules[module], "__file__", None)
        return None if file is None else Path(file)
    for folder in (os.getcwd(), *sys.path):
        base = Path(folder, *module.split("."))
        for file in (base.with_suffix(".py"), base / "__init__.py"):
            if file.is_file():
                return file
    return None


def _last_name(node: ast.AST) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _names(node: ast.AST) -> set[str]:
    """Names that are read."""
    return {each.id for each in ast.walk(node) if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Load)}


def _is_environ(node: ast.AST) -> bool:
    return _last_name(node) == "environ"


def _writes_environment(node: ast.AST) -> bool:
    if isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load) and _is_environ(node.value):
        return _is_address(node.slice)
    if not isinstance(node, ast.Call):
        return False
    if _last_name(node.func) == "putenv":
        return not node.args or _is_address(node.args[0])
    if not isinstance(node.func, ast.Attribute) or not _is_environ(node.func.value):
        return False
    if node.func.attr in ("setdefault", "pop", "__setitem__"):
        return not node.args or _is_address(node.args[0])
    return node.func.attr in ("update", "clear")


def _is_address(key: ast.AST) -> bool:
    """Whether the name of an environment variable may be that of a model's address or key."""
    if not isinstance(key, ast.Constant) or not isinstance(key.value, str):
        return True
    return any(part in key.value.upper() for part in ("OPENAI", "ANTHROPIC", "BASE_URL", "API_BASE", "API_KEY"))


def _is_process_wide(node: ast.AST) -> bool:
    if isinstance(node, ast.Call):
        return _last_name(node.func) in _PROCESS_WIDE
    targets = node.targets if isinstance(node, ast.Assign) else []
    return any(ast.unparse(target) in ("sys.stdout", "sys.stderr") for target in targets)


def _runs_own_loop(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and (
        _last_name(node.func) in _OWN_LOOPS or ast.unparse(node.func) in ("asyncio.run", "anyio.run", "trio.run")
    )


def _shares(function: ast.FunctionDef | ast.AsyncFunctionDef, start: set[Any]) -> bool:
    """Whether a function puts its address, or a value made from it, where other episodes see it."""
    given = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
    tainted, local = {each.arg for each in given} & start, {each.arg for each in given}
    shared: set[str] = set()
    for node in ast.walk(function):
        if isinstance(node, ast.Global):
            shared |= set(node.names)
        local |= {each.id for each in ast.walk(node) if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)}
    local -= shared
    for _ in range(4):  # also values that are made in several steps
        for target, value in _assignments(function):
            if _names(value) & tainted:
                tainted |= {each.id for each in ast.walk(target) if isinstance(each, ast.Name)} & (local | shared)
    if tainted & shared:
        return True
    for target, value in _assignments(function):
        if isinstance(target, (ast.Attribute, ast.Subscript)) and _lasts(target, local) and _names(value) & tainted:
            return True
    return any(
        isinstance(node, ast.Call)
        and (
            _last_name(node.func).startswith(_SETTERS)
            or (_last_name(node.func) in _ADDERS and _lasts(node.func, local))
        )
        and any(_names(each) & tainted for each in [*node.args, *(word.value for word in node.keywords)])
        for node in ast.walk(function)
    )


def _lasts(node: ast.AST, local: set[str]) -> bool:
    """Whether a chain of attributes and keys begins with a value that is not the function's own."""
    while isinstance(node, (ast.Attribute, ast.Subscript)):
        node = node.value
    if isinstance(node, ast.Call):
        return _last_name(node.func) in ("globals", "vars")
    return isinstance(node, ast.Name) and node.id not in local


class _Renamed(ast.NodeTransformer):
    """Gives back the names of what is imported as another, and of `e = os.environ`."""

    def __init__(self) -> None:
        self.names: dict[str, str] = {}

    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.AST:
        self.names |= {each.asname: each.name for each in node.names if each.asname}
        return node

    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        if _is_environ(node.value):
            self.names |= {target.id: "environ" for target in node.targets if isinstance(target, ast.Name)}
        return self.generic_visit(node)

    def visit_Name(self, node: ast.Name) -> ast.AST:
        return ast.copy_location(ast.Name(self.names.get(node.id, node.id), node.ctx), node)


def _assignments(function: ast.AST) -> Iterator[tuple[ast.AST, ast.AST]]:
    for node in ast.walk(function):
        if isinstance(node, ast.Assign):
            yield from ((target, node.value) for target in node.targets)
        elif isinstance(node, (ast.AnnAssign, ast.AugAssign, ast.NamedExpr)) and node.value is not None:
            yield node.target, node.value
        elif isinstance(node, (ast.With, ast.AsyncWith)):
            yield from ((each.optional_vars, each.context_expr) for each in node.items if each.optional_vars)


# ---------------------------------------------------------------------------------------------------------- processes


class ProgramProcesses:
    """Starts a process for each episode.

    Args:
        path: of the program.
        source: of the same.
    """

    def __init__(self, path: str, source: Source) -> None:
        self.path, self.source = path, source
        self._control: socket.socket | None = None
        self._lock = threading.Lock()

    def start(self, episode: ProgramEpisode, task: dict[str, Any], base_url: str) -> None:
        """Start the program, imported. Its end arrives in the episode's mailbox."""
        ours, theirs = socket.socketpair()
        ours.set_inheritable(False)
        try:
            with self._lock, theirs:
                socket.send_fds(self._nursery(), [b"f"], [theirs.fileno()])
            send(ours, {"task": task, "base_url": base_url, "key": episode.key, "parameters": self.source.parameters})
            ours.settimeout(START_S)
            begun = receive(ours)
        except (OSError, ValueError) as error:
            ours.close()
            self._control = None  # the next episode starts it again
            episode.events.put(ProgramEnd(error=f"could not be started: {error}"))
            return
        if begun is None or "error" in begun:
            ours.close()
            episode.events.put(ProgramEnd(error="ended while it was imported" if begun is None else begun["error"]))
            return
        ours.settimeout(None)
        process = _Episode(ours)
        episode.stop, episode.line = process.end, process.line
        threading.Thread(target=process.follow, args=(episode,), daemon=True, name=episode.key).start()

    def _nursery(self) -> socket.socket:
        """The channel to the process that is forked; it is started once."""
        if self._control is not None:
            return self._control
        ours, theirs = socket.socketpair()
        with theirs:
            subprocess.Popen(
                [sys.executable, "-P", "-m", "mafrt.envs.program.program_worker", str(theirs.fileno()), self.path],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                start_new_session=True,  # Ctrl-C is for the trainer
            )
        ours.settimeout(START_S)
        send(ours, {"imports": [name for name in self.source.imports if _is_installed(name)]})
        if receive(ours) is None:
            ours.close()
            raise EnvError(f"the process of {self.path} ended while it loaded its libraries")
        self._control = ours
        return ours


class _Episode:
    """The trainer's side of one process."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._line = ""
        self._told = threading.Event()

    def follow(self, episode: ProgramEpisode) -> None:
        """Pass the end on."""
        ended = ProgramEnd(error="ended without a result: its process was killed, or left by itself")
        with self._channel:
            while True:
                try:
                    message = receive(self._channel)
                except (OSError, ValueError):
                    message = None
                if message is None:
                    break
                if "line" in message:
                    self._line = str(message["line"])
                    self._told.set()
                    continue
                ended = ProgramEnd(message.get("returned"), message.get("error"))
                break
        episode.events.put(ended)

    def line(self) -> str:
        """Where the program stands; empty if it does not say so soon."""
        try:
            send(self._channel, {"op": "line"})
        except (OSError, ValueError):
            return ""
        self._told.wait(2.0)
        return self._line

    def end(self) -> None:
        """Kill the process: its channel ends, and it with it."""
        try:
            self._channel.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # it has ended


def _is_installed(name: str) -> bool:
    """Whether a module is an installed package, which may be loaded before the address is known."""
    try:
        spec = importlib.util.find_spec(name.partition(".")[0])
    except (ImportError, ValueError):
        return False
    where = [] if spec is None else [spec.origin or "", *(spec.submodule_search_locations or ())]
    return any(part in place for place in where for part in ("site-packages", "dist-packages"))
