"""Settings of an environment as flags: `mafrt train sudoku --empty 3` is `--env sudoku --env_kwargs '{"empty": 3}'`.

They are the parameters of its constructor, with their types and the help of its docstring, so nothing is said twice.
"""

from __future__ import annotations

import argparse
import difflib
import json
from collections.abc import Mapping, Sequence

from mafrt.config.schema import Setting
from mafrt.core.errors import ConfigError
from mafrt.environment.registry import settings_of
from mafrt.scripts.cli.command import FlagHelp, add_flag, underscored
from mafrt.scripts.cli.strict_parser import StrictParser
from mafrt.scripts.cli.unknown_flags import refuse_values_of_switches
from mafrt.scripts.cli.values import convert


def _parser(own: Mapping[str, Setting], env: str) -> StrictParser:
    parser = StrictParser(add_help=False, argument_default=argparse.SUPPRESS, formatter_class=FlagHelp)
    group = parser.add_argument_group(f"Settings of {env}")
    for setting in own.values():
        add_flag(group, setting, setting.default)
    return parser


def _own(env: str, known: Mapping[str, Setting]) -> dict[str, Setting]:
    return {name: setting for name, setting in settings_of(env).items() if name not in known}


def with_env_kwargs(argv: Sequence[str], env: str, known: Mapping[str, Setting]) -> list[str]:
    """The words with flags of the environment's own settings as entries of `--env_kwargs`.

    `known` are the command's own flags, which are left as they are.

    Raises:
        ConfigError: a value is not of the setting's type, or a flag is nearly a setting of the environment.
    """
    own, words = _own(env, known), [underscored(word) for word in argv]
    refuse_values_of_switches(words, [name for name, setting in own.items() if setting.kind is bool])
    typed, rest = _parser(own, env).parse_known_args(words)
    for name in (word.partition("=")[0].removeprefix("--") for word in rest if word.startswith("--")):
        near = [] if name in known else difflib.get_close_matches(name, [*known, *own], 1, cutoff=0.75)
        # Before settings of the command that are like it; at least half of a name, as in `unknown`.
        near = near or [other for other in own if len(name) > 2 and name in other and len(other) <= 2 * len(name)]
        if near and near[0] in own:
            raise ConfigError(f"There is no flag '--{name}'; did you mean '--{near[0]}', a setting of {env}?")
    kwargs = {name: convert(own[name], value, f"--{name}") for name, value in vars(typed).items()}
    return [*rest, "--env_kwargs", json.dumps(kwargs)] if kwargs else list(argv)


def help_of(env: str, known: Mapping[str, Setting]) -> str:
    """The environment's own settings, for the end of the help; empty if it has none."""
    own = _own(env, known)
    return _parser(own, env).format_help().partition("\n\n")[2].rstrip() if own else ""
