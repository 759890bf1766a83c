"""Chat templates that do not end for one kind of chat only."""

import pytest

from mafrt.core.errors import EnvError, ModelError
from mafrt.models import bounded_template
from mafrt.rollout import prompts


class Template:
    chat_template = "any"

    def __init__(self, hangs):
        self.hangs = hangs

    def apply_chat_template(self, messages, tools, add_generation_prompt, tokenize):
        while self.hangs({each["role"] for each in messages}, tools, add_generation_prompt):
            pass


HANGS = {
    "system": lambda roles, tools, asked: "system" in roles,
    "tools": lambda roles, tools, asked: tools,
    "tool": lambda roles, tools, asked: "tool" in roles,
    "no answer asked for": lambda roles, tools, asked: not asked,
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", HANGS)
def test_one_that_hangs_for_one_kind_of_chat_is_refused(kind, monkeypatch):
    monkeypatch.setattr(bounded_template, "TEMPLATE_CPU_S", 1)
    with pytest.raises(ModelError, match="does not end"):
        bounded_template.check_template_ends("base", Template(HANGS[kind]))


def test_one_that_ends_is_taken():
    bounded_template.check_template_ends("base", Template(lambda *_: False))


@pytest.mark.parametrize("error", [OverflowError, ZeroDivisionError, RecursionError, MemoryError, IndexError])
def test_whatever_a_template_raises_at_one_chat_is_told_of_that_chat(error):
    class Raises(Template):
        def apply_chat_template(self, messages, **_):
            raise error("of a template")

    for messages in ([{"role": "user", "content": "a"}], [{"role": "tool", "content": "a"}]):
        with pytest.raises(EnvError, match=f"refuses the messages {messages[0]['role'].replace('tool', 'user')}"):
            prompts._with_tool_messages(Raises(None), messages)
