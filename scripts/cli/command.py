"""The command line, generated from settings dataclasses: strict names, one help line per flag, YAML underneath.

A `Command` lists the dataclasses that a script understands. Their fields are its flags
(`mafrt.config.train_config.describe`), so a setting has one name in Python, in a YAML file and on the command line.
Values are taken, weakest first, from the field's default, the command's own defaults, `--config file.yaml`, and the
flags. Standard library only at import: `--help` must not wait for torch.
"""

from __future__ import annotations

import argparse
import importlib
import os
import re
import textwrap
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import MISSING, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

from mafrt.config import permission
from mafrt.config.algorithm import AlgorithmSettings, algorithm_class
from mafrt.config.resolve import place_of
from mafrt.config.schema import Setting, describe
from mafrt.core.errors import ConfigError
from mafrt.core.shipped import shipped
from mafrt.runners.limits import refuse_absurd
from mafrt.scripts.cli.command_names import COMMANDS
from mafrt.scripts.cli.dependent_flags import refuse_ineffective
from mafrt.scripts.cli.foreign_config import library_of, read_foreign
from mafrt.scripts.cli.recorded_run import with_recorded_files
from mafrt.scripts.cli.strict_parser import OnOrOff, StrictParser
from mafrt.scripts.cli.unknown_flags import answer, refuse_unknown, refuse_values_of_switches, refuse_with_reason
from mafrt.scripts.cli.values import convert, read_yaml
from mafrt.storage.run_record import RECORD, RunRecord, load_record

T = TypeVar("T")

