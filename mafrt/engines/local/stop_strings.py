"""Stop strings: has the text that a row generated just reached one of them?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class StopStrings:
    """Watches the rows whose request has this set of stop strings.

    Args:
        tokenizer: decodes; special tokens are shown, so that their texts can be stop strings too.
        stops: non-empty texts.

    Decoding text costs more than a decode step of a small model. So a token is checked only if its own text, or the
    text it completes, can hold the last character of a stop string; this is computed once per token id.
    """

    def __init__(self, tokenizer: Any, stops: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._stops = tuple(stops)
        self._ends = frozenset(stop[-1] for stop in stops)
        # A token holds at least one byte, bar those without text; a few more for these.
        self._tail = max(len(stop.encode()) for stop in stops) + 8
        self._may_end: dict[int, bool] = {}
        self._anchor = tokenizer.encode("a", add_special_tokens=False)[-1:]
        self._anchor_text = self._decode(self._anchor)

    def hit(self, ids: Sequence[int]) -> bool:
        """Whether the last token of `ids`, a row's tokens so far, completes a stop string."""
        token = ids[-1]
        may = self._may_end.get(token)
        if may is None:
            may = self._may_end[token] = self._could_end(token)
        if not may:
            return False
        text = self._decode(ids[-self._tail :])
        return any(stop in text for stop in self._stops)

    def _decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def _could_end(self, token: int) -> bool:
        # Behind another token, since some tokenizers drop a space at the beginning of a text.
        text = self._decode([*self._anchor, token])
        if not self._anchor_text or not text.startswith(self._anchor_text):
            return True
        piece = text[len(self._anchor_text) :]
        # Part of a character is shown as the replacement sign; the character is not known from it alone.
        return not piece or "�" in piece or any(end in piece for end in self._ends)
