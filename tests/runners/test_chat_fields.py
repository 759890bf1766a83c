"""Records in other libraries' chats: calls, thoughts and tools in fields of their own are learnt from, not dropped."""

from __future__ import annotations

import json

import pytest

from mafrt.core.errors import DataError
from mafrt.environment.tool_calls import split_calls
from mafrt.runners.offline.dataset import read_answers

CALLS = [
    {"type": "function", "function": {"name": "find", "arguments": {"x": "one"}}},
    {"type": "function", "function": {"name": "look", "arguments": '{"y": 2}'}},
]
TOOLS = [{"type": "function", "function": {"name": "find", "description": "d", "parameters": {"type": "object"}}}]
ASK = {"role": "user", "content": "ask"}


def read(tmp_path, record, fields=("response",)):
    (tmp_path / "records.jsonl").write_text(json.dumps(record), encoding="utf-8")
    [group] = read_answers([tmp_path / "records.jsonl"], fields, None)
    return group


def called(text):
    return [(call.name, call.arguments) for call in split_calls(text, False)[1]]


BOTH = [("find", {"x": "one"}), ("look", {"y": 2})]


@pytest.mark.parametrize("answer", [
    {"role": "assistant", "content": None, "tool_calls": CALLS},
    {"role": "assistant", "tool_calls": CALLS},
    {"role": "assistant", "content": "words", "tool_calls": CALLS[:1], "function_call": CALLS[1]["function"]},
    {"role": "assistant", "content": [{"type": "text", "text": "words"}], "tool_calls": CALLS},
])  # fmt: skip
@pytest.mark.parametrize("layout", ["messages", "completion"])
def test_calls_of_an_answer_are_learnt(answer, layout, tmp_path):
    record = {"messages": [ASK, answer]} if layout == "messages" else {"prompt": [ASK], "completion": [answer]}
    [found] = read(tmp_path, {**record, "tools": TOOLS})
    assert called(found.text) == BOTH and ("words" in found.text) == bool(answer.get("content"))
    assert found.seen[0]["role"] == "tools" and json.loads(found.seen[0]["content"]) == TOOLS


def test_calls_and_thoughts_of_earlier_messages_stand_in_the_prompt(tmp_path):
    said = {"role": "assistant", "content": "", "tool_calls": CALLS, "reasoning_content": "hm"}
    chat = [ASK, said, {"role": "tool", "content": "7"}, {"role": "assistant", "content": "7"}]
    [found] = read(tmp_path, {"messages": chat, "tools": json.dumps(TOOLS)})
    assert called(found.seen[2]["content"]) == BOTH and "hm" in found.seen[2]["content"]
    assert [message["role"] for message in found.seen] == ["tools", "user", "assistant", "tool"]


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking"])
def test_a_thought_is_a_part_of_the_answer(name, tmp_path):
    [found] = read(tmp_path, {"messages": [ASK, {"role": "assistant", "content": "7", name: "hm"}]})
    assert found.text == "<think>\nhm\n</think>\n\n7"


def test_pairs_with_calls_have_the_tools_in_their_prompt(tmp_path):
    sides = {"chosen": [ASK, {"role": "assistant", "tool_calls": CALLS}],
             "rejected": [ASK, {"role": "assistant", "content": "no"}]}  # fmt: skip
    good, bad = read(tmp_path, {**sides, "tools": TOOLS}, ("chosen", "rejected"))
    assert called(good.text) == BOTH and bad.text == "no" and good.seen == bad.seen and good.seen[0]["role"] == "tools"


def test_tools_of_a_prompt_that_is_a_text(tmp_path):
    [found] = read(tmp_path, {"prompt": "ask", "response": "7", "tools": TOOLS})
    assert [message["role"] for message in found.seen] == ["tools", "user"]


@pytest.mark.parametrize(("record", "words"), [
    ({"messages": [ASK, {"role": "assistant", "content": "a", "tool_calls": "find"}]}, "'tool_calls' must be a list"),
    ({"messages": [ASK, {"role": "assistant", "content": "a", "tool_calls": [3]}]}, "must have a 'function'"),
    ({"messages": [ASK, {"role": "assistant", "content": "a", "tool_calls": [{"function": {}}]}]}, "have a 'name'"),
    ({"messages": [ASK, {"role": "assistant", "content": "a", "thinking": 5}]}, "must be a text"),
    ({"messages": [{"role": "user", "content": [{"type": "image"}]}, ASK]}, "images and sound are not supported"),
    ({"messages": [ASK, {"role": "assistant", "content": "a"}], "tools": {"find": 1}}, "'tools' must be a list"),
    ({"messages": [ASK, {"role": "assistant", "content": "a"}], "tools": "find"}, "or that as JSON"),
    ({"messages": [ASK, {"role": "assistant", "content": "a"}], "tools": [7]}, "found int 7"),
])  # fmt: skip
def test_fields_of_a_wrong_form_are_one_sentence(record, words, tmp_path):
    with pytest.raises(DataError, match=f"records.jsonl, line 1: .*{words}"):
        read(tmp_path, record)
