"""The invocation of an activated adapter: the tokens with which an agent's own turn begins.

An adapter of scope `action` acts on the invocation and on the tokens after it; the tokens before it, the transcript,
are computed by the base alone (activated LoRA, Greenewald et al. 2025, arXiv:2504.12397, section 3). So the keys and
values of a transcript belong to no adapter, and all agents read the same ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mafrt.core.errors import ConfigError
from mafrt.core.text import fill_template

PLAIN = "assistant:"
"""Begins a turn where the tokenizer has no chat template."""


def invocation_of(tokenizer: Any, base_name: str) -> tuple[int, ...]:
    """Tokens of the generation prompt, such as those of `<|im_start|>assistant` and a line break.

    Raises ConfigError for a chat template whose generation prompt is empty or not a sequence of whole tokens.
    """
    if getattr(tokenizer, "chat_template", None):
        chat = [{"role": "user", "content": "?"}]
        # The difference of two renderings is the generation prompt, whatever the template is; parsing templates would
        # know only some of them.
        before, whole = (fill_template(tokenizer, chat, add_generation_prompt=asked) for asked in (False, True))
        begin = whole[len(before) :] if whole.startswith(before) else ""
        ids = list(tokenizer.encode(whole, add_special_tokens=False))
        marker = list(tokenizer.encode(begin, add_special_tokens=False))
    else:
        begin = PLAIN
        ids, marker = (list(tokenizer.encode(text, add_special_tokens=False)) for text in (f"user: ?\n{begin}", begin))
    # A tokenizer may merge across the border, and then the tokens that end the prompt are not those of the words alone.
    if not marker or ids[-len(marker) :] != marker:
        raise ConfigError(
            f"adapter_scope is action, but the chat template of {base_name} begins an answer with {begin!r}, which is "
            "no sequence of whole tokens at the prompt's end; use adapter_scope all, or another chat template"
        )
    return tuple(marker)


def active_from(prompt: Sequence[int], invocation: Sequence[int]) -> int:
    """Position of the first token on which an activated adapter acts: where the invocation begins for the last time.

    In a prompt without the invocation it is the last token, whose state predicts the first token of the action.
    """
    size, tokens = len(invocation), list(invocation)
    # Backwards, since earlier turns of a transcript begin with the same tokens and only the last one is the agent's
    # own.
    for first in range(len(prompt) - size, -1, -1):
        if prompt[first] == tokens[0] and list(prompt[first : first + size]) == tokens:
            return first
    # A prompt that was cut has lost it; the adapter then acts from the last token, which predicts the first of the
    # answer.
    return len(prompt) - 1
