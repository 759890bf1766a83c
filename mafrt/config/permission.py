"""What the files of a run may set in motion: nothing, unless the user typed it.

A run folder is moved and shared, so its files are data. This module knows the run folders that a command reads, and the
one place that imports objects by name (`resolve.py`) asks it first. Modules outside the run, on the user's own path, go
on working; a module inside the run, a command, or the address of another machine wants a flag: the setting itself typed
again, or `--trust_run`.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from mafrt.core.errors import ConfigError

REMEDY = "type the setting yourself, or --trust_run if you know whose run this is"
COMMANDS = frozenset({"command", "env_python"})
"""settings, and arguments of environments, that are run as a command"""
OF_A_CALL = frozenset(
    {
        "output",
        "overwrite",
        "record_dir",
        "run_dir",
        "set_aside",
        "demonstrations",
        "push_to_hub",
        "public",
        "host",
        "port",
    }
)
"""settings of one call: what it writes and who may reach it. No run records them, so a run's file decides none"""
_ADDRESS = re.compile(r"(?<![a-z0-9+.-])[a-z][a-z0-9+.-]*+://([^\s/?#]*)", re.IGNORECASE)
"""Anywhere in a text, as a mixture holds several; the hosts, of which `grpc://a:1,b:2/x` has two."""


class _State:
    """Of this process: one command reads one run, or a few. Outside commands names come from the user's own program."""

    def __init__(self, command: bool = False) -> None:
        self.command = command
        self.runs: dict[str, None] = {}
        self.typed: set[str] = set()
        self.trusted = False


_state = _State()


@contextlib.contextmanager
def of_command() -> Iterator[None]:
    """Around a command: what it reads and is told is forgotten at its end."""
    global _state
    before, _state = _state, _State(command=True)
    try:
        yield
    finally:
        _state = before


def reading(run: str | os.PathLike[str]) -> None:
    """From now on the files below this folder are those of a run."""
    _state.runs |= dict.fromkeys(_places(run))
    # Python puts the current directory there, and any later import would look into it.
    sys.path[:] = [entry for entry in sys.path if run_of(entry or os.curdir) is None]


def typed(values: Iterable[object]) -> None:
    """Values of settings that the user typed, or wrote into a file of settings outside any run."""
    _state.typed |= {word for value in values for word in _texts(value)}


def trust() -> None:
    """`--trust_run`: the user vouches for the runs of this command."""
    _state.trusted = True


def is_free(name: str) -> bool:
    """Whether a name needs no permission: no run is read, the user vouches for it, or typed the name."""
    return _state.trusted or not _state.runs or name in _state.typed


def is_ours(name: str) -> bool:
    """Whether a name may stand for anything that the user has installed: it is free, or the user's program gives it."""
    return is_free(name) or not _state.command


def run_of(path: str | os.PathLike[str]) -> str | None:
    """The run folder that a file lies in, by its name or behind its links; None: in none, or the user vouches."""
    if _state.trusted:
        return None
    for place in _places(path):
        for run in _state.runs:
            if place == run or place.startswith(run.rstrip(os.sep) + os.sep):
                return run
    return None


def refuse_demands(values: Mapping[str, Any], whose: object) -> None:
    """Raise ConfigError for a command or another machine's address among values that only a run's files hold."""
    if _state.trusted:
        return
    for key, text, demand in demands(values):
        if text not in _state.typed:
            raise ConfigError(f"{whose} holds the {demand} {text[:80]!r} ({key}), which wants your consent; {REMEDY}.")


def demands(values: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """(dotted key, text, `command` or `address`) of commands, and of addresses that are not this machine's."""
    for key, text in _entries(values, ""):
        if key.rpartition(".")[2] in COMMANDS and text.strip():
            yield key, text, "command"
        elif not all(map(_is_here, _hosts(key, text))) or (text.startswith("@") and key.endswith("vllm_servers")):
            yield key, text, "address"


def _places(path: str | os.PathLike[str]) -> tuple[str, str]:
    """A path as it is named, and behind its links."""
    return os.path.abspath(os.path.expanduser(path)), os.path.realpath(Path(path).expanduser())


def _texts(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for entry in value.values():
            yield from _texts(entry)
    elif isinstance(value, (list, tuple)):
        for entry in value:
            yield from _texts(entry)


def _entries(value: Any, key: str) -> Iterator[tuple[str, str]]:
    """(dotted key, text) of all texts in a value."""
    if isinstance(value, str):
        yield key, value
    elif isinstance(value, Mapping):
        for name, entry in value.items():
            # What agents are told is text for a model; it is never called.
            if name != "prompt":
                yield from _entries(entry, f"{key}.{name}" if key else str(name))
    elif isinstance(value, (list, tuple)):
        # A command may be a list of words.
        if key.rpartition(".")[2] in COMMANDS and value:
            yield key, " ".join(map(str, value))
            return
        for entry in value:
            yield from _entries(_argument(entry) if key.endswith("env_kwargs") else entry, key)


def _argument(word: Any) -> Any:
    """`key=value`, or a JSON object, as the arguments that it stands for; anything else as it is."""
    if not isinstance(word, str):
        return word
    key, equals, value = word.partition("=")
    whole = word.lstrip().startswith("{")
    try:
        read = json.loads(word if whole else value)
    except (ValueError, RecursionError):
        read = value
    return read if whole else {key: read} if equals else word


def _hosts(key: str, text: str) -> list[str]:
    """The hosts that a text names; Ray's address is HOST:PORT alone, or a word for a cluster on this machine."""
    bare = key == "ray" and "://" not in text and text not in ("auto", "local")
    return [text] if bare else _ADDRESS.findall(text)


def _is_here(hosts: str) -> bool:
    """Whether all hosts of an address are on this machine's loopback."""
    try:
        names = [urlsplit(f"//{host}").hostname for host in hosts.split(",")]
    except ValueError:
        return False
    return "@" not in hosts and all(name == "localhost" or _is_loopback(name or "") for name in names)


def _is_loopback(name: str) -> bool:
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False
