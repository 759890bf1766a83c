"""An engine whose answers begin with given words: to measure how much of a team's gain a fixed prefix brings."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from mafrt.core.types import Completion, Request
from mafrt.engines import Engine

_NUMBER = re.compile(r"\d+(?:\.\d+)?")


def filled(template: str, prompt: str) -> str:
    """`template` with numbers of the prompt in it.

    `{opening}` is the first number of the prompt; `{first}` and `{last}` are those of its last line that holds any.
    """
    by_line = [numbers for line in prompt.splitlines() if (numbers := _NUMBER.findall(line))] or [[""]]
    named = {"opening": by_line[0][0], "first": by_line[-1][0], "last": by_line[-1][-1]}
    for name, number in named.items():
        template = template.replace(f"{{{name}}}", number)
    return template


class PrefixedEngine:
    """Begins the answers of some adapters with a prefix, and lets another engine sample the rest.

    Args:
        engine: samples after the prefix.
        tokenizer: reads the prompt and encodes the prefix.
        prefixes: adapter -> template of its prefix, see `filled`.

    Log-probabilities of the prefix are 0.0, so its episodes are for evaluation and not for training. The limit on new
    tokens counts without the prefix.
    """

    def __init__(self, engine: Engine, tokenizer: Any, prefixes: Mapping[str, str]) -> None:
        self.engine, self.tokenizer, self.prefixes = engine, tokenizer, prefixes

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        prefixes = [self._prefix(request) for request in requests]
        encoded = [list(self.tokenizer.encode(text, add_special_tokens=False)) for text in prefixes]
        longer = [
            replace(request, prompt_ids=[*request.prompt_ids, *ids])
            for request, ids in zip(requests, encoded, strict=True)
        ]
        completions = self.engine.generate(longer)
        return [
            replace(rest, ids=ids + rest.ids, logprobs=[0.0] * len(ids) + rest.logprobs, text=text + rest.text)
            for text, ids, rest in zip(prefixes, encoded, completions, strict=True)
        ]

    def _prefix(self, request: Request) -> str:
        template = self.prefixes.get(request.adapter or "", "")
        return filled(template, self.tokenizer.decode(list(request.prompt_ids))) if template else ""
