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
from dataclasses import dataclass
from functools import cached_property
from typing import Any
from weakref import WeakKeyDictionary

from mafrt.core.errors import ConfigError
from mafrt.core.text import REPLACEMENT, whole_characters

ANCHORS = ("a", "\n", ".")
"""Texts behind which the rest of a text is encoded, since some tokenizers put a space before a text."""


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


_KNOWN: WeakKeyDictionary[Any, tuple[int, ControlTokens]] = WeakKeyDictionary()


def controls_of(tokenizer: Any) -> ControlTokens:
    """The controls of a tokenizer: its special tokens, and other added ones that are no plain word or blanks."""
    known = _KNOWN.get(tokenizer)
    if known is not None and known[0] == len(tokenizer):
        return known[1]
    special = tokenizer.all_special_tokens
    added = dict(zip(special, tokenizer.convert_tokens_to_ids(special), strict=True)) | tokenizer.get_added_vocab()
    ids = {
        word: token
        for word, token in added.items()
        if word.replace("\u2581", " ").strip() and (word in special or not word.isalnum())
    }
    # GPT-2 names its end token as that too, though its pieces know every character.
    others = {tokenizer.eos_token_id, tokenizer.bos_token_id}
    unknown = None if tokenizer.unk_token_id in others else tokenizer.unk_token_id
    backend = getattr(tokenizer, "backend_tokenizer", None)
    normalizer = getattr(backend, "normalizer", None)
    normalize = None if normalizer is None else normalizer.normalize_str
    controls = ControlTokens(ids, unknown, normalize, backend is not None)
    _KNOWN[tokenizer] = (len(tokenizer), controls)
    return controls


def ordinary_mark(tokenizer: Any) -> str | None:
    """What begins a turn in the chat template, if it is text that anyone can write and no control token stands in it.

    Such templates (Llama 2's `[INST]`, `USER:`, `### Response:`) cannot tell a turn from words that look like one.
    None: every turn begins with a control token, or there is no template that takes a user, an assistant and a user.
    """
    said = "AAqAA", "BBqBB", "CCqCC"
    messages = [{"role": role, "content": text} for role, text in zip(("user", "assistant", "user"), said, strict=True)]
    try:
        text = str(tokenizer.apply_chat_template(messages, tokenize=False))
        places = [text.index(content) for content in said]
    except Exception:  # a template may raise whatever it likes
        return None
    for content, begin, end in zip(said, places, places[1:], strict=False):
        between = text[begin + len(content) : end]
        if not any(control for _, control in controls_of(tokenizer).pieces(between)):
            return between.strip()
    return None


class Placeholders:
    """Plain words that stand for parts of the texts of one chat while its template is filled in.

    Args:
        tokenizer: no text becomes one of its added tokens.
        texts: all texts from outside; no stand-in is found in them.
    """

    def __init__(self, tokenizer: Any, texts: Sequence[str]) -> None:
        self.tokenizer, self.controls = tokenizer, controls_of(tokenizer)
        self._texts = texts
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
        text = whole_characters(text)
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
    said = list(ids[:-1] if len(ids) and ids[-1] in ends else ids)
    text, piece = "", []
    for token, word in zip(said, tokenizer.convert_ids_to_tokens(said), strict=True):
        if word:
            piece.append(token)
        else:
            text, piece = text + _decoded(tokenizer, piece) + REPLACEMENT, []
    return text + _decoded(tokenizer, piece)


def _decoded(tokenizer: Any, ids: list[int]) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))
