"""Answers that must fit a JSON schema: the tokens that may come next, told by llguidance.

The other tokens are barred before one is drawn, so that a token's log-probability is that of the barred distribution.
"""

from __future__ import annotations

import copy
import json
import string
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mafrt.core.errors import ConfigError
from mafrt.core.extras import package
from mafrt.core.reading import parse_json
from mafrt.core.text import clean_text, shortened

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

MOST_SCHEMAS = 256
"""that are kept compiled"""
MOST_CHARACTERS = 65_536
"""of a schema"""
MOST_COUNT = 1000
"""of `minItems` and its like: a grammar writes each of them out"""
_COUNTS = frozenset(
    f"{edge}{what}" for edge in ("min", "max") for what in ("Items", "Length", "Properties", "Contains")
)
MOST_BOUND = 2**53
"""of `minimum` and its like: the library cuts off what no 64 bits hold, and an answer would then miss its bounds"""
_BOUNDS = frozenset(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"))
FORCED = 8
"""tokens without a choice at an answer's beginning that are tried before a schema is taken"""
_OPTIONS = "x-guidance"
"""Settings of the library within a schema, by which it would leave keywords out."""
_FORM: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""As `json.dumps` writes. With free white space a small model may write nothing else."""


class Grammars:
    """The grammars of an engine, compiled once for each schema.

    Args:
        tokenizer: of the base.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._read: dict[frozenset[int], LLTokenizer] = {}
        self._compiled: OrderedDict[tuple[str, frozenset[int]], LLMatcher] = OrderedDict()

    def of(self, schema: str, ends: frozenset[int]) -> Grammar:
        """A grammar at its beginning.

        Args:
            schema: JSON schema, as JSON.
            ends: tokens that end an answer.

        Raises:
            ConfigError: no grammar covers the schema, or the tokenizer is of a kind that llguidance does not know.
            MissingExtraError: llguidance is missing.
        """
        key = schema, ends
        if key not in self._compiled:
            self._compiled[key] = self._made(schema, ends)
            while len(self._compiled) > MOST_SCHEMAS:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(key)
        return Grammar(self._compiled[key].deep_copy(), ends)

    def _made(self, schema: str, ends: frozenset[int]) -> LLMatcher:
        package("A JSON schema", "serve", "llguidance")
        from llguidance import LLMatcher

        _check_size(schema)
        vocabulary = self._vocabulary(ends)  # outside the `try`: its errors are not the schema's
        text = clean_text(json.dumps([string.printable[:95], json.loads(schema)], ensure_ascii=False))
        if vocabulary.decode_bytes(vocabulary.greedy_tokenize(text)) != text.encode():
            raise ConfigError("this base's tokenizer lacks characters that an answer of this JSON schema may need")
        try:
            matcher = LLMatcher(vocabulary, LLMatcher.grammar_from_json_schema(schema, overrides=_FORM), log_level=0)
        except ValueError as error:
            raise ConfigError(f"no grammar covers this JSON schema ({shortened(str(error), 200)})") from None
        trial = matcher.deep_copy()
        # Some bounds show only as an answer begins: that of a schema which refers to nothing but itself, for one.
        for _ in range(FORCED):
            if trial.is_error() or trial.is_stopped():
                break
            only = int.from_bytes(trial.compute_bitmask(), "little")
            if trial.is_error() or only.bit_count() != 1:
                break
            trial.consume_token(only.bit_length() - 1)
        if trial.is_error():
            why = trial.get_error().partition("<state>")[0]
            raise ConfigError(f"no grammar covers this JSON schema ({shortened(why, 200)})")
        return matcher

    def _vocabulary(self, ends: frozenset[int]) -> LLTokenizer:
        if ends not in self._read:
            from llguidance import LLTokenizer

            if not ends:
                raise ConfigError("an answer that must fit a JSON schema needs a token that ends it; there is none")
            try:
                # A copy, since padding and truncation are no part of the vocabulary.
                backend = copy.copy(self._tokenizer.backend_tokenizer)
                backend.no_padding()
                backend.no_truncation()
                self._read[ends] = LLTokenizer(backend.to_str(), eos_token=sorted(ends))
            except (AttributeError, ValueError) as error:
                raise ConfigError(
                    f"this base's tokenizer is of a kind that llguidance does not know ({shortened(str(error), 120)}), "
                    "so answers cannot be held to a JSON schema"
                ) from None
        return self._read[ends]


def _check_size(schema: str) -> None:
    """Raise ConfigError for a schema whose grammar would take long, or all memory."""
    if len(schema) > MOST_CHARACTERS:
        raise ConfigError(f"the JSON schema has {len(schema)} characters, and may have {MOST_CHARACTERS}; shorten it")
    try:
        parts = [parse_json(schema)]
    except ValueError as error:
        raise ConfigError(f"no grammar covers this JSON schema ({shortened(str(error), 200)})") from None
    if isinstance(parts[0], dict) and _OPTIONS in parts[0]:
        raise ConfigError(f"no grammar covers this JSON schema ({_OPTIONS} is no keyword of one)")
    while parts:
        part = parts.pop()
        parts += part.values() if isinstance(part, dict) else part if isinstance(part, list) else ()
        for name in (_COUNTS | _BOUNDS) & part.keys() if isinstance(part, dict) else ():
            most = MOST_COUNT if name in _COUNTS else MOST_BOUND
            if isinstance(part[name], (int, float)) and abs(part[name]) > most:
                raise ConfigError(f"no grammar covers this JSON schema ({name} may be at most {most})")


class Grammar:
    """The grammar of one answer, which follows its tokens."""

    def __init__(self, matcher: LLMatcher, ends: frozenset[int]) -> None:
        self._matcher, self._ends = matcher, ends

    def bar(self, logits: Tensor) -> None:
        """Set the logits `[V]` of tokens that may not come next to -inf, in place.

        A grammar that reaches a bound of its library leaves the end tokens alone; the answer is then no whole JSON.
        """
        allowed = torch.zeros(len(logits), dtype=torch.bool)
        bits = torch.frombuffer(bytearray(self._matcher.compute_bitmask()), dtype=torch.uint8)
        known = (bits.unsqueeze(1) >> torch.arange(8, dtype=torch.uint8)).bitwise_and_(1).flatten()[: len(logits)]
        allowed[: len(known)] = known.bool()
        if self._matcher.is_error() or not allowed.any():
            allowed[sorted(self._ends)] = True
        logits.masked_fill_(~allowed.to(logits.device), float("-inf"))

    def take(self, token: int) -> None:
        """Go on behind a token."""
        if token not in self._ends:
            self._matcher.consume_token(token)
