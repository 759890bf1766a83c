"""Settings of other libraries, and the one of mafrt that does the same: for flags, lines of Hydra, and keys of YAML.

The names stand in `setting_synonyms.yaml`, which is read once, where a name is not known.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import cache
from typing import Any, NamedTuple

from mafrt.core.shipped import shipped_table


class Synonym(NamedTuple):
    """Answer to a flag of another library."""

    flag: str | None
    """the flag that does the same; None: there is none"""
    advice: str
    exact: bool = False
    """whether the same values mean the same"""


@cache
def _tables() -> dict[str, Any]:
    """The file, by the names of other libraries; those of `same` stand for the settings among which a command's is."""
    read = shipped_table(__file__, "setting_synonyms.yaml")
    for part, meaning in (("same", "ours"), ("none", "answer"), ("notes", "answer")):
        read[part] = {name: entry[meaning] for entry in read[part] for name in entry["theirs"]}
    return dict(read)


def synonyms() -> list[str]:
    """All names that `synonym` knows."""
    return [*_tables()["same"], *_tables()["none"]]


def names_without_effect() -> frozenset[str]:
    """Keys of nested files of other libraries that are passed over."""
    return frozenset(_tables()["no_effect"])


def synonym(name: str, options: Collection[str] = ()) -> Synonym | None:
    """The answer to a flag or setting `name` of another library; None for one that is not known from there.

    `options`: names of a command's settings; of several flags the first that is among them is meant.
    """
    tables = _tables()
    if name in tables["none"]:
        return Synonym(None, f"{tables['none'][name]}.")
    if name not in tables["same"]:
        return None
    flags = tables["same"][name]
    flag = next((each for each in flags if each in options), flags[0])
    note = tables["notes"].get(name)
    exact = name in tables["equal_values"] or not (note or name in tables["other_values"])
    return Synonym(flag, f"here it is --{flag}{f' ({note})' if note else ''}.", exact)
