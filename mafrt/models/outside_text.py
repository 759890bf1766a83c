"""Text from outside as token ids: words of an agent, a tool, a file or a data set never become a control token.

A tokenizer turns the text `<|im_end|>` into the token that ends a message, in any content. So a chat is encoded in
three steps: `Placeholders.hide` puts a plain word for each text of an added token in the contents, the chat template is
filled in, and `Placeholders.encode` puts the texts back such that they are tokenised as characters. A text without any
such has the ids that the tokenizer itself gives.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any
from weakref import WeakKeyDictionary

from mafrt.core.errors import ConfigError
from mafrt.core.text import REPLACEMENT, filled, whole_characters

ANCHORS = ("a", "\n", ".")
"""Texts behind which the rest of a text is encoded, since some tokenizers put a space before a text."""


_BLANK = r"[\s\u2581]"
_LINE_ENDS = r"\n\v\f\r\x1c-\x1e\x85\u2028\u2029"


@dataclass(frozen=True)
class TurnMarks:
    """What opens a turn in a chat template and is ordinary text: `[INST]`, `USER:`, `### Response:`."""

    openings: dict[str, bool]
    """each mark, and whether the template ends a line behind it; empty if turns are only told by blanks"""
    seen: Callable[[str], str] | None
    """a text as the tokenizer reads it, None if as it stands"""
    between: str
    """put before the last character of a mark that is not the template's"""

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        # In any case and spacing, as some tokenizers see neither.
        kinds = []
        for mark, ends_line in self.openings.items():
            body = f"{_BLANK}*".join(map(re.escape, re.sub(f"{_BLANK}+", "", mark)))
            letters = {char.isalnum() for char in re.sub(_BLANK, "", mark)}
            # A word such as `user`, or a rule such as `---`, opens a turn only on a line of its own.
            if len(letters) == 1 and ends_line:
                body = rf"(?<![^{_LINE_ENDS}])[ \t\u2581]*{body}(?=[ \t\u2581]*(?:[{_LINE_ENDS}]|\Z))"
            elif letters == {True}:
                body = rf"\b{body}\b"
            kinds.append(body)
        return re.compile("|".join(kinds) or r"(?!)", re.IGNORECASE)

    def broken(self, text: str) -> str:
        """`text` so that nothing in it is a mark, as it stands or as the tokenizer reads it."""
        text = self._broken(text)
        if self.seen is None or not self._pattern.search(read := self.seen(text)):
            return text
        return self._broken(read)

    def _broken(self, text: str) -> str:
        # One mark may overlap another.
        while self._pattern.search(text):
            text = self._pattern.sub(lambda match: f"{match[0][:-1]}{self.between}{match[0][-1]}", text)
        return text


