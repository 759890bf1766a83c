"""The text of an answer in pieces, while its tokens are being sampled."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

from mafrt.environment.chat_api.protocol import before_stop

_HALF = "\ufffd"
"""Stands for the bytes of a character that is not whole yet."""


class TextPieces:
    """Called with the tokens so far; hands on the text that is new and certain.

    Args:
        tokenizer: decodes the tokens.
        stops: texts at which the answer ends; they are no part of it.
        said: takes the pieces.
        ends: end tokens, which are no part of the answer.
    """

    def __init__(
        self, tokenizer: Any, stops: Sequence[str], said: Callable[[str], None], ends: Collection[int] = ()
    ) -> None:
        self._tokenizer, self._stops, self._said, self._ends = tokenizer, stops, said, ends
        self._held = max((len(stop) for stop in stops), default=1) - 1
        """characters at the end that may be the beginning of a stop text"""
        self._done = 0
        """characters handed on"""

    def __call__(self, ids: Sequence[int]) -> None:
        said = ids[:-1] if len(ids) and ids[-1] in self._ends else ids
        text = self._tokenizer.decode(said, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        text = before_stop(text, self._stops)[0].rstrip(_HALF)
        certain = text[: len(text) - self._held]
        if len(certain) > self._done:
            self._said(certain[self._done :])
            self._done = len(certain)
