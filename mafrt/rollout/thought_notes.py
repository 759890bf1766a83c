"""What the settings on thoughts mean for the chat templates of a run, said before it starts."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from typing import Any

from mafrt.core.errors import ConfigError
from mafrt.environment.thought_forms import template_thoughts

log = logging.getLogger(__name__)

_THOUGHTS = re.compile(r"think|thought|reasoning|analysis", re.IGNORECASE)


def check_thoughts(tokenizers: Sequence[Any], reasoning: str) -> None:
    """Raise ConfigError where no chat template knows of thoughts, so that there are none to keep."""
    if reasoning == "on" or any(_THOUGHTS.search(str(getattr(one, "chat_template", ""))) for one in tokenizers):
        return
    raise ConfigError(
        f"keep_thoughts is on, but the chat template of {', '.join(dict.fromkeys(map(_name, tokenizers)))} has no "
        "thoughts; leave keep_thoughts out, take a base that thinks, such as Qwen/Qwen3-0.6B, or say with --reasoning "
        "on that every answer begins inside a thought."
    )


def note_thoughts(tokenizers: Sequence[Any], reasoning: str, budget: int) -> None:
    """Say in one line for each tokenizer where `reasoning` or `budget` (tokens, 0: none) does not do what it says."""
    for tokenizer in {id(one): one for one in tokenizers}.values():
        found = template_thoughts(tokenizer)
        if found.form is None and found.shown:
            effect = "others see them" + (f", and thinking_budget {budget} does not end them" if budget else "")
            log.warning("%s: its chat template writes thoughts in a form that is not known here; %s.",
                        _name(tokenizer), effect)  # fmt: skip
        elif found.closed and (budget or reasoning == "on"):
            asked = "reasoning is on" if reasoning == "on" else f"thinking_budget is {budget}"
            log.warning("%s: %s, but its chat template ends the prompt with a thought that is over (%s), so that "
                        "answers have none; take a base, or a template, that leaves thinking on.",
                        _name(tokenizer), asked, found.form.closing if found.form else "")  # fmt: skip
        elif found.form is None and budget and reasoning != "on":
            log.warning("%s: its chat template has no thoughts, so thinking_budget %d ends only those that an answer "
                        "writes between <think> and </think>.", _name(tokenizer), budget)  # fmt: skip
        elif found.form is not None and budget:
            log.info("%s: a thought of more than %d tokens is ended by %s.",
                     _name(tokenizer), budget, found.form.closing)  # fmt: skip


def _name(tokenizer: Any) -> str:
    return str(getattr(tokenizer, "name_or_path", "")) or "the base"
