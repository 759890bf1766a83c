"""Values of config.json, generation_config.json and a tokenizer that no model can have, told before weights are loaded.

Transformers checks their types alone, and leaves most of what a value means to the first pass that fails.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mafrt.core.errors import ModelError
from mafrt.core.reading import parse_json, read_text
from mafrt.core.text import filled, shortened

log = logging.getLogger(__name__)

MAY_BE_ZERO = ("head_dim", "intermediate_size", "sliding_window")
ABOVE_ZERO = ("factor", "hidden_size", "max_position_embeddings", "n_ctx", "n_embd", "n_head", "n_layer", "n_positions",
              "num_attention_heads", "num_hidden_layers", "num_key_value_heads", "original_max_position_embeddings",
              "rope_theta", "vocab_size")  # fmt: skip
FORMATS = ("float32", "bfloat16", "float16", "float64", "auto")
"""number formats in which weights are computed with"""
OF_TEXT = ("text_config", "rope_parameters", "rope_scaling")
"""parts of a config.json that are of the text too"""


def check_values(name: str, config: Mapping[str, Any], parsed: Any, tokenizer: Any, folder: Path | None) -> None:
    """Raise ModelError for a value that no model can have.

    Args:
        name: of the model, for the message.
        config: content of its config.json.
        parsed: that as transformers reads it.
        tokenizer: of the model.
        folder: with its generation_config.json, if it has one; None: that is not looked at.
    """
    parts = list(_parts(config))
    for part in parts:
        for field, value in part.items():
            number = isinstance(value, (int, float))
            if number and field in ABOVE_ZERO and not value > 0:
                raise _wrong(name, field, value, "a number above 0")
            if number and field in MAY_BE_ZERO and not value >= 0:
                raise _wrong(name, field, value, "a number of at least 0")
            if field in ("dtype", "torch_dtype") and str(value or "auto").removeprefix("torch.") not in FORMATS:
                raise _wrong(name, field, value, f"one of {', '.join(FORMATS[:3])}")
    rows = getattr(parsed.get_text_config(), "vocab_size", None)
    generation = _generation(name, folder)
    ends = [("config.json", part.get("eos_token_id")) for part in parts]
    ends += [("generation_config.json", generation.get("eos_token_id")), ("tokenizer", tokenizer.eos_token_id)]
    for file, value in ends:
        for token in value if isinstance(value, list) else [value]:
            known = type(token) is int and token >= 0 and not (isinstance(rows, int) and token >= rows)
            if token is not None and not known:
                raise _wrong(name, "eos_token_id", token, f"a token's number, below its {rows} tokens", file)
    if not isinstance(rows, int):
        return
    most = max(tokenizer.vocab_size - 1, tokenizer.pad_token_id or 0)
    # An added token without a row does no harm where nothing writes it: texts from outside become none.
    if len(tokenizer) > rows:
        most = max(most, *_written(tokenizer))
    if most >= rows:
        raise ModelError(
            f"the model {name!r} has a tokenizer with a token of number {most}, and its config.json has {rows} as "
            "vocab_size, the rows of its embedding; take both from one model, with all files of its tokenizer"
        )
    if all(value in (None, []) for _, value in ends):
        log.warning("%s: names no end token (eos_token_id), so that answers end at --max_new_tokens only", name)
    if not getattr(tokenizer, "chat_template", None):
        log.warning("%s: its tokenizer has no chat template, so that chats are lines of `role: text`", name)


def _written(tokenizer: Any) -> Iterator[int]:
    """The tokens that the tokenizer and its chat template write by themselves."""
    chat = [{"role": role, "content": "a"} for role in ("system", "user", "assistant", "user")]
    for text in ("a", *(filled(tokenizer, part, add_generation_prompt=True) for part in (chat, chat[1:2]))):
        yield from tokenizer.encode(text)


def _parts(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    yield config
    for field in OF_TEXT:
        if isinstance(part := config.get(field), Mapping):
            yield from _parts(part)


def _generation(name: str, folder: Path | None) -> Mapping[str, Any]:
    file = None if folder is None else folder / "generation_config.json"
    if file is None or not file.exists():
        return {}
    try:
        found = parse_json(read_text(file))
    except (OSError, ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise ModelError(f"the model {name!r} has a generation_config.json that is no JSON object; take another copy")
    return found


def _wrong(name: str, field: str, value: Any, expected: str, file: str = "config.json") -> ModelError:
    return ModelError(
        f"the model {name!r} has {shortened(repr(value))} as {field} in its {file}; expected {expected}; mend the "
        "line, or take another copy"
    )
