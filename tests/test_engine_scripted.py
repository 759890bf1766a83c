"""The scripted engine does what a model would do with its answers."""

from __future__ import annotations

import pytest
from helpers_models import tiny_tokenizer

from mafrt.core.errors import ConfigError
from mafrt.core.types import Request, SamplingParams
from mafrt.engines.scripted import ScriptedEngine


def request(adapter="solver", limit=32, prompt=(5, 6)):
    return Request(list(prompt), adapter, SamplingParams(max_new_tokens=limit), seed=0)


def test_answers_come_in_order_per_adapter_and_over_again():
    engine = ScriptedEngine({"solver": ["one", "two"], "verifier": ["yes"]}, tiny_tokenizer())
    asked = [request(), request("verifier"), request(), request(), request("verifier")]
    assert [c.text for c in engine.generate(asked)] == ["one", "yes", "two", "one", "yes"]
    assert engine.requests == asked
    assert engine.generate([]) == []


def test_a_completion_holds_the_ids_and_the_end_token():
    tokenizer = tiny_tokenizer()
    (found,) = ScriptedEngine({"solver": ["x = 4"]}, tokenizer).generate([request()])
    assert found.ids == [*tokenizer.encode("x = 4"), tokenizer.eos_token_id]
    assert tokenizer.decode(found.ids, skip_special_tokens=True) == found.text == "x = 4"
    assert found.logprobs == [0.0] * 6
    assert (found.stop, found.adapter_version) == ("eos", 0)


def test_an_answer_longer_than_the_limit_is_cut_like_a_models():
    tokenizer = tiny_tokenizer()
    (found,) = ScriptedEngine({"solver": ["abcdef"]}, tokenizer).generate([request(limit=4)])
    assert (found.ids, found.text, found.stop) == (tokenizer.encode("abcd"), "abcd", "length")


def test_a_function_sees_the_request():
    engine = ScriptedEngine(lambda asked: f"{asked.adapter}:{len(asked.prompt_ids)}", tiny_tokenizer())
    assert [c.text for c in engine.generate([request(prompt=(7, 8, 9)), request(None)])] == ["solver:3", "None:2"]


def test_an_adapter_without_answers_is_an_error_that_says_who_has_some():
    engine = ScriptedEngine({"solver": ["one"], "mute": []}, tiny_tokenizer())
    for name in ("critic", "mute"):
        with pytest.raises(ConfigError, match=f"'{name}'.*solver"):
            engine.generate([request(name)])