@dataclass(frozen=True)
class ControlTokens:
    """The added tokens of a tokenizer that no text from outside may become."""

    ids: dict[str, int]
    """by their texts"""
    unknown: int | None
    """The one that ordinary text becomes too: the token of unknown characters."""
    normalize: Callable[[str], str] | None
    """The change that the tokenizer makes to a text before it reads it, None for none."""
    readable: bool
    """Whether texts and `normalize` tell which parts become a control; else only the ids of a text do."""
    turns: TurnMarks | None = None
    """of the chat template; None if controls open all its turns, or there is none"""

    @cached_property
    def words(self) -> frozenset[str]:
        """Their texts, also as the tokenizer normalises them."""
        seen = {*self.ids, *(self.normalize(word) for word in self.ids)} if self.normalize else set(self.ids)
        return frozenset(word for word in seen if word.strip())

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        # The longest first: one may begin with another.
        return re.compile("|".join(map(re.escape, sorted(self.words, key=len, reverse=True))) or r"(?!)")

    @cached_property
    def _beginnings(self) -> frozenset[str]:
        return frozenset(word[:size] for word in self.words for size in range(1, len(word)))

    @cached_property
    def _endings(self) -> frozenset[str]:
        return frozenset(word[size:] for word in self.words for size in range(1, len(word)))

    @cached_property
    def _longest(self) -> int:
        return max(map(len, self.words), default=0)

    @cached_property
    def _edges(self) -> tuple[re.Pattern[str], re.Pattern[str]]:
        """The first and the last characters of their texts."""
        first, last = ("".join(sorted({re.escape(word[place]) for word in self.words})) for place in (0, -1))
        return re.compile(f"[{first}]" if first else "(?!)"), re.compile(f"[{last}]" if last else "(?!)")

    def pieces(self, text: str) -> list[tuple[str, bool]]:
        """`text` in pieces, each with whether it is the text of a control."""
        found, place = [], 0
        for match in self._pattern.finditer(text):
            found += [(text[place : match.start()], False), (match[0], True)]
            place = match.end()
        return [(piece, control) for piece, control in (*found, (text[place:], False)) if piece]

    def may_hold(self, text: str) -> bool:
        """Whether a text can become a control by itself; False is certain."""
        if not self.readable:
            return bool(self.ids)
        return self._pattern.search(text) is not None or (
            self.normalize is not None and self._pattern.search(self.normalize(text)) is not None
        )

    def begins(self, text: str) -> bool:
        """Whether `text` ends with the beginning of a control."""
        tail = text[-self._longest :]
        return any(tail[mark.start() :] in self._beginnings for mark in self._edges[0].finditer(tail))

    def ends(self, text: str) -> bool:
        """Whether `text` begins with the end of a control."""
        head = text[: self._longest]
        return any(head[: mark.end()] in self._endings for mark in self._edges[1].finditer(head))

    def of(self, ids: Iterable[int]) -> list[int]:
        """The controls among ids, in order."""
        return [token for token in ids if token in self._set]

    @cached_property
    def _set(self) -> frozenset[int]:
        return frozenset(self.ids.values()) - {self.unknown}


_KNOWN: WeakKeyDictionary[Any, tuple[Any, ControlTokens]] = WeakKeyDictionary()


def controls_of(tokenizer: Any) -> ControlTokens:
    """The controls of a tokenizer: its special tokens, and other added ones that are no plain word or blanks."""
    state = (len(tokenizer), getattr(tokenizer, "chat_template", None))
    if (known := _KNOWN.get(tokenizer)) is not None and known[0] == state:
        return known[1]
    special = tokenizer.all_special_tokens
    added = dict(zip(special, tokenizer.convert_tokens_to_ids(special), strict=True)) | tokenizer.get_added_vocab()
    ids = {
        word: token
        for word, token in added.items()
        if word.replace("\u2581", " ").strip() and (word in special or not word.isalnum())
    }
    # GPT-2 names its end token as that too, though its pieces know every character.
    unknown = None if (unk := tokenizer.unk_token_id) in (tokenizer.eos_token_id, tokenizer.bos_token_id) else unk
    backend = getattr(tokenizer, "backend_tokenizer", None)
    normalize = getattr(getattr(backend, "normalizer", None), "normalize_str", None)
    controls = ControlTokens(ids, unknown, normalize, backend is not None)
    _KNOWN[tokenizer] = (state, replace(controls, turns=_found_marks(tokenizer, controls)))
    return _KNOWN[tokenizer][1]


def _found_marks(tokenizer: Any, controls: ControlTokens) -> TurnMarks | None:
    openings = [controls.pieces(text) for text in _openings(tokenizer)]
    # The last two are those of the assistant and of a user who answers it.
    if all(any(control for _, control in pieces) for pieces in openings[-2:]):
        return None
    marks = {}
    for pieces in openings:
        text = pieces[-1][0] if pieces and not pieces[-1][1] else ""
        lines = text.rstrip().splitlines()
        if lines and len(mark := lines[-1].strip()) > 1:
            marks[mark] = "\n" in text[len(text.rstrip()) :]
    # `<<SYS>>` makes `[INST] <<SYS>>` of the template's own `[INST]`.
    rests = {mark.removeprefix(other).strip(): ends for mark, ends in marks.items() for other in marks if other != mark}
    marks |= {rest: ends for rest, ends in rests.items() if len(rest) > 1}

    def read(text: str) -> str:
        return str(tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)))

    seen = controls.normalize if controls.readable else read
    free = [sign for sign in ("_", "-", ".", REPLACEMENT) if read(f"a{sign}b") != read("ab")]
    return TurnMarks(marks, seen, free[0] if free else REPLACEMENT)


