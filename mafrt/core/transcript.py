"""Transcripts as text: a line `speaker: words` for each utterance, which no utterance can write itself."""

from __future__ import annotations

import re
from collections.abc import Iterable

from mafrt.core.lookalikes import looks

SECTIONS = ("Problem", "judge", "tool", "coach")
"""Names that begin a line of a transcript beside those of the agents."""
QUOTE = "> "
"""Begins the further lines of an utterance that is quoted."""
# All that `str.splitlines` takes for the end of a line, and the last separator of ASCII: a model may too.
_LINE_END = re.compile("\r\n|[\n\v\f\r\x1c-\x1f\x85\u2028\u2029]")
# Those of confusables.txt (see `lookalikes`), and the small and the vertical one.
_COLONS = re.compile(
    "[:\ufe55\uff1a\ufe13\u02d0\u02f8\ua789\u2236\u0589\u05c3\u0703\u0704\u0903\u0a83\u16ec\u1803\u1809\u205a\ua4fd\ufe30]"
)
# Colours of a terminal, and what stands in brackets (the full-width ones too), the inmost first.
_ASIDE = re.compile("\x1b\\[[0-9;]*[A-Za-z]|[(\uff08][^()\uff08\uff09]*[)\uff09]|\\[[^\\[\\]]*\\]|<[^<>]*>|{[^{}]*}")
# What else ends the name of a speaker: dashes, arrows, bars and a tab; and what may stand before one.
_DASHES = re.compile(r"\s[-\u2010-\u2015]+\s|[-=~]{0,9}[>\u2192\u21d2\u203a\u00bb]|[|\t\uff5c\u2502]")
_LABELS = frozenset(map(looks, ("speaker", "name", "role", "agent", "author", "from", "by")))
_WORD = re.compile(r"[^\W_]+")
SHORTEST_WITHIN = 4
"""Characters of a name that counts within another word; shorter ones are a word of their own."""


def speakers(names: Iterable[str]) -> tuple[str, ...]:
    """Names that begin a line of a transcript: the agents, those who speak beside them, and a coach's notes."""
    names = tuple(names)
    return (*SECTIONS, *names, *(f"coach on {name}" for name in names))


def quoted(text: str, names: Iterable[str] = (), *, headings: Iterable[str] = (), inside: bool = True) -> str:
    """`text` as it can stand in a transcript: its lines begin with `> ` if one could be read as another part's first.

    So could a line with one of `names` before a colon or a dash, a line that is such a name, also in a tag or behind
    a label such as `Role:`, and one of `headings`; looks alone decide (`mafrt.core.lookalikes`).

    Args:
        inside: `text` follows on the line of its own speaker.
    """
    lines = _LINE_END.split(text)
    if inside and len(lines) == 1:
        return text
    keys = {looks(name) for name in names} - {""}
    alone = keys | {looks(line) for line in headings} - {""}
    found = any(
        alone.intersection((looks(line), looks(_ASIDE.sub("", line)))) or _names_a_speaker(line, keys)
        for line in lines[inside:]
    )
    return "\n".join([*lines[:inside], *(f"{QUOTE}{line}" for line in lines[inside:])]) if found else text


def _names_a_speaker(line: str, names: set[str]) -> bool:
    """Whether one of the names stands before a colon of the line or its first dash, or alone behind a label."""
    first = _WORD.search(line)
    dash = _DASHES.search(line, first.start()) if first else None
    if dash and looks(line[: dash.start()]) in names:
        return True
    colons = [colon.start() for colon in _COLONS.finditer(line)]
    before = line[: colons[-1]] if colons else ""
    if looks(before) in _LABELS and looks(line[len(before) :]) in names:
        return True
    for _ in range(4):  # three brackets within one another
        seen, words = looks(before), {looks(word) for word in set(_WORD.findall(before))}
        if any(name == seen or name in (seen if len(name) >= SHORTEST_WITHIN else words) for name in names):
            return True
        before = _ASIDE.sub("", before)
    return False
