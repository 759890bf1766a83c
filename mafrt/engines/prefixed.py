"""Engines that get more out of the same weights: answers that begin with given words, demonstrations, and votes."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from mafrt.core.seeding import seed_of
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


class DemonstratingEngine:
    """Shows other turns before the prompts of some adapters: each a prompt and its answer, as they were sampled.

    Args:
        engine: samples after them.
        shown: adapter -> token ids of its demonstrations, one after the other.
        window: max tokens of prompt and answer together; a prompt that leaves no room for them goes without.
    """

    def __init__(self, engine: Engine, shown: Mapping[str, Sequence[int]], window: int) -> None:
        self.engine, self.shown, self.window = engine, shown, window

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        return self.engine.generate([self._longer(request) for request in requests])

    def _longer(self, request: Request) -> Request:
        ids = [*self.shown.get(request.adapter or "", ()), *request.prompt_ids]
        fits = len(ids) + request.sampling.max_new_tokens <= self.window
        return replace(request, prompt_ids=ids) if fits else request


class VotingEngine:
    """Says in every turn what another engine says most often in `votes` tries; of equally frequent texts the first."""

    def __init__(self, engine: Engine, votes: int) -> None:
        self.engine, self.votes = engine, votes

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        tries = [replace(each, seed=seed_of(each.seed, vote)) for each in requests for vote in range(self.votes)]
        made = self.engine.generate(tries)
        chosen = []
        for place in range(0, len(made), self.votes):
            cast = made[place : place + self.votes]
            texts = [completion.text.strip() for completion in cast]
            chosen.append(cast[texts.index(Counter(texts).most_common(1)[0][0])])
        return chosen
