"""The ways in which model families write thoughts, and which of them a chat template speaks.

Sources: the chat templates of Qwen, DeepSeek, GLM and others (`<think>`), Seed-OSS, MiniMax M3, Hunyuan 3, Mistral,
Cohere, Gemma 4, Apertus, Apriel, Kimi K3, gpt-oss, Solar Open and Muse Glimmer.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from mafrt.core.text import filled


@dataclass(frozen=True)
class ThoughtForm:
    """How one family writes a thought."""

    opening: str
    closing: str
    ending: str = ""
    """put in where a thought is ended from outside, as the family writes it; empty: the closing mark"""
    answer: str = ""
    """the same, once a thought that was ended is followed by another; empty: as the first"""
    next: str = ""
    """pattern of what can only stand behind a thought, and ends one whose closing mark is lost"""
    message: bool = False
    """whether a thought is a message of its own, which ends as every message does"""

    @property
    def end(self) -> str:
        """Pattern of the end of a thought."""
        return re.escape(self.closing) + (f"|(?={self.next})" if self.next else "")

    @property
    def tokens(self) -> frozenset[str]:
        """Parts of the marks that are tokens of their own in the family's tokenizers."""
        return frozenset(re.findall(r"<[^<>\s]+>|\[/?THINK\]", self.opening + self.closing + self.ending + self.answer))


THINK, THOUGHT = "<think>", "</think>"
TAGS = (
    ThoughtForm(THINK, THOUGHT, f"\n{THOUGHT}\n\n"),
    *(ThoughtForm(f"<{tag}>", f"</{tag}>") for tag in ("seed:think", "mm:think", "think:opensource", "thinking")),
    ThoughtForm("[THINK]", "[/THINK]"),
    ThoughtForm("<|START_THINKING|>", "<|END_THINKING|>", next=r"<\|START_(?:ACTION|RESPONSE|TEXT)\|>"),
    ThoughtForm("<|channel>thought", "<channel|>", "\n<channel|>"),
    ThoughtForm("<|inner_prefix|>", "<|inner_suffix|>", next=r"<\|tools_prefix\|>"),
)
"""forms whose marks stand for nothing else"""
APRIEL = ThoughtForm("Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]", "\n[BEGIN FINAL RESPONSE]\n")
"""opened by the prompt; in an answer its opening is words that anyone may say"""
OPEN_CLOSE = ThoughtForm("<|open|>think<|sep|>", "<|close|>think<|sep|>")
# The next channel is the model's choice, since a tool call has one of its own; but no second thought.
HARMONY = ThoughtForm(
    "<|channel|>analysis<|message|>",
    "<|end|>",
    "<|end|><|start|>assistant",
    "<|end|><|start|>assistant<|channel|>final<|message|>",
    message=True,
)
MESSAGES = (
    HARMONY,
    ThoughtForm(
        "<|think|>",
        "<|end|>",
        "<|end|><|begin|>assistant",
        "<|end|><|begin|>assistant<|content|>",
        next=r"<\|(?:tool_calls|content)\|>",
        message=True,
    ),
    ThoughtForm(
        "to=self<|message|>",
        "<|eom|>",
        "<|eom|><|start|>assistant",
        "<|eom|><|start|>assistant to=user<|message|>",
        next=r"<\|(?:start|eot)\|>",
        message=True,
    ),
)
"""of gpt-oss, Solar Open and Muse Glimmer"""
FORMS = (APRIEL, *TAGS, OPEN_CLOSE, *MESSAGES)
BY_OPENING = {form.opening: form for form in FORMS}


@dataclass(frozen=True)
class TemplateThoughts:
    """What a chat template says of thoughts."""

    form: ThoughtForm | None
    """None: none that is known"""
    opened: bool
    """whether the prompt ends inside a thought"""
    closed: bool
    """whether it ends with a thought that is over, so that answers have none"""
    shown: bool
    """whether a thought that is given beside a message stands in the chat"""


def template_thoughts(tokenizer: Any) -> TemplateThoughts:
    """What the chat template of a tokenizer says of thoughts; nothing where there is none."""
    template = str(getattr(tokenizer, "chat_template", None) or "")
    told, chat = "QTOLDQ", [{"role": "user", "content": "QASKEDQ"}]
    fields = dict.fromkeys(("reasoning_content", "reasoning", "thinking", "thought"), told)
    prompt = filled(tokenizer, chat, add_generation_prompt=True).rpartition("QASKEDQ")[2].rstrip() if template else ""
    history = filled(tokenizer, [*chat, {"role": "assistant", "content": "a", **fields}]) if template else ""
    text = template + prompt + history
    form = next((one for one in FORMS if one.opening in text or (not one.message and one.closing in text)), None)
    begun = prompt.find(form.opening) if form is not None and form.message else 0
    closed = form is not None and begun >= 0 and form.closing in prompt[begun:]
    return TemplateThoughts(form, form is not None and prompt.endswith(form.opening), closed, told in history)
