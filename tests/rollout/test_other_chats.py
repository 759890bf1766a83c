"""Chats that a template refuses, or of which it leaves messages out, in a form that it takes whole."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
from helpers_models import tiny_tokenizer

from mafrt.core.errors import EnvError
from mafrt.environment.chat_api.protocol import written_call
from mafrt.rollout.prompts import encode_prompt, fill_prompt

HEAD = "{% if messages[0].role == 'system' %}S:{{ messages[0].content }}\n{% endif %}"
TURNS = "{% for m in messages %}{% if m.role != 'system' %}{{ m.role }}:{{ m.content }}\n{% endif %}{% endfor %}"
PARTS = (
    "{% for m in messages %}{{ m.role }}:{% for p in m.content %}{% if p.type == 'text' %}{{ p.text }}{% endif %}"
    "{% endfor %}\n{% endfor %}"
)
ALTERNATE = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('alternate') }}"
    "{% endif %}{{ m.role }}:{{ m.content }}\n{% endfor %}"
)
FIRST_RAISES = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('first') }}{% endif %}"
    "{{ m.role }}:{{ m.content }}\n{% endfor %}"
)
CALLS = f"{written_call('find', {'x': 'one'}, '')}\n{written_call('look', {'x': 'two'}, '')}"
CHATS = {
    "later system": [("user", "ask"), ("assistant", "say"), ("system", "rule"), ("user", "more")],
    "two systems": [("system", "first"), ("system", "rule"), ("user", "ask")],
    "one side twice": [("user", "ask"), ("assistant", "say"), ("assistant", "again"), ("user", "more"), ("user", "so")],
    "calls": [("user", "ask"), ("assistant", f"words\n{CALLS}"), ("tool", "out1"), ("tool", "out2"), ("user", "more")],
    "system": [("system", "rule"), ("user", "ask"), ("assistant", "say"), ("user", "more")],
}


def speaking(template):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template, tokenizer.bos_token = template, "<s>"
    return tokenizer


def filled(tokenizer, chat):
    return fill_prompt(tokenizer, "", [{"role": role, "content": content} for role, content in chat], "start")[1]


def all_said(text, chat):
    return all(line in text or line.replace('"', '\\"') in text for _, content in chat for line in content.split("\n"))


@pytest.mark.parametrize("name", CHATS)
@pytest.mark.parametrize("template", [HEAD + TURNS, TURNS, PARTS, ALTERNATE, FIRST_RAISES])
def test_nothing_is_left_out(template, name):
    assert all_said(filled(speaking(template), CHATS[name]), CHATS[name])


@pytest.mark.parametrize("name", CHATS)
@pytest.mark.skipif(find_spec("trl") is None, reason="the templates of TRL")
def test_nothing_is_left_out_by_the_templates_of_trl(name):
    import trl

    for file in sorted((Path(trl.__file__).parent / "chat_templates").glob("*.jinja")):
        text = filled(speaking(file.read_text(encoding="utf-8")), CHATS[name])
        assert all_said(text, CHATS[name]), file.name


def test_what_no_form_can_say_is_told_once(caplog):
    tokenizer = speaking(TURNS.replace("{{ m.role }}", "{{ m.role if m.role != 'assistant' else '' }}").replace(
        "{{ m.content }}", "{{ m.content if m.role != 'assistant' else '' }}"))  # fmt: skip
    for _ in range(2):
        assert "more" in filled(tokenizer, CHATS["system"])
    [said] = [record.getMessage() for record in caplog.records if "leaves out" in record.getMessage()]
    assert "what the assistant says: 'say'" in said


def test_a_chat_in_no_form_is_one_sentence():
    with pytest.raises(EnvError, match="refuses the messages assistant, user: alternate"):
        filled(speaking(ALTERNATE), [("assistant", "say"), ("user", "more")])


def test_a_chat_that_a_template_takes_is_as_the_template_writes_it():
    tokenizer = tiny_tokenizer()
    chat = [{"role": role, "content": content} for role, content in CHATS["later system"]]
    ids = encode_prompt(tokenizer, "", chat)
    assert ids == tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=True)["input_ids"]
