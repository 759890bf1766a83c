"""The command line, generated from settings dataclasses: strict names, one help line per flag, YAML underneath.

A `Command` lists the dataclasses that a script understands. Their fields are its flags
(`mafrt.config.train_config.describe`), so a setting has one name in Python, in a YAML file and on the command line.
Values are taken, weakest first, from the field's default, the command's own defaults, `--config file.yaml`, and the
flags. Standard library only at import: `--help` must not wait for torch.
"""

from __future__ import annotations

import argparse
import atexit
import difflib
import logging
import math
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from mafrt.config.algorithm import AlgorithmSettings, algorithm_class
from mafrt.config.schema import Setting, describe, unknown
from mafrt.core.distributed import joined, started
from mafrt.core.errors import ConfigError, MafrtError, ProcessLostError
from mafrt.core.reading import parse_yaml, read_text
from mafrt.core.shipped import shipped
from mafrt.core.threads import wait_passively
from mafrt.scripts.cli.flag_synonyms import SYNONYMS, synonym
from mafrt.scripts.cli.recorded_run import with_recorded_files
from mafrt.storage.run_record import RECORD, RunRecord, load_record

T = TypeVar("T")

DEBUG_HELP = "show the traceback of an error, not only its sentence"
CONFIG_HELP = "YAML file of settings, one `name: value` a line; flags win over it"


@dataclass(frozen=True)
class Settings:
    """All settings of one call by flat name, and the names set explicitly."""

    values: dict[str, Any]
    flags: frozenset[str]
    """names given on the command line"""
    given: frozenset[str]
    """names given on the command line or in the YAML file"""
    config: Path | None = None
    """the YAML file that was read"""
    record: RunRecord | None = None
    """of the run that goes on, is repeated or evaluated"""
    named: frozenset[str] = frozenset()
    """names given anywhere: on the command line, in the YAML file, or by the run that goes on"""

    def make(self, kind: type[T]) -> T:
        """One settings dataclass, filled and thereby checked."""
        if issubclass(kind, AlgorithmSettings):
            return kind.from_flags(self.values, self.named)  # type: ignore[return-value]
        return kind(**{name: self.values[name] for name in describe(kind)})

    def __getitem__(self, name: str) -> Any:
        return self.values[name]