DEBUG_HELP = "show the traceback of an error, not only its sentence"
TRUST_HELP = "let a run's files name modules inside the run, commands and other machines"
HELP_HELP = "show the flags that matter, or with `all` every one, and leave"
FEW = 30
"""A command with at most so many flags shows all of them in its help."""
COMMON = (
    *("env", "dataset_path", "reward", "workflow", "model_name_or_path", "profile_path", "algorithm", "coach"),
    *("iterations", "n_samples", "lr", "run_dir", "load_path", "config"),
)
"""Flags of a short help, of those that a command has."""
CONFIG_HELP = "YAML file of settings, one `name: value` a line; flags win over it"
ALTERNATIVES = (("iterations", "epochs"), ("env", "program", "command"), ("load_in_4bit", "load_in_8bit"))
"""Settings that answer the same question. One of them, given as a flag, sets aside the others of a file or a run."""


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
    notes: tuple[str, ...] = ()
    """lines for the user about a YAML file of another library"""

    def make(self, kind: type[T]) -> T:
        """One settings dataclass, filled and thereby checked."""
        if issubclass(kind, AlgorithmSettings):
            return kind.from_flags(self.values, self.named)  # type: ignore[return-value]
        values = {name: self.values[name] for name in describe(kind)}
        return kind(**values)

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
    elsewhere: Mapping[str, str] = field(default_factory=dict)
    """flags that this command takes and hands to another one, with their help"""
    follows: Callable[[Mapping[str, Any]], Mapping[str, Any]] | None = None
    """what settings that nobody gave are, by the values of those that were given"""

    def settings(self, algorithm: str | None = None) -> dict[str, Setting]:
        """All settings by name; those of `algorithm` (`package.module:Class`) too, in a command that has algorithms."""
        found: dict[str, Setting] = {}
        for kind in self.groups:
            of_algorithm = _describe(kind, algorithm)
            if algorithm is not None and (twice := found.keys() & of_algorithm.keys()):
                raise ConfigError(
                    f"algorithm {algorithm}{place_of(algorithm_class(algorithm))} and mafrt {self.name} both have a "
                    f"setting {min(twice)}; give the algorithm's another name."
                )
            found |= of_algorithm
        return found

    def default(self, setting: Setting) -> Any:
        """The value of a setting that is not given."""
        value = self.defaults.get(setting.name, setting.default)
        return () if value is MISSING else value

    def parser(self, algorithm: str | None = None) -> StrictParser:
        """An argparse parser that returns only the given flags (no defaults), all values as text."""
        parser = StrictParser(
            prog=f"mafrt {self.name}" + (f" {self.words.upper()}" if self.words else ""),
            description=self.summary,
            epilog=self.epilog,
            allow_abbrev=False,
            add_help=False,
            argument_default=argparse.SUPPRESS,
            formatter_class=FlagHelp,
        )
        for kind in self.groups:
            group = parser.add_argument_group(_title(kind))
            for setting in _describe(kind, algorithm).values():
                add_flag(group, setting, self.default(setting))
        general = parser.add_argument_group("General")
        general.add_argument("--config", metavar="FILE", action="append", default=[], help=CONFIG_HELP)
        general.add_argument("--trust_run", action="store_true", help=TRUST_HELP)
        general.add_argument("--debug", action="store_true", help=DEBUG_HELP)
        general.add_argument("-h", "--help", action=_ShowHelp, nargs="?", choices=["all"], help=HELP_HELP)
        parser.brief = lambda: self._brief(parser)
        return parser

    def _brief(self, parser: argparse.ArgumentParser) -> str:
        """The help with the flags that matter most; all of a command that has few."""
        actions = {action.dest: action for action in parser._actions}
        if len(actions) <= FEW:
            return parser.format_help()
        brief = StrictParser(prog=parser.prog, description=self.summary, add_help=False, formatter_class=FlagHelp)
        group = brief.add_argument_group("The flags that matter")
        for name in COMMON:
            if name in self.elsewhere:
                group.add_argument(f"--{name}", metavar="TEXT", help=self.elsewhere[name])
            elif name in actions:
                group._add_action(actions[name])
        more = "\n  ".join(
            textwrap.wrap("; ".join(_title(kind).partition(" (")[0].partition(",")[0] for kind in self.groups), 110)
        )
        brief.epilog = (
            f"--help all lists all {len(actions)} flags, in these groups:\n  {more}\n"
            "Any of them may stand in a YAML file (--config FILE)." + (f"\n\n{self.epilog}" if self.epilog else "")
        )
        return brief.format_help()

    def read(
        self, argv: Sequence[str], below: Mapping[str, Any] | None = None, record: RunRecord | None = None
    ) -> Settings:
        """Parse; raises ConfigError in one sentence for anything unknown, malformed or out of place.

        `below` are settings that lie between the defaults and the YAML file; names that this command does not have
        are passed over. `record` is that of the run which they come from; a configuration file that lies in a run
        brings the run's record along. Flags that would do nothing are refused.
        """
        argv = self._with_words(argv)
        _permit(argv)
        if below is not None:
            below = {name: value for name, value in below.items() if name not in permission.OF_A_CALL}
        algorithm = self._named_algorithm(argv, below or {})
        words, known = [underscored(word) for word in argv], self.settings(algorithm)
        parser = self.parser(algorithm)
        switches = [name for name, setting in known.items() if setting.kind is bool]
        refuse_values_of_switches(words, switches, self.words)
        typed, rest = parser.parse_known_args(words)
        refuse_with_reason(rest, self.refused)
        refuse_unknown(rest, [*known], self._holders, self.words)
        if len(typed.config) > 1:
            raise ConfigError(
                f"--config is given {len(typed.config)} times ({', '.join(typed.config)}), and one file is read; join "
                "them in one, or give what differs as flags."
            )
        flags = {name: value for name, value in vars(typed).items() if name not in ("config", "debug", "trust_run")}
        config = shipped(typed.config[0]) if typed.config else None
        values = {name: self.default(setting) for name, setting in known.items()}
        for name, value in (below or {}).items():
            if name in known:
                values[name] = convert(known[name], value, name)
        stored = read_yaml(config) if config else {}
        notes: tuple[str, ...] = ()
        if config is not None and library_of(stored) is not None:
            stored, notes = read_foreign(stored, self.name, known, algorithm, str(config))
        if config is not None and record is None and (config.parent / RECORD).is_file():
            record = load_record(config.parent)
            stored = with_recorded_files(stored, record)
        for name, value in stored.items():
            if name not in known:
                if (other := self._fitting(stored, algorithm)) is not None:
                    hint = f"There is no setting {name!r}; the file fits mafrt {other}."
                elif isinstance(value, Mapping):
                    hint = f"{name!r} holds settings of its own; expected lines of `name: value` without levels."
                else:
                    hint = answer(str(name), [*known], "setting", self._holders)
                raise ConfigError(f"In {config}: {hint}")
            values[name] = convert(known[name], value, f"{name} in {config}")
        for name, value in flags.items():
            values[name] = convert(known[name], value, f"--{name}")
        run = None if config is None else _run_of(config)
        _refuse_demands(values, below or {}, stored, flags, config, run)
        given = frozenset(flags) | frozenset(stored)
        named = given | frozenset(self.defaults) | (frozenset(below or ()) & known.keys())
        weaker = _set_aside(flags, stored) | _set_aside(flags.keys() | stored.keys(), below or {})
        values |= {name: self.default(known[name]) for name in weaker & known.keys()}
        given, named = given - weaker, named - weaker
        if self.follows is not None:
            values |= self.follows({name: values[name] for name in given | (below or {}).keys() & known.keys()})
        refuse_absurd(values)
        if "sandbox" in given:
            from mafrt.sandbox.factory import check_sandbox  # opened only where a program is run, if one is

            check_sandbox(values["sandbox"])
        # Without them, the settings of a run that is named are still to come.
        if below is not None or not values.get("load_path"):
            refuse_ineffective(flags, values)
        recorded = stored.get("algorithm") or (below or {}).get("algorithm")
        if isinstance(recorded, str) and values.get("algorithm") != recorded:
            # A run records every setting of its algorithm; under another one, its defaults are no longer wanted.
            of_algorithm = algorithm_class(recorded).settings()
            named -= {n for n in named - flags.keys() if n in of_algorithm and values[n] == of_algorithm[n].default}
        return Settings(values, frozenset(flags), given, config, record, named, notes)

    def _fitting(self, stored: Mapping[str, Any], algorithm: str | None) -> str | None:
        """Another command that trains and has all these settings, which this one has not; None: there is none."""
        for name in COMMANDS:
            if not name.startswith("train"):
                continue
            # Imported only where a file does not fit, since all of them would be.
            other: Command = importlib.import_module(f"mafrt.scripts.{name}").COMMAND
            if other.name != self.name and stored.keys() <= other.settings(algorithm).keys():
                return other.name
        return None

    def _holders(self, name: str) -> list[str]:
        """Other commands that have the setting `name`."""
        commands = (importlib.import_module(f"mafrt.scripts.{each}") for each in COMMANDS if each != self.name)
        others = [each.COMMAND for each in commands if hasattr(each, "COMMAND")]
        return [other.name for other in others if name in other.settings()]

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


