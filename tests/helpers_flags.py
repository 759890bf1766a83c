"""Command lines made of parts: a flag that is given twice is refused, and a test changes those of others."""

from __future__ import annotations


def later_wins(*words: str) -> list[str]:
    """The words without the flags, and their values, that are given again further on."""
    groups: list[list[str]] = [[]]
    for word in map(str, words):
        if word.startswith("--"):
            groups.append([])
        groups[-1].append(word)

    def name(group: list[str]) -> str:
        return group[0].partition("=")[0].replace("-", "_").replace("__no_", "__")

    last = {name(group): place for place, group in enumerate(groups) if group}
    return [word for place, group in enumerate(groups) if group and last[name(group)] == place for word in group]