@dataclass(frozen=True)
class Command:
    """One script's command line."""

    name: str
    summary: str
    groups: tuple[type, ...]
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """where this command's default differs from the field's"""
    epilog: str = ""
    refused: Mapping[str, str] = field(default_factory=dict)
    """flags of similar commands that this one lacks, each with the reason"""
    words: str | None = None
    """setting that the words before the first flag belong to, as in `mafrt report runs/A runs/B`"""

    def settings(self, algorithm: str | None = None) -> dict[str, Setting]:
        """All settings by name; those of `algorithm` (`package.module:Class`) too, in a command that has algorithms."""
        return {name: setting for kind in self.groups for name, setting in _describe(kind, algorithm).items()}

    def default(self, setting: Setting) -> Any:
        """The value of a setting that is not given."""
        value = self.defaults.get(setting.name, setting.default)
        return () if value is MISSING else value

    def parser(self, algorithm: str | None = None) -> argparse.ArgumentParser:
        """An argparse parser that returns only the given flags (no defaults), all values as text."""
        parser = _Parser(
            prog=f"mafrt {self.name}" + (f" {self.words.upper()}" if self.words else ""),
            description=self.summary,
            epilog=self.epilog,
            allow_abbrev=False,
            add_help=False,
            argument_default=argparse.SUPPRESS,
            formatter_class=_Help,
        )
        for kind in self.groups:
            group = parser.add_argument_group(_title(kind))
            for setting in _describe(kind, algorithm).values():
                _add(group, setting, self.default(setting))
        general = parser.add_argument_group("General")
        general.add_argument("--config", metavar="FILE", help=CONFIG_HELP)
        general.add_argument("--debug", action="store_true", help=DEBUG_HELP)
        general.add_argument("-h", "--help", action="help", help="show this help and leave")
        return parser

    def read(
        self, argv: Sequence[str], below: Mapping[str, Any] | None = None, record: RunRecord | None = None
    ) -> Settings:
        """Parse; raises ConfigError in one sentence for anything unknown, malformed or out of place.

        `below` are settings that lie between the defaults and the YAML file; names that this command does not have
        are passed over. `record` is that of the run which they come from; a configuration file that lies in a run
        brings the run's record along.
        """
        argv = self._with_words(argv)
        algorithm = self._named_algorithm(argv, below or {})
        parser = self.parser(algorithm)
        typed, rest = parser.parse_known_args([_underscored(word) for word in argv])
        _refuse_with_reason(rest, self.refused)
        _refuse(rest, [option for action in parser._actions for option in action.option_strings])
        flags = {name: value for name, value in vars(typed).items() if name not in ("config", "debug")}
        config = shipped(typed.config) if "config" in typed else None
        known = self.settings(algorithm)
        values = {name: self.default(setting) for name, setting in known.items()}
        for name, value in (below or {}).items():
            if name in known:
                values[name] = convert(known[name], value, name)
        stored = read_yaml(config) if config else {}
        if config is not None and record is None and (config.parent / RECORD).is_file():
            record = load_record(config.parent)
            stored = with_recorded_files(stored, record)
        for name, value in stored.items():
            if name not in known:
                meant = synonym(str(name))
                advice = None if meant is None or (meant.flag and meant.flag not in known) else meant.advice
                hint = f"There is no setting {name!r}; {advice}" if advice else unknown("setting", str(name), known)
                raise ConfigError(f"In {config}: {hint}")
            values[name] = convert(known[name], value, f"{name} in {config}")
        for name, value in flags.items():
            values[name] = convert(known[name], value, f"--{name}")
        given = frozenset(flags) | frozenset(stored)
        named = given | frozenset(self.defaults) | (frozenset(below or ()) & known.keys())
        recorded = stored.get("algorithm") or (below or {}).get("algorithm")
        if isinstance(recorded, str) and values.get("algorithm") != recorded:
            # A run records every setting of its algorithm; under another one, its defaults are no longer wanted.
            own = algorithm_class(recorded).settings()
            named -= {n for n in named - flags.keys() if n in own and values[n] == own[n].default}
        return Settings(values, frozenset(flags), given, config, record, named)

    def _with_words(self, argv: Sequence[str]) -> list[str]:
        """`argv` with the flag of `words` before the words that come first."""
        if self.words is None or not argv or argv[0].startswith("-"):
            return list(argv)
        return [f"--{self.words}", *argv]

    def _named_algorithm(self, argv: Sequence[str], below: Mapping[str, Any]) -> str | None:
        """The `package.module:Class` that is asked for as the algorithm; its settings are flags of this call."""
        if not any(issubclass(kind, AlgorithmSettings) for kind in self.groups):
            return None
        first = argparse.ArgumentParser(allow_abbrev=False, add_help=False, argument_default=argparse.SUPPRESS)
        first.error = lambda message: None  # type: ignore[assignment,method-assign,return-value]
        first.add_argument("--algorithm", nargs="?")
        first.add_argument("--config", nargs="?")
        typed = vars(first.parse_known_args(list(argv))[0])
        stored = read_yaml(shipped(typed["config"])) if typed.get("config") else {}
        named = typed.get("algorithm") or stored.get("algorithm") or below.get("algorithm")
        return named if isinstance(named, str) and ":" in named else None


def convert(setting: Setting, value: Any, where: str) -> Any:
    """`value` (command-line text, or a YAML value) as the setting's type; `none` for an optional one."""
    if setting.many:
        if value is None or value in ("none", ["none"]):
            return ()
        if isinstance(value, Mapping):  # `env_kwargs: {name: value}` in a YAML file
            value = [f"{key}={item}" for key, item in value.items()]
        items = [value] if isinstance(value, (str, int, float)) else list(value)
        parts = [part for item in items for part in (_split(item) if isinstance(item, str) else [item])]
        return tuple(_scalar(setting, part, where) for part in parts)
    if setting.optional and (value is None or (value == "none" and "none" not in (setting.choices or ()))):
        return None
    return _scalar(setting, value, where)


