"""The scripted engine: canned answers, for tests and for writing environments."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mafrt.core.errors import ConfigError
from mafrt.core.text import clean_text
from mafrt.core.types import Completion, Request, Stop
from mafrt.models.outside_text import answer_text


class ScriptedEngine:
    """Answers from a script.

    Args:
        answers: per adapter the texts that its requests get, in order and over again from the first; or a function
            of the request.
        tokenizer: turns an answer into ids; its end token, if it has one, ends every answer that fits.

    `requests` holds every request seen, for tests to look at. Log-probabilities are 0.0 and the version is 0, since
    no model is involved. An answer longer than `max_new_tokens` is cut there, as a model's would be.

    >>> tokenizer = mafrt.SharedBase.load("teaching-base").tokenizer
    >>> engine = mafrt.ScriptedEngine({"solver": ["so 7", "so 8"]}, tokenizer)
    >>> request = mafrt.Request([1], "solver", mafrt.SamplingParams(), seed=0)
    >>> [made.text for made in engine.generate([request, request])]
    ['so 7', 'so 8']
    """

    def __init__(self, answers: Mapping[str, Sequence[str]] | Callable[[Request], str], tokenizer: Any) -> None:
        self.answers = answers
        self.tokenizer = tokenizer
        self.requests: list[Request] = []
        self._next: dict[str, int] = {}

    def __repr__(self) -> str:
        names = ", ".join(self.answers) if isinstance(self.answers, Mapping) else "a function"
        return f"<ScriptedEngine: {names}>"

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """One completion per request. Raises ConfigError for an adapter that has no answers."""
        return [self._complete(request) for request in requests]

    def _complete(self, request: Request) -> Completion:
        self.requests.append(request)
        text = clean_text(self._answer(request))  # a tokenizer takes no half of a surrogate pair
        ids = list(self.tokenizer.encode(text, add_special_tokens=False))
        stop: Stop = "eos"
        if self.tokenizer.eos_token_id is not None:
            ids.append(int(self.tokenizer.eos_token_id))
        limit = request.sampling.max_new_tokens
        if len(ids) > limit:
            ids, stop = ids[:limit], "length"
            text = answer_text(self.tokenizer, ids, ())
        return Completion(ids=ids, logprobs=[0.0] * len(ids), stop=stop, text=text, adapter_version=0)

    def _answer(self, request: Request) -> str:
        if not isinstance(self.answers, Mapping):
            return self.answers(request)
        name = request.adapter or ""
        texts = self.answers.get(name)
        if not texts:
            known = ", ".join(self.answers) or "none"
            raise ConfigError(f"found a request for adapter {name!r}, expected one that has scripted answers: {known}")
        place = self._next.get(name, 0)
        self._next[name] = place + 1
        return texts[place % len(texts)]
