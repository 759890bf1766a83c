"""Shared by the engines beside the base: requests checked as `LocalEngine` does, answers in one form."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mafrt.core.errors import ConfigError, PromptTooLongError
from mafrt.core.types import Completion, Request, Stop
from mafrt.engines.local.sampler import NonFiniteLogitsError, check_sampling
from mafrt.models.outside_text import answer_text

if TYPE_CHECKING:
    from mafrt.models.shared_base import SharedBase

NO_LOGPROB = -9990.0
"""Servers write a number below this for a log-probability of minus infinity, which JSON lacks."""


def check_requests(base: SharedBase, window: int, requests: Sequence[Request]) -> None:
    """Refuse requests that cannot be sampled, before an engine sees any of it.

    Raises:
        PromptTooLongError: a prompt leaves no room for a token in the context window.
        ConfigError: an unknown adapter, an empty prompt, sampling parameters out of range.
    """
    for place, request in enumerate(requests):
        base.adapter_index(request.adapter)
        check_sampling(request.sampling)
        if request.sampling.stop_ids is not None:
            raise ConfigError(f"request {place}: found stop_ids, which only the local engine takes; use stop texts")
        if request.sampling.schema:
            raise ConfigError(f"request {place}: found a JSON schema, which only the local engine takes; leave it out")
        tokens = len(request.prompt_ids)
        if not tokens:
            raise ConfigError(f"request {place} (adapter {request.adapter!r}): found an empty prompt, expected tokens")
        if tokens + 1 > window:
            raise PromptTooLongError(
                f"request {place} (adapter {request.adapter!r}): found a prompt of {tokens} tokens, expected at most "
                f"{window - 1} (the context window of {window} less one to answer); shorten the agent's observation"
            )


def sampling_words(request: Request, eos: Collection[int], window: int) -> dict[str, Any]:
    """The request's sampling in vLLM's words, the same in process and over HTTP.

    Everything that a model's `generation_config.json` could set is given, so that none of its values is.
    """
    how = request.sampling
    return {
        "temperature": how.temperature,
        "top_p": how.top_p,
        "top_k": how.top_k,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "max_tokens": min(how.max_new_tokens, window - len(request.prompt_ids)),
        "seed": request.seed,
        "stop": list(how.stop),
        "stop_token_ids": sorted(eos),
        "logprobs": 0,
        # Stop strings may be, or hold, the text of a special token.
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
    }


def completion(
    base: SharedBase, request: Request, ids: Sequence[int], logprobs: Sequence[float | None], finish: str | None
) -> Completion:
    """A completion out of vLLM's answer; `finish` is its `finish_reason`.

    Raises NonFiniteLogitsError where a token has no probability.
    """
    tokens = list(ids)
    if request.sampling.temperature == 0:
        values = [0.0] * len(tokens)
    else:
        values = [math.nan if value is None else float(value) for value in logprobs]
    if len(values) != len(tokens) or not all(math.isfinite(value) and value > NO_LOGPROB for value in values):
        raise NonFiniteLogitsError([request.adapter])
    stop: Stop = "eos" if tokens and tokens[-1] in base.eos_ids else "length" if finish == "length" else "stop"
    return Completion(
        ids=tokens,
        logprobs=values,
        stop=stop,
        text=answer_text(base.tokenizer, tokens, base.eos_ids),
        adapter_version=0 if request.adapter is None else base.versions[request.adapter],
    )


def by_adapter(requests: Sequence[Request]) -> Mapping[str | None, list[int]]:
    """Places of the requests of each adapter, equal prompts side by side."""
    places: dict[str | None, list[int]] = {}
    for place in sorted(range(len(requests)), key=lambda place: tuple(requests[place].prompt_ids)):
        places.setdefault(requests[place].adapter, []).append(place)
    return places
