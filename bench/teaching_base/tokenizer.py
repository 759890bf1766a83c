"""The tokenizers and the chat template of the tiny bases.

The teaching base has a byte-level BPE of about a thousand tokens: any text can be encoded and decoded exactly, and the
words of the corpus are one token each, so episodes are short. Every digit is its own token, which
makes arithmetic learnable for a small model; the space before a number is merged into the word or
sign before it, so that it costs no token. The games base has the same with other pieces: a cell of a
grid and a step of a route are one token each, and so are words.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer

PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"

# In order: the opening of an answer; one digit; a word, with the space before it and, when a number
# follows, the one behind it; signs with the spaces around them; other white space.
PIECES = "|".join(
    (
        r" ?\\boxed\{",
        r"\p{N}",
        r" ?[\p{L}\p{M}_]+(?: (?=\p{N}))?",
        r" ?[^\s\p{L}\p{M}\p{N}_]+? ?(?=\\boxed\{)",
        r" ?[^\s\p{L}\p{M}\p{N}_]+ ?",
        r"\s+",
    )
)

# A word, with the space before it, unless it is made of the steps of a route (u, d, l, r); else one character.
GAME_PIECES = "|".join((r" ?(?=[udlr]*[a-ce-kmo-qstv-zA-Z])[A-Za-z][a-z]+", r"[^\n]", r"\n"))

CHAT_TEMPLATE = """\
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}
            {{- '<|im_end|>\\n' }}
        {%- endif %}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + (message.content or '') }}
        {%- for call in message.tool_calls or [] %}
            {%- set call = call.function or call %}
            {{- '\\n' if message.content or not loop.first else '' }}
            {{- '<tool_call>\\n{"name": "' + call.name + '", "arguments": ' }}
            {{- call.arguments if call.arguments is string else call.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


def render(messages: Iterable[dict[str, str]]) -> str:
    """The chat template for messages without tool calls, in plain Python for speed."""
    parts: list[str] = []
    previous = ""
    for message in messages:
        role, content = message["role"], message["content"]
        if previous == "tool" and role != "tool":
            parts.append(f"{END}\n")
        if role == "tool":
            parts.append("" if previous == "tool" else f"{START}user")
            parts.append(f"\n<tool_response>\n{content}\n</tool_response>")
        else:
            parts.append(f"{START}{role}\n{content}{END}\n")
        previous = role
    return "".join(parts) + (f"{END}\n" if previous == "tool" else "")


def train_tokenizer(texts: Iterable[str], vocab_size: int, pieces: str = PIECES) -> Tokenizer:
    """Learn the merges within `pieces` from rendered documents; the same texts give the same tokenizer."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pieces), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[PAD, START, END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    # The markers of the chat are no text: left in, they would be learned as words.
    tokenizer.train_from_iterator((piece for text in texts for piece in text.replace(END, START).split(START)), trainer)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path, max_length: int) -> None:
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "pad_token": PAD,
        "additional_special_tokens": [START, END],
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_length,
        "padding_side": "left",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
