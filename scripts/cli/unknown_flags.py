"""The answer to a flag that a command does not have: the right one, if another library's name for it is known."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Mapping, Sequence

from mafrt.config.schema import unknown
from mafrt.core.errors import ConfigError
from mafrt.scripts.cli.flag_synonyms import SYNONYMS, synonym

_FLAG = re.compile(r"--?[A-Za-z]")
_HYDRA = re.compile(r"\+{0,2}[A-Za-z_][\w.]*=")


def advice(name: str, options: Collection[str]) -> str | None:
    """The advice for the setting `name` of another library, in a command with these settings; None: unknown."""
    meant = synonym(name, options)
    return None if meant is None or (meant.flag is not None and meant.flag not in options) else meant.advice.rstrip(".")


def advice_on_path(path: str, options: Collection[str]) -> str | None:
    """The same for a flag, or a dotted name such as `rollout.n`, whose last part may be a setting here."""
    *_, before, last = "", *path.lstrip("-+").split(".")
    said = advice(f"{before}_{last}", options)
    return said or (f"here it is --{last}" if last in options else advice(last, options))


def refuse_with_reason(rest: Sequence[str], reasons: Mapping[str, str]) -> None:
    for item in rest:
        flag = item.split("=")[0]
        if item.startswith("-") and (reason := reasons.get(flag.lstrip("-"))) is not None:
            raise ConfigError(f"There is no flag {flag!r} here: {reason}")


def refuse_unknown(rest: Sequence[str], flags: Sequence[str]) -> None:
    """ConfigError for words that no flag of the command takes; `flags`: all that it has, such as `--seed`."""
    options = {flag.removeprefix("--") for flag in flags}
    _refuse_foreign(rest, options)
    for item in rest:
        if item.startswith("-"):
            flag = item.split("=")[0]
            if (said := advice(flag.lstrip("-"), options)) is not None:
                raise ConfigError(f"There is no flag {flag!r}; {said}.")
            known = [flag for flag in flags if flag not in ("-h", "--help", "--debug")]
            others = [f"--{name}" for name in SYNONYMS if advice(name, options)]
            near = difflib.get_close_matches(flag, [*known, *others], n=1, cutoff=0.8)
            if near and near[0] not in known:
                raise ConfigError(f"There is no flag {flag!r} (nor {near[0]!r}); {advice(near[0][2:], options)}.")
            raise ConfigError(unknown("flag", flag, known))
    if rest:
        raise ConfigError(f"{rest[0]!r} stands alone; every value follows its flag, as in --seed 2.")


def _refuse_foreign(rest: Sequence[str], options: Collection[str]) -> None:
    """Answer a launch line of another library as it is typed there: several flags, or lines of Hydra.

    Values are not shown, since one may be a key.
    """
    names = [item.split("=")[0] for item in rest if _FLAG.match(item) or _HYDRA.match(item)]
    answers = {name: said for name in dict.fromkeys(names) if (said := advice_on_path(name, options))}
    told = "; ".join(f"{name}: {said}" for name, said in answers.items())
    if lines := [name for name in names if not name.startswith("-")]:
        few = f"{lines[0]!r} is a line of Hydra" if len(lines) == 1 else f"{', '.join(lines)} are lines of Hydra"
        raise ConfigError(
            f"{few}, and settings are flags here, as in --seed 2{'; ' if told else ''}{told}. docs/coming_from.md has "
            "the names of other libraries."
        )
    if len(answers) > 1:
        raise ConfigError(f"There are no flags {', '.join(answers)}. {told}.")
