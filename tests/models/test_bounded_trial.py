"""Chat templates and tokenizers that do not end, for one kind of chat or text only."""

import json
import shutil

import pytest

from mafrt.core.errors import EnvError, ModelError
from mafrt.core.shipped import TEACHING_BASE
from mafrt.models import bounded_trial
from mafrt.models.shared_base import SharedBase
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
    monkeypatch.setattr(bounded_trial, "TRIAL_CPU_S", 1)
    with pytest.raises(ModelError, match="does not end"):
        bounded_trial.check_tokenizer_ends("base", Template(HANGS[kind]))


def test_one_that_ends_is_taken():
    bounded_trial.check_tokenizer_ends("base", Template(lambda *_: False))


@pytest.mark.parametrize("error", [OverflowError, ZeroDivisionError, RecursionError, MemoryError, IndexError])
def test_whatever_a_template_raises_at_one_chat_is_told_of_that_chat(error):
    class Raises(Template):
        def apply_chat_template(self, messages, **_):
            raise error("of a template")

    for messages in ([{"role": "user", "content": "a"}], [{"role": "tool", "content": "a"}]):
        with pytest.raises(EnvError, match=f"refuses the messages {messages[0]['role'].replace('tool', 'user')}"):
            prompts._with_tool_messages(Raises(None), messages)


def split(expression):
    made = {"type": "Split", "pattern": {"Regex": expression}, "behavior": "Isolated", "invert": False}
    return {"pre_tokenizer": made}


def replaced(pattern, content):
    return {"normalizer": {"type": "Replace", "pattern": pattern, "content": content}}


TOKENIZERS = {
    "(a+)+$": split("(a+)+$"),
    "over long texts alone": split("a*a*a*a*Q"),
    "of x alone": split("(x+x+)+y"),
    "of spaces": split(r"(\s|\s\s)+Z"),
    "in a look-ahead": split("(?=(a+)+b)a"),
    "in the normalizer": replaced({"Regex": "(z|zz)+y"}, ""),
    "a text that grows": replaced({"String": "a"}, "b" * 10**6),
    "one that grows often": {
        "normalizer": {"type": "Sequence", "normalizers": [replaced({"String": "a"}, "aa")["normalizer"]] * 60}
    },
    "padding without end": {"padding": {"strategy": {"Fixed": 10**11}, "direction": "Right", "pad_to_multiple_of": None,
                            "pad_id": 0, "pad_type_id": 0, "pad_token": "a"}},
}  # fmt: skip


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_a_tokenizer_that_does_not_end_is_refused(kind, tmp_path, monkeypatch):
    monkeypatch.setattr(bounded_trial, "TRIAL_MIB", 64)
    monkeypatch.setattr(bounded_trial, "TRIAL_CPU_S", 1)
    shutil.copytree(TEACHING_BASE, tmp_path / "base")
    file = tmp_path / "base" / "tokenizer.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | TOKENIZERS[kind]))
    with pytest.raises(ModelError, match=r"tokenizer of the model .* does not end"):
        SharedBase.load(str(tmp_path / "base"))
