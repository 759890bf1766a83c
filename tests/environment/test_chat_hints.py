"""Fields of the three chat APIs that change no sample: right ones are taken, others refused in a sentence."""

from __future__ import annotations

import pytest

from mafrt.environment.chat_api.completions import COMPLETIONS
from mafrt.environment.chat_api.messages import MESSAGES
from mafrt.environment.chat_api.protocol import ApiError
from mafrt.environment.chat_api.responses import RESPONSES, KeptItems

APIS = {"completions": COMPLETIONS, "responses": RESPONSES, "messages": MESSAGES}
ASKED = [{"role": "user", "content": "2+3?"}]
TOOL = {"name": "add", "parameters": {"type": "object"}}
USE = {"type": "tool_use", "id": "c", "name": "f", "input": {}}
LEAST = {
    "completions": {"model": "a", "messages": ASKED},
    "responses": {"model": "a", "input": ASKED},
    "messages": {"model": "a", "messages": ASKED, "max_tokens": 9},
}
WRONG = {
    "completions": [
        {"verbosity": "loud"}, {"verbosity": 3}, {"reasoning_effort": 7}, {"reasoning_effort": "much"}, {"metadata": 5},
        {"metadata": {"a": 1}}, {"metadata": "a"}, {"store": "yes"}, {"store": 1}, {"user": 5}, {"user": ["a"]},
        {"safety_identifier": {}}, {"service_tier": "gold"}, {"service_tier": 1}, {"prompt_cache_key": 5},
        {"prompt_cache_options": "x"}, {"prompt_cache_retention": "week"}, {"prediction": "x"}, {"prediction": [1]},
        {"stream_options": {"include_usage": "yes"}}, {"stream_options": {"include_obfuscation": 1}}, {"stream": "no"},
        {"parallel_tool_calls": "no"}, {"logprobs": 1}, {"tools": [{"function": {**TOOL, "description": 5}}]},
        {"tools": [{"function": {**TOOL, "parameters": "x"}}]}, {"tools": [{"function": {**TOOL, "strict": "yes"}}]},
        {"messages": [*ASKED, {"role": "tool", "tool_call_id": 5, "content": "x"}]}, {"verbosity": {}},
        {"messages": [*ASKED, {"role": "assistant", "tool_calls": [{"id": 5, "function": {"name": "f"}}]}]},
        {"messages": [*ASKED, {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": 5}}]}]},
    ],
    "responses": [
        {"metadata": [1]}, {"metadata": {"a": []}}, {"store": "no"}, {"user": 5}, {"safety_identifier": 1},
        {"service_tier": ["auto"]}, {"service_tier": "best"}, {"prompt_cache_key": []}, {"prompt_cache_options": 1},
        {"prompt_cache_retention": 24}, {"reasoning": "high"}, {"reasoning": {"effort": 3}}, {"access_programs": "x"},
        {"reasoning": {"effort": "huge"}}, {"reasoning": {"summary": True}}, {"reasoning": {"generate_summary": "x"}},
        {"text": {"verbosity": "loud"}}, {"text": {"verbosity": 1}}, {"text": "short"}, {"max_tool_calls": "2"},
        {"max_tool_calls": 0}, {"max_tool_calls": True}, {"stream_options": {"include_obfuscation": "x"}},
        {"stream_options": 1}, {"prompt_cache_options": {"mode": 5}},
        {"tools": [{"type": "function", **TOOL, "strict": 1}]},
        {"input": [*ASKED, {"type": "function_call_output", "call_id": 5, "output": "x"}]},
        {"input": [*ASKED, {"type": "function_call", "call_id": [], "name": "f", "arguments": "{}"}]},
    ],
    "messages": [
        {"metadata": 5}, {"metadata": {"user_id": 5}}, {"metadata": "u"}, {"service_tier": "fast"}, {"service_tier": 1},
        {"cache_control": "ephemeral"}, {"inference_geo": 5}, {"diagnostics": "all"}, {"output_config": {"effort": 5}},
        {"output_config": {"effort": "huge"}}, {"output_config": "high"},
        {"thinking": {"type": "enabled", "budget_tokens": "x"}},
        {"thinking": {"type": "enabled", "budget_tokens": -1}}, {"tools": [{"name": "f", "input_schema": "x"}]},
        {"tools": [{"name": "f", "input_schema": {}, "description": ["x"]}]}, {"stream": "yes"},
        {"messages": [*ASKED, {"role": "assistant", "content": [{**USE, "id": 5}]}, *ASKED]},
    ],
}  # fmt: skip
RIGHT = {
    "completions": {
        "metadata": {"a": "b"}, "store": True, "user": "u", "safety_identifier": "s", "service_tier": "auto",
        "prompt_cache_key": "k", "prompt_cache_retention": "24h", "reasoning_effort": "minimal", "verbosity": "low",
        "prediction": {"type": "content", "content": "x"}, "stream_options": {"include_usage": True}, "stream": True,
        "tools": [{"type": "function", "function": {**TOOL, "description": "adds", "strict": True}}],
    },
    "responses": {
        "metadata": {}, "store": False, "user": "u", "service_tier": "flex",
        "reasoning": {"effort": "low", "summary": None},
        "text": {"verbosity": "high"}, "max_tool_calls": 3, "prompt_cache_retention": "in_memory",
        "prompt_cache_options": {"mode": "explicit"}, "stream_options": {"include_obfuscation": False},
    },
    "messages": {
        "metadata": {"user_id": None}, "service_tier": "standard_only", "cache_control": {"type": "ephemeral"},
        "output_config": {"effort": "max"}, "thinking": {"type": "enabled", "budget_tokens": 1024},
    },
}  # fmt: skip


def parse(api, more):
    return APIS[api].parse({**LEAST[api], **more}, KeptItems().of("e"))


@pytest.mark.parametrize(("api", "more"), [(api, more) for api, listed in WRONG.items() for more in listed])
def test_a_hint_of_a_wrong_type_is_refused(api, more):
    with pytest.raises(ApiError) as caught:
        parse(api, more)
    said = str(caught.value)
    assert caught.value.status == 400 and "must" in said and "\n" not in said and len(said) < 300


@pytest.mark.parametrize("api", APIS)
def test_hints_of_the_right_type_are_taken_together_and_alone(api):
    assert parse(api, RIGHT[api]).messages
    for name, value in RIGHT[api].items():
        assert parse(api, {name: value}) and parse(api, {name: None}), name