def _openings(tokenizer: Any) -> list[str]:
    """What the chat template writes before the words of a system, a user, an assistant, and a user again."""

    for roles in (("system", "user", "assistant", "user"), ("user", "assistant", "user")):
        contents = ("AAqAA", "BBqBB", "CCqCC", "DDqDD")[: len(roles)]
        chat = [{"role": role, "content": words} for role, words in zip(roles, contents, strict=True)]
        places = [(text := filled(tokenizer, chat)).find(words) for words in contents]
        if -1 in places or places != sorted(places):
            continue
        # Without a system's message the first opening may hold a text of the template's own.
        openings = [text[: places[0]]] if roles[0] == "system" else []
        for size, (words, place, end) in enumerate(zip(contents, places, places[1:], strict=False), 1):
            between = text[place + len(words) : end]
            # Less what ends the message before, unless that is all there is.
            rest = between.removeprefix(filled(tokenizer, chat[:size]).rpartition(words)[2])
            openings.append(rest if rest.strip() else between)
        return openings
    return []


class Placeholders:
    """Plain words that stand for parts of the texts of one chat while its template is filled in.

    Args:
        tokenizer: no text becomes one of its added tokens.
        texts: all texts from outside; no stand-in is found in them.
        turns: whether marks of the template's turns are broken up in what is hidden.
    """

    def __init__(self, tokenizer: Any, texts: Sequence[str], *, turns: bool = False) -> None:
        self.tokenizer, self.controls, self._texts = tokenizer, controls_of(tokenizer), texts
        self._turns = self.controls.turns if turns else None
        self._parts: list[tuple[str, str]] = []
        """of each stand-in the text before the cut and the one after it"""
        self.forged = False
        """whether a text holds a whole control"""

    def __bool__(self) -> bool:
        """Whether anything is hidden."""
        return bool(self._parts)

    @cached_property
    def _name(self) -> str:
        """A word that is in none of the texts."""
        for number in range(1000):
            name = f"Q{hashlib.sha256(repr((number, self._texts)).encode('utf-8', 'replace')).hexdigest()[:12]}Q"
            if not any(name in text for text in self._texts):
                return name
        raise AssertionError("no word is free")  # 1000 hashes of a text that holds them all

    @cached_property
    def _mark(self) -> re.Pattern[str]:
        return re.compile(f"{self._name}([0-9]+)Z")

    def _stand_in(self, before: str, after: str) -> str:
        self._parts.append((before, after))
        return f"{self._name}{len(self._parts) - 1}Z"

    def hide(self, text: str, keep: Collection[str] = ()) -> str:
        """`text` with a stand-in for each control in it but those of `keep`, and for half a control at its ends."""
        text = self._turns.broken(whole_characters(text)) if self._turns else whole_characters(text)
        if not self.controls.ids or not text:
            return text
        hidden = []
        for piece, control in self.controls.pieces(text):
            if not control:
                hidden.append(self._without_ends(self._without_looks(piece)))
            elif piece in keep:
                hidden.append(piece)
            else:
                self.forged = True
                hidden.append(self._stand_in(piece[:1], piece[1:]))
        return "".join(hidden)

    def _without_looks(self, text: str) -> str:
        """`text` with a stand-in wherever the tokenizer would read a control that is not written as one."""
        if not self.controls.may_hold(text) or not self._controls_in(text):
            return text
        self.forged = True
        done, size = "", 1
        # Before the last character of the shortest beginning that holds a control, found by doubling and halving.
        while self._controls_in(text):
            while size < len(text) and not self._controls_in(text[:size]):
                size *= 2
            low, high = size // 2, min(size, len(text))
            while high - low > 1:
                middle = (low + high) // 2
                low, high = (low, middle) if self._controls_in(text[:middle]) else (middle, high)
            done += text[: high - 1] + self._stand_in("", text[high - 1])
            text, size = text[high:], 1
        return done + text

    def _controls_in(self, text: str) -> bool:
        return bool(self.controls.of(self._ids(text)))

    def _without_ends(self, text: str) -> str:
        """A stand-in for the first or last visible character where the text before or after it may make a control."""
        seen = self.controls.normalize(text).strip() if self.controls.normalize else text.strip()
        begins = self.controls.begins(seen) or self.controls.begins(text.strip())
        ends = self.controls.ends(seen) or self.controls.ends(text.strip())
        if begins and (last := len(text.rstrip()) - 1) >= 0:
            text = text[:last] + self._stand_in(text[last], "") + text[last + 1 :]
        # Not a stand-in itself, which a text of one character has become.
        if ends and (first := len(text) - len(text.lstrip())) < len(text) and not self._mark.match(text, first):
            text = text[:first] + self._stand_in("", text[first]) + text[first + 1 :]
        return text

    def shown(self, text: str) -> str:
        """A filled-in template with the texts themselves in it."""
        return self._mark.sub(lambda match: "".join(self._parts[int(match[1])]), text) if self else text

    def encode(self, filled: str, *, add_special_tokens: bool = False) -> list[int]:
        """Token ids of a filled-in template with the texts in it as characters; ConfigError where no cut does it."""
        whole = self._ids(filled, add_special_tokens)
        if not self:
            return whole
        wanted = self.controls.of(whole)
        if not self.forged:
            ids = self._ids(self.shown(filled), add_special_tokens)
            # Half a control that nothing completes is ordinary text, with its ordinary ids.
            if self.controls.of(ids) == wanted:
                return ids
        for parts in (lambda a, b: [a, b], lambda a, b: ["", *a, *b, ""], lambda a, b: [REPLACEMENT]):
            ids = self._cut(filled, parts)
            if add_special_tokens:
                ids = self._with_ends(filled, whole, ids)
            if self.controls.of(ids) == wanted:
                return ids
        raise ConfigError(
            f"the tokenizer {getattr(self.tokenizer, 'name_or_path', '')!r} makes control tokens of the text "
            f"{self.shown(filled)[:80]!r} however it is cut; take another base"
        )

    def _cut(self, filled: str, parts: Callable[[str, str], list[str]]) -> list[int]:
        """Ids of the text, encoded piece by piece: no token reaches over a cut within a stand-in."""
        pieces, place = [""], 0
        for match in self._mark.finditer(filled):
            first, *rest = parts(*self._parts[int(match[1])])
            pieces[-1] += filled[place : match.start()] + first
            pieces += rest
            place = match.end()
        pieces[-1] += filled[place:]
        ids: list[int] = []
        for piece in pieces:
            if piece:
                ids += self._continued(piece) if ids else self._ids(piece)
        return ids

    def _continued(self, piece: str) -> list[int]:
        """Ids of a piece that other text stands before."""
        for anchor in ANCHORS:
            before, both = self._ids(anchor), self._ids(anchor + piece)
            if both[: len(before)] == before:
                return both[len(before) :]
        return self._ids(piece)

    def _with_ends(self, filled: str, whole: list[int], ids: list[int]) -> list[int]:
        """`ids` between the tokens that the tokenizer puts before and after a text."""
        bare = self._ids(filled)
        for start in range(len(whole) - len(bare) + 1):
            if whole[start : start + len(bare)] == bare:
                return [*whole[:start], *ids, *whole[start + len(bare) :]]
        return ids

    def _ids(self, text: str, add_special_tokens: bool = False) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=add_special_tokens))


def encode_outside(tokenizer: Any, text: str, keep: Collection[str] = ()) -> list[int]:
    """Token ids of a text from outside; only the controls of `keep` become one."""
    stand_ins = Placeholders(tokenizer, [text])
    return stand_ins.encode(stand_ins.hide(text, keep))


def answer_text(tokenizer: Any, ids: Sequence[int], ends: Collection[int]) -> str:
    """The text of sampled tokens without the end token that closes it; an id that stands for no text is U+FFFD."""
    answer_ids = list(ids[:-1] if len(ids) and ids[-1] in ends else ids)
    text, piece = "", []
    for token, word in zip(answer_ids, tokenizer.convert_ids_to_tokens(answer_ids), strict=True):
        if word:
            piece.append(token)
        else:
            text, piece = text + _decoded(tokenizer, piece) + REPLACEMENT, []
    return text + _decoded(tokenizer, piece)


def _decoded(tokenizer: Any, ids: list[int]) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))