def read_yaml(path: Path) -> dict[str, Any]:
    """A flat mapping of settings from a YAML file; ConfigError in one sentence otherwise."""
    import yaml

    try:
        text = read_text(path)
    except OSError as error:
        raise ConfigError(
            f"--config {path} cannot be read ({error.strerror}); give a YAML file of settings."
        ) from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"--config {path} is not text; give a YAML file of settings.") from error
    try:
        stored = parse_yaml(text)
    except yaml.YAMLError as error:
        problem = re.sub(r"\s+", " ", str(error))
        raise ConfigError(f"--config {path} is not valid YAML: {problem}") from error
    if stored is None:
        return {}
    if not isinstance(stored, dict):
        raise ConfigError(f"--config {path} holds a {type(stored).__name__}; expected lines of `name: value`.")
    return stored


def run_main(main: Callable[[Sequence[str]], int], argv: Sequence[str] | None) -> int:
    """Run a script's body; an error of ours becomes one sentence on stderr and exit code 2.

    `python scripts/x.py` puts the scripts folder first on `sys.path`, where `evaluate.py` would shadow the package of
    that name; it is taken off again.

    One of several processes ends here and does not return: see `_leave`.
    """
    code = _run(main, argv)
    if joined():
        _leave(code)
    return code


def _run(main: Callable[[Sequence[str]], int], argv: Sequence[str] | None) -> int:
    argv = sys.argv[1:] if argv is None else list(argv)
    here = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    sys.path[:] = [entry for entry in sys.path if not entry or os.path.abspath(entry) != here]
    _log_to_stderr()
    wait_passively()
    try:
        return main(argv)
    except MafrtError as error:
        if "--debug" in argv:
            raise
        print(f"error{_which()}: " + re.sub(r"\s+", " ", str(error)).strip(), file=sys.stderr, flush=True)
        if isinstance(error, ProcessLostError):
            os._exit(2)  # a regular exit would wait for processes that are gone
        return 2
    except BrokenPipeError:  # `... | head` has seen enough; keep the interpreter from complaining when it flushes
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:  # a folder that may not be written to, a full disk
        if "--debug" in argv or error.filename is None:
            raise
        print(f"error: {error.filename} cannot be read or written: {error.strerror}.", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("Stopped by Ctrl-C before anything was saved.", file=sys.stderr)
        return 130


def _leave(code: int) -> NoReturn:
    """Exit after running the atexit handlers, but skip the interpreter's teardown.

    Libraries keep process groups beyond `destroy_process_group`, and with them gloo's threads; one of these that lets
    go of a tensor while the interpreter is being taken apart aborts the process (SIGABRT), after all its work was done
    (https://github.com/pytorch/pytorch/issues/190489).
    """
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _which() -> str:
    """Which process this is, where there are several."""
    rank, size = started()
    return f" (process {rank} of {size})" if size > 1 else ""


def _log_to_stderr() -> None:
    """Show the library's warnings; other packages' loggers are their own business."""
    logger = logging.getLogger("mafrt")
    if not logger.handlers:
        handler = _ToStderr()
        handler.setFormatter(logging.Formatter(f"%(levelname)s{_which()}: %(message)s"))
        logger.addHandler(handler)
        logger.propagate = False


class _ToStderr(logging.StreamHandler):
    """Writes to the standard error of the moment: programs that call `main` may replace it between two calls."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> Any:
        return sys.stderr


class _Parser(argparse.ArgumentParser):
    """Errors in our own words and with our own exit, and `-1e-4` read as a value."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._negative_number_matcher = re.compile(r"^-\.?\d")

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message[0].upper()}{message[1:]}; `{self.prog} --help` lists the flags.")


class _Help(argparse.HelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=36, width=120)

    def _format_usage(self, usage: Any, actions: Any, groups: Any, prefix: Any) -> str:
        return f"usage: {self._prog} [--config FILE] [--flag value ...]\n\n"


def _describe(kind: Any, algorithm: str | None = None) -> dict[str, Setting]:
    return kind.flags(algorithm) if issubclass(kind, AlgorithmSettings) else describe(kind)


def _title(kind: type) -> str:
    return (kind.__doc__ or kind.__name__).strip().splitlines()[0].rstrip(".")


