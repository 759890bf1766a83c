"""What a base brings along and is computed with, tried within bounds before anything waits for it.

A chat template is a program, a tokenizer's expressions may take for ever over a text, and a config.json may describe a
model that is never laid out. The process that computes with one cannot end it, so each is tried in a fork.
"""

from __future__ import annotations

import string
from itertools import product
from typing import Any

from mafrt.core import forked_trial
from mafrt.core.errors import ModelError
from mafrt.models.outside_text import controls_of

TRIED_TEXTS = (
    # Expressions that take for ever do so over a run of what they repeat, and not without the character behind it.
    *(char * 40 + string.printable for char in f"{string.printable}\u00e9\u0301\u4e00\u200b\U0001f600"),
    "a" * 10_000 + string.printable,
    " " * 10_000 + string.printable,
    "aA1." * 2500,
)


def check_tokenizer_ends(name: str, tokenizer: Any) -> None:
    """Raise ModelError for a chat template or tokenizer that does not end, dies, or fills the memory."""
    passed = forked_trial.in_fork(lambda: _fill_in(tokenizer), lambda: _encode(tokenizer))
    if len(passed) < 2:
        raise ModelError(
            f"the {('chat template', 'tokenizer')[len(passed)]} of the model {name!r} does not end within "
            f"{forked_trial.TRIAL_CPU_S} s, or needs more than {forked_trial.TRIAL_MIB} MiB of memory, for "
            f"{('a chat of four words', 'runs of one character')[len(passed)]}; take another copy"
        )


def _fill_in(tokenizer: Any) -> str:
    if not getattr(tokenizer, "chat_template", None):
        return ""
    words = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    chats = (words, [{"role": "system", "content": "d"}, *words], [*words, {"role": "tool", "content": "e"}])
    refused = 0
    for chat in chats:
        for tools, asked in product((None, [], [tool]), (True, False)):
            try:
                tokenizer.apply_chat_template(chat, tools=tools, add_generation_prompt=asked, tokenize=False)
            except MemoryError:
                raise SystemExit from None
            except Exception:  # it says so when it gets such a chat
                refused += 1
    return f"refuses {refused} chats"


def _encode(tokenizer: Any) -> str:
    if (backend := getattr(tokenizer, "backend_tokenizer", None)) is None:
        return ""
    controls_of(tokenizer).pieces(TRIED_TEXTS[-1])
    unread = 0
    for text in TRIED_TEXTS:
        try:
            backend.decode(backend.encode(text, add_special_tokens=False).ids, skip_special_tokens=False)
        except Exception:  # told when such a text is read; a panic of its library is no Exception
            unread += 1
    return f"cannot read {unread} texts"
