"""The answer to a flag that a command does not have: the right one, if another library's name for it is known."""

from __future__ import annotations

import difflib
import os
import re
import shlex
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import pairwise

from mafrt.config.schema import unknown
from mafrt.config.setting_synonyms import synonym, synonyms
from mafrt.core.errors import ConfigError

_FLAG = re.compile(r"--?[A-Za-z]")
_HYDRA = re.compile(r"\+{0,2}[A-Za-z_][\w.]*=")
_DASHES = ("-", "\u2010", "\u2011", "\u2012", "\u2013", "\u2014", "\u2015", "\u2212")
"""The hyphen, and what text processors make of it."""


def advice(name: str, options: Collection[str]) -> str | None:
    """The advice for the setting `name` of another library, in a command with these settings; None: unknown."""
    meant = synonym(name, options)
    return None if meant is None or (meant.flag is not None and meant.flag not in options) else meant.advice.rstrip(".")


def advice_on_path(path: str, options: Collection[str]) -> str | None:
    """The same for a flag, or a dotted name such as `rollout.n`, whose last part may be a setting here."""
    *_, before, last = "", *path.lstrip("-+").split(".")
    found = advice(f"{before}_{last}", options)
    # At the end of a path a letter is no short option, such as -c; `n` is a name.
    named = not before or len(last) > 1 or last == "n"
    return found or (f"here it is --{last}" if last in options else advice(last, options) if named else None)


def refuse_with_reason(rest: Sequence[str], reasons: Mapping[str, str]) -> None:
    """ConfigError for a flag that other environments have and this one cannot have."""
    for item in rest:
        flag = item.split("=")[0]
        if item.startswith("-") and (reason := reasons.get(flag.lstrip("-"))) is not None:
            raise ConfigError(f"There is no flag {flag!r} here: {reason}")


def answer(name: str, known: Sequence[str], kind: str, holders: Callable[[str], Sequence[str]]) -> str:
    """What to say about the unknown name of a flag or setting.

    Args:
        name: as it was written, without dashes before it.
        known: names that this command has.
        kind: "flag" or "setting".
        holders: other commands that have a name.
    """
    dashes = "--" if kind == "flag" else ""
    shown = f"{dashes}{name}"
    if (found := advice(name, known)) is not None:
        return f"There is no {kind} {shown!r}; {found}."
    if others := holders(name):
        alike = difflib.get_close_matches(name, known, n=1, cutoff=0.9)
        or_else = f", or did you mean {dashes + alike[0]!r}?" if alike else "."
        return f"There is no {kind} {shown!r} here; it belongs to mafrt {' or '.join(others)}{or_else}"
    meant = synonym(name)
    if meant is not None and meant.flag is not None and (others := holders(meant.flag)):
        return f"There is no {kind} {shown!r} here; it is {dashes}{meant.flag} of mafrt {' or '.join(others)}."
    foreign = [other for other in synonyms() if advice(other, known)]
    near = difflib.get_close_matches(name, [*known, *foreign], n=1, cutoff=0.8)
    if near and near[0] not in known:
        return f"There is no {kind} {shown!r} (nor {dashes + near[0]!r}); {advice(near[0], known)}."
    return unknown(kind, shown, [f"{dashes}{option}" for option in known] + (["--config"] if dashes else []))


def refuse_values_of_switches(words: Sequence[str], switches: Collection[str], first: str | None = None) -> None:
    """ConfigError for `--log_episodes false` and `--log_episodes=false`: switches stand alone.

    `first`: as for `refuse_unknown`.
    """
    before = "" if first is None else f" (values of --{first} may stand before all flags)"
    for word, after in pairwise([*words, "-"]):
        flag, equals, value = word.partition("=")
        name = flag.removeprefix("--").removeprefix("no-")
        follows = not after.startswith(_DASHES) and not _HYDRA.match(after)
        if name in switches and flag.startswith("--") and (equals or follows):
            raise ConfigError(
                f"--{name} takes no value, found {value if equals else after!r}; write --{name} to switch it on, "
                f"--no-{name} to switch it off{before}."
            )


def refuse_unknown(
    rest: Sequence[str], known: Sequence[str], holders: Callable[[str], Sequence[str]], first: str | None = None
) -> None:
    """ConfigError for words of a command line that belong to no flag.

    `known` and `holders`: as for `answer`. `first`: the setting whose values may stand before all flags.
    """
    _refuse_foreign(rest, known)
    for item in rest:
        if item.startswith("--") and len(item) > 2:
            raise ConfigError(answer(item.split("=")[0][2:], known, "flag", holders))
        if item.startswith(_DASHES) and not re.match(r"-\.?\d", item) and len(item.lstrip("".join(_DASHES))) > 1:
            named = item.lstrip("".join(_DASHES)).split("=")[0].replace("-", "_")
            right = f", as in --{named}" if named in known else ""
            raise ConfigError(f"{item!r} is no flag: flags begin with two hyphens{right}; `--help all` lists them.")
        if item.startswith("-") and (found := advice(item.lstrip("-"), known)) is not None:
            raise ConfigError(f"There is no flag {item!r}; {found}.")
    if rest:
        before = "" if first is None else f" (values of --{first} may stand before all flags)"
        run = "load_path" in known and (os.sep in rest[0] or os.path.isdir(rest[0]))
        example = f"--load_path {shlex.quote(rest[0])}" if run else "--seed 2" if "seed" in known else f"--{known[0]} X"
        if "dataset_path" in known and os.path.isfile(rest[0]):
            before = "; several files of data go into one folder, as in --dataset_path FOLDER"
        raise ConfigError(f"{rest[0]!r} stands alone; every value follows its flag, as in {example}{before}.")


def _refuse_foreign(rest: Sequence[str], options: Collection[str]) -> None:
    """Answer a launch line of another library as it is typed there: several flags, or lines of Hydra.

    Values are not shown, since one may be a key.
    """
    names = [item.split("=")[0] for item in rest if _FLAG.match(item) or _HYDRA.match(item)]
    answers = {name: found for name in dict.fromkeys(names) if (found := advice_on_path(name, options))}
    told = "; ".join(f"{name}: {found}" for name, found in answers.items())
    if lines := [name for name in names if not name.startswith("-")]:
        few = f"{lines[0]!r} is a line of Hydra" if len(lines) == 1 else f"{', '.join(lines)} are lines of Hydra"
        raise ConfigError(
            f"{few}, and settings are flags here, as in --seed 2{'; ' if told else ''}{told}. docs/coming_from.md has "
            "the names of other libraries."
        )
    if len(answers) > 1:
        raise ConfigError(f"There are no flags {', '.join(answers)}. {told}.")
    for name, found in answers.items():
        if "." in name:
            raise ConfigError(f"There is no flag {name!r}; {found}.")
