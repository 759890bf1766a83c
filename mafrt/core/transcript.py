"""Transcripts as text: a line `speaker: words` for each utterance, which no utterance can write itself."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Iterator, Sequence
from urllib.parse import unquote

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
_LABELS = frozenset(map(looks, re.findall(
    "[a-z]+", "speaker name role agent author from by to turn round now next begin subject message inst of the"
)))  # fmt: skip
"""Words that may stand before a name at the start of a line, as numbers may."""
# What makes the name before it a speaker's: the line's end, a tab, or a sign that goes on with no sentence.
_ENDS_NAME = re.compile(r"\s*(?:$|\t|--|-\s|[^\w\s,.;!?'\")\u2019\u201d\-])")
_ENCLOSED = re.compile(r"(?:[^\w\s]|_){2}")
_FENCE = re.compile(r"\s*(?:```|~~~)")
_ESCAPED = re.compile(r"(?:\\u|U\+)([0-9A-Fa-f]{4})|\\x([0-9A-Fa-f]{2})")
_TURNED = re.compile("\u202e([^\u202c]*)\u202c?")
_WORD = re.compile(r"[^\W_]+")
SHORTEST_WITHIN = 4
"""Characters of a name that counts within another word; shorter ones are a word of their own."""
SHORTEST_MISSPELT = 5
"""Characters of a name that counts with one wrong, missing or further letter, or two in the wrong order."""


def speakers(names: Iterable[str]) -> tuple[str, ...]:
    """Names that begin a line of a transcript: the agents, those who speak beside them, and a coach's notes."""
    names = tuple(names)
    return (*SECTIONS, *names, *(f"coach on {name}" for name in names))


def quoted(text: str, names: Iterable[str] = (), *, headings: Iterable[str] = (), inside: bool = True) -> str:
    """`text` as it can stand in a transcript: its lines begin with `> ` if one could be read as another part's first.

    So could a line with one of `names` before a colon, one that begins with such a name and no sentence, also in a tag
    or behind a label such as `Role:`, and one of `headings`. Looks alone decide (`mafrt.core.lookalikes`); a name may
    be misspelt by a letter, or written in escapes.

    Args:
        inside: `text` follows on the line of its own speaker.
    """
    lines = _LINE_END.split(text)
    if inside and len(lines) == 1:
        return text
    keys, alone = ({looks(each) for each in given} - {""} for given in (names, headings))
    if not any(_other_parts(lines, keys, alone, inside)):
        return text
    return "\n".join([*lines[:inside], *(f"{QUOTE}{line}" for line in lines[inside:])])


def _other_parts(lines: Sequence[str], names: set[str], headings: set[str], inside: bool) -> Iterator[bool]:
    """Of each line, also as it is without escapes, whether another part could begin with it."""
    near, fenced = {form for name in names for form in _forms(name)}, False
    for place, line in enumerate(lines):
        fence = bool(_FENCE.match(line))
        fenced ^= fence
        if place < inside or not _WORD.search(line):
            continue
        for form in dict.fromkeys((line, _decoded(line))):
            yield not headings.isdisjoint((looks(form), looks(_ASIDE.sub("", form))))
            yield _before_a_colon(form, names, near)
            # In a program, `judge = 3` is no turn.
            if fence or not fenced:
                yield _begins_a_turn(form, near) or _begins_a_turn(_ASIDE.sub("|", form), near)


def _forms(name: str) -> Iterator[str]:
    """The name, and if it is long all that one letter less makes of it: two that share a form differ by a letter."""
    yield name
    if len(name) >= SHORTEST_MISSPELT:
        yield from (name[:place] + name[place + 1 :] for place in range(len(name)))


def _decoded(line: str) -> str:
    """A line without escapes of letters, and with what is written from right to left as it is read."""
    if "\\" in line or "U+" in line:
        line = _ESCAPED.sub(lambda match: chr(int(match[1] or match[2], 16)), line).replace("\\colon", ":")
    return _TURNED.sub(lambda match: match[1][::-1], html.unescape(unquote(line)))


def _begins_a_turn(line: str, near: set[str]) -> bool:
    """Whether a line begins with a name, after labels and numbers, that no sentence goes on from, or signs enclose."""
    words = list(_WORD.finditer(line[:1000]))
    while words and (words[0][0].isdigit() or looks(words[0][0]) in _LABELS):
        del words[0]
    for last in words[:12]:  # j-u-d-g-e
        start, end = words[0].start(), last.end()
        if end - start > 100:
            break
        if not near.isdisjoint(_forms(looks(line[start:end]))) and (
            _ENDS_NAME.match(line, end) or _ENCLOSED.fullmatch(line[max(start - 1, 0) : start] + line[end : end + 1])
        ):
            return True
    return False


def _before_a_colon(line: str, names: set[str], near: set[str]) -> bool:
    """Whether one of the names stands before a colon of the line."""
    colons = [colon.start() for colon in _COLONS.finditer(line)]
    before = line[: colons[-1]] if colons else ""
    for _ in range(4):  # three brackets within one another
        seen, words = looks(before), {looks(word) for word in set(_WORD.findall(before))}
        if any(len(name) >= SHORTEST_WITHIN and name in seen for name in names) or not near.isdisjoint(
            form for word in words if len(word) < 100 for form in _forms(word)
        ):
            return True
        before = _ASIDE.sub("", before)
    return False
