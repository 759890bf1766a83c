"""The answer to a flag that a command does not have: the right one, if another library's name for it is known."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence

from mafrt.config.schema import unknown
from mafrt.core.errors import ConfigError
from mafrt.scripts.cli.flag_synonyms import SYNONYMS, synonym


def _advises(name: str, options: Sequence[str]) -> bool:
    """Whether the synonym `name` stands for a flag that this command has, or for advice without one."""
    meant = synonym(name)
    return meant is not None and (meant.flag is None or f"--{meant.flag}" in options)


def refuse_with_reason(rest: Sequence[str], reasons: Mapping[str, str]) -> None:
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


def refuse_unknown(rest: Sequence[str], options: Sequence[str]) -> None:
    _refuse_several(rest, options)
    for item in rest:
        if item.startswith("-"):
            flag = item.split("=")[0]
            meant = synonym(flag.removeprefix("--"))
            if meant is not None and _advises(flag.removeprefix("--"), options):
                raise ConfigError(f"There is no flag {flag!r}; {meant.advice}")
            known = [option for option in options if option not in ("-h", "--help", "--debug")]
            others = [f"--{name}" for name in SYNONYMS if _advises(name, options)]
            near = difflib.get_close_matches(flag, [*known, *others], n=1, cutoff=0.8)
            if near and near[0] not in known and (meant := synonym(near[0][2:])) is not None:
                raise ConfigError(f"There is no flag {flag!r} (nor {near[0]!r}); {meant.advice}")
            raise ConfigError(unknown("flag", flag, known))
    if rest and re.match(r"\+{0,2}[A-Za-z_][\w.]*=", rest[0]):
        name = rest[0].partition("=")[0].rpartition(".")[2].lstrip("+")
        meant = synonym(name)
        here = f"; {meant.advice.rstrip('.')}" if meant and _advises(name, options) else ""
        if f"--{name}" in options:
            here = f"; here it is --{name}"
        raise ConfigError(
            f"{rest[0]!r} is a line of Hydra, and settings are flags here, as in --seed 2{here}. docs/coming_from.md "
            "has the names of other libraries."
        )
    if rest:
        raise ConfigError(f"{rest[0]!r} stands alone; every value follows its flag, as in --seed 2.")
