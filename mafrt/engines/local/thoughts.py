"""A budget of thought: after so many tokens of it, its closing mark is put in, and the model goes on to its answer.

The tokens put in are part of an answer as the model reads it on, and none that it chose: `SamplingRow.forced` has their
places, and nothing is learnt from them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mafrt.environment.thought_forms import BY_OPENING, THINK, template_thoughts
from mafrt.models.outside_text import encode_outside

TAIL = 16
"""tokens of an answer in which a mark is looked for that a tokenizer has no single token for"""


class ThoughtMarks:
    """The marks of a thought in the tokens of one tokenizer: in its chat template's form, else `<think>`."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer, self.form = tokenizer, template_thoughts(tokenizer).form or BY_OPENING[THINK]

        def encoded(text: str) -> list[int]:
            return encode_outside(tokenizer, text, self.form.tokens)

        self.ending = encoded(self.form.ending or self.form.closing)
        self.answer = encoded(self.form.answer) if self.form.answer else self.ending
        ids = {mark: encoded(mark) for mark in (self.form.opening, self.form.closing)}
        self._single = {mark: tokens[0] for mark, tokens in ids.items() if len(tokens) == 1}

    def opens(self, prompt: Sequence[int]) -> bool:
        """Whether a prompt ends inside a thought that it opens itself."""
        return bool(self._text(prompt).rstrip().endswith(self.form.opening))

    def ends_with(self, ids: Sequence[int], mark: str) -> bool:
        """Whether the last token of an answer completes a mark."""
        if mark in self._single:
            return ids[-1] == self._single[mark]
        return self._text(ids).count(mark) > self._text(ids[-TAIL:-1]).count(mark)

    def _text(self, ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(ids[-TAIL:]), skip_special_tokens=False))


class Thought:
    """Where one answer is, inside a thought or not.

    Args:
        marks: of the tokenizer.
        prompt: which the answer follows.
        budget: tokens of thought, after which it is ended.
        opened: whether it begins inside a thought that the prompt does not show.
    """

    def __init__(self, marks: ThoughtMarks, prompt: Sequence[int], budget: int, *, opened: bool = False) -> None:
        self._marks, self._left, self._inside = marks, budget, opened or marks.opens(prompt)
        self._pending: list[int] = []
        self._ended = False

    @property
    def next(self) -> int | None:
        """The token that comes next whatever is sampled; None: the sampled one."""
        return self._pending[0] if self._pending else None

    def take(self, ids: Sequence[int]) -> None:
        """Note the last token of an answer."""
        if self._pending:
            del self._pending[0]
            self._inside = bool(self._pending)
        elif self._inside:
            self._left -= 1
            self._inside = not self._marks.ends_with(ids, self._marks.form.closing)
        else:
            self._inside = self._marks.ends_with(ids, self._marks.form.opening)
        if self._inside and self._left <= 0 and not self._pending:
            self._pending = list(self._marks.answer if self._ended else self._marks.ending)
            self._ended = True