def _permit(argv: Sequence[str]) -> None:
    """Note what the user typed, here or in a file of settings outside any run, before anything is imported by name."""
    if "--trust_run" in map(underscored, argv):
        permission.trust()
    words = [word.partition("=")[2] if word.startswith("--") and "=" in word else word for word in argv]
    permission.typed([*words, *(part for word in words for part in word.split(","))])
    configs = [word.partition("=")[2] for word in argv if word.startswith("--config=")]
    for word in [*configs, *(after for word, after in pairwise(argv) if word == "--config")]:
        config = shipped(word)
        if (run := _run_of(config)) is not None:
            permission.reading(run)
        elif config.is_file():
            permission.typed(read_yaml(config).values())


def _run_of(config: Path) -> Path | None:
    """The run that a file of settings belongs to: its folder holds a record, or one above it does."""
    place = Path(os.path.realpath(config))  # `resolve` raises an error of its own for a link to itself
    if re.fullmatch(r"args(\.until_\d+)?\.yaml", place.name):
        return place.parent
    return next((folder for folder in place.parents if (folder / RECORD).is_file()), None)


def _refuse_demands(
    values: Mapping[str, Any],
    below: Mapping[str, Any],
    stored: Mapping[str, Any],
    flags: Collection[str],
    config: Path | None,
    run: Path | None,
) -> None:
    """ConfigError for what a file switches on and only the user may: code of a base, commands, other machines."""
    for origin, where in ((stored, str(config)), (below, "the run")):
        if origin.get("trust_remote_code") and values.get("trust_remote_code") and "trust_remote_code" not in flags:
            raise ConfigError(
                f"trust_remote_code is on in {where}, and a file is no permission to run a model's own code; type "
                "--trust_remote_code if you have read that code, or --no-trust_remote_code."
            )
    if run is not None and (own := sorted(permission.OF_A_CALL & stored.keys() - {*flags})):
        raise ConfigError(f"{config}, a run's file, holds {own[0]}, which only you decide; type --{own[0]}.")
    of_run = ({*below} - {*stored}) | ({*stored} if run is not None else set())
    asked = {name: values[name] for name in of_run - {*flags} if name in values}
    permission.refuse_demands(asked, f"the run {run}" if run is not None else "the run's args.yaml")


class _ShowHelp(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, namespace: Any, values: Any, option: str | None = None) -> None:
        assert isinstance(parser, StrictParser)
        print(parser.format_help() if values == "all" else parser.brief())
        parser.exit()


class FlagHelp(argparse.RawDescriptionHelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=36, width=120)

    def _format_usage(self, usage: Any, actions: Any, groups: Any, prefix: Any) -> str:
        return f"usage: {self._prog} [--config FILE] [--flag value ...]\n\n"


def _set_aside(stronger: Collection[str], weaker: Collection[str]) -> frozenset[str]:
    """Names in `weaker` whose question is answered by another name in `stronger`."""
    answered = [names for names in ALTERNATIVES if any(name in stronger for name in names)]
    return frozenset(name for names in answered for name in names if name in weaker and name not in stronger)


def _describe(kind: Any, algorithm: str | None = None) -> dict[str, Setting]:
    return kind.flags(algorithm) if issubclass(kind, AlgorithmSettings) else describe(kind)


def _title(kind: type) -> str:
    return (kind.__doc__ or kind.__name__).strip().splitlines()[0].rstrip(".")


def add_flag(group: Any, setting: Setting, default: Any) -> None:
    told, _, elsewhere = setting.help.partition("; default: ")
    shown = setting.help if elsewhere and default in (None, ()) else f"{told} (default: {_show(default)})"
    shown = shown.replace("%", "%%")
    if setting.kind is bool:
        group.add_argument(f"--{setting.name}", action=OnOrOff, help=shown)
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


def underscored(word: str) -> str:
    """`--learning-rate=1` as `--learning_rate=1`: other tools write dashes."""
    if not word.startswith("--"):
        return word
    flag, equals, value = word.partition("=")
    name = flag[2:].replace("-", "_")
    off = name.startswith("no_")
    return ("--no-" if off else "--") + name[3 if off else 0 :] + equals + value