def _add(group: Any, setting: Setting, default: Any) -> None:
    told, _, elsewhere = setting.help.partition("; default: ")
    shown = setting.help if elsewhere and default in (None, ()) else f"{told} (default: {_show(default)})"
    shown = shown.replace("%", "%%")
    if setting.kind is bool:
        group.add_argument(f"--{setting.name}", action=argparse.BooleanOptionalAction, help=shown)
        return
    metavar = "|".join(setting.choices) if setting.choices else setting.kind.__name__.upper().replace("STR", "TEXT")
    if setting.many:
        group.add_argument(f"--{setting.name}", nargs="*", action="extend", metavar=metavar, help=shown)
    else:
        group.add_argument(f"--{setting.name}", metavar=metavar, help=shown)


def _show(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, tuple):
        return " ".join(map(str, value)) or "none"
    return "none" if value is None else str(value)


def _underscored(word: str) -> str:
    """`--learning-rate=1` as `--learning_rate=1`: other tools write dashes."""
    if not word.startswith("--"):
        return word
    flag, equals, value = word.partition("=")
    name = flag[2:].replace("-", "_")
    off = name.startswith("no_")
    return ("--no-" if off else "--") + name[3 if off else 0 :] + equals + value


def _advises(name: str, options: Sequence[str]) -> bool:
    """Whether the synonym `name` stands for a flag that this command has, or for advice without one."""
    meant = synonym(name)
    return meant is not None and (meant.flag is None or f"--{meant.flag}" in options)


def _refuse_with_reason(rest: Sequence[str], reasons: Mapping[str, str]) -> None:
    for item in rest:
        flag = item.split("=")[0]
        if (reason := reasons.get(flag.removeprefix("--"))) is not None:
            raise ConfigError(f"There is no flag {flag!r} here: {reason}")


def _refuse_several(rest: Sequence[str], options: Sequence[str]) -> None:
    """Answer all flags of other libraries at once, if there are several: a launch line as it is typed there."""
    flags = dict.fromkeys(item.split("=")[0].removeprefix("--") for item in rest if item.startswith("--"))
    advised = [(flag, meant) for flag in flags if _advises(flag, options) and (meant := synonym(flag)) is not None]
    if len(advised) > 1:
        answers = "; ".join(f"--{flag}: {meant.advice.rstrip('.')}" for flag, meant in advised)
        raise ConfigError(f"There are no flags {', '.join(f'--{flag}' for flag, _ in advised)}. {answers}.")


def _refuse(rest: Sequence[str], options: Sequence[str]) -> None:
    _refuse_several(rest, options)
    for item in rest:
        if item.startswith("-"):
            flag = item.split("=")[0]
            meant = synonym(flag.removeprefix("--"))
            if meant is not None and _advises(flag.removeprefix("--"), options):
                raise ConfigError(f"There is no flag {flag!r}; {meant.advice}")
            known = [option for option in options if option != "-h"]
            others = [f"--{name}" for name in SYNONYMS if _advises(name, options)]
            near = difflib.get_close_matches(flag, [*known, *others], n=1, cutoff=0.8)
            if near and near[0] not in known and (meant := synonym(near[0][2:])) is not None:
                raise ConfigError(f"There is no flag {flag!r} (nor {near[0]!r}); {meant.advice}")
            raise ConfigError(unknown("flag", flag, known))
    if rest:
        raise ConfigError(f"{rest[0]!r} stands alone; every value follows its flag, as in --seed 2.")


def _split(text: str) -> list[str]:
    """Comma-separated words; `key=value` and JSON are left whole."""
    return [text] if "=" in text or text.lstrip().startswith("{") else [part for part in text.split(",") if part]


def _scalar(setting: Setting, value: Any, where: str) -> Any:
    if setting.kind is bool and isinstance(value, bool):
        return value
    if setting.kind is str and isinstance(value, (str, int, float)) and not isinstance(value, bool):
        if setting.choices and value not in setting.choices:
            raise ConfigError(f"{where} is {value!r}; choose one of {', '.join(setting.choices)}.")
        return str(value)
    wanted = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}[setting.kind]
    try:
        if setting.kind in (bool, str) or isinstance(value, (bool, list, dict)) or value is None:
            raise ValueError
        if setting.kind is int and isinstance(value, float):
            raise ValueError
        number = setting.kind(value)
        if not math.isfinite(number):
            raise ValueError
    except (ValueError, TypeError):
        raise ConfigError(f"{where} is {value!r}; expected {wanted}.") from None
    return number
