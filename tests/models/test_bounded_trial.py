"""Chat templates and tokenizers that do not end, for one kind of chat or text only."""

import json
import shutil

import pytest
from safetensors.torch import load_file, save_file

from mafrt.core import forked_trial
from mafrt.core.errors import EnvError, ModelError
from mafrt.core.shipped import TEACHING_BASE
from mafrt.models import bounded_trial
from mafrt.models.pretrained import check_base
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
@pytest.mark.ci
@pytest.mark.parametrize("kind", HANGS)
def test_one_that_hangs_for_one_kind_of_chat_is_refused(kind, monkeypatch):
    monkeypatch.setattr(forked_trial, "TRIAL_CPU_S", 1)
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


@pytest.mark.cases(5)
@pytest.mark.parametrize("kind", TOKENIZERS)
def test_a_tokenizer_that_does_not_end_is_refused(kind, tmp_path, monkeypatch):
    monkeypatch.setattr(forked_trial, "TRIAL_MIB", 64)
    monkeypatch.setattr(forked_trial, "TRIAL_CPU_S", 1)
    shutil.copytree(TEACHING_BASE, tmp_path / "base")
    file = tmp_path / "base" / "tokenizer.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | TOKENIZERS[kind]))
    with pytest.raises(ModelError, match=r"tokenizer of the model .* does not end"):
        SharedBase.load(str(tmp_path / "base"))


def vocab_id(folder, number):
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text())
    content["model"]["vocab"]["x y"] = number
    file.write_text(json.dumps(content))


def added_id(folder, number):
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text())
    content["added_tokens"].append({**content["added_tokens"][-1], "id": number, "content": "<|x|>"})
    file.write_text(json.dumps(content))


def decoder_id(folder, number):
    file = folder / "tokenizer_config.json"
    content = json.loads(file.read_text()) | {"added_tokens_decoder": {str(number): {"content": "<|x|>"}}}
    file.write_text(json.dumps(content))


def named_twice(folder, number):
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text())
    content["model"]["vocab"]["x y"] = number
    file.write_text('{"model": {}, ' + json.dumps(content)[1:])


IDS = {
    "vocabulary": vocab_id,
    "added": added_id,
    "config": decoder_id,
    "named twice": named_twice,
    "a file of its own": lambda folder, number: (folder / "vocab.json").write_text(json.dumps({"x": number})),
    "added, of its own": lambda folder, number: (folder / "added_tokens.json").write_text(json.dumps({"x": number})),
}


@pytest.mark.parametrize("number", [4 * 10**9, 10**18])
@pytest.mark.parametrize("kind", IDS)
def test_ids_far_beyond_the_embedding_are_refused_before_the_tokenizer_is_laid_out(kind, number, tmp_path, monkeypatch):
    shutil.copytree(TEACHING_BASE, tmp_path / "base")
    IDS[kind](tmp_path / "base", number)
    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", lambda *_, **__: pytest.fail("laid out"))
    with pytest.raises(ModelError, match=f"has a token of id {number} in its .*json"):
        check_base(str(tmp_path / "base"))


def test_a_tokenizer_file_beyond_all_sizes_is_refused(tmp_path):
    shutil.copytree(TEACHING_BASE, tmp_path / "base")
    with open(tmp_path / "base" / "tokenizer.json", "ab") as file:
        file.truncate(65 * 2**20)
    with pytest.raises(ModelError, match=r"has a tokenizer\.json that is larger than 64 MiB"):
        check_base(str(tmp_path / "base"))


@pytest.mark.parametrize("parts", [1, 2])
def test_the_base_of_a_hub_id_is_checked_as_a_folder_is(tmp_path, monkeypatch, parts):
    folder = tmp_path / "models--some--base" / "snapshots" / ("0" * 40)
    shutil.copytree(TEACHING_BASE, folder)
    (tmp_path / "models--some--base" / "refs").mkdir()
    (tmp_path / "models--some--base" / "refs" / "main").write_text("0" * 40)
    monkeypatch.setattr("transformers.utils.hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    if parts == 2:
        tensors = load_file(folder / "model.safetensors")
        names = {key: f"model-0000{1 + number % 2}-of-00002.safetensors" for number, key in enumerate(tensors)}
        for part in set(names.values()):
            save_file({key: tensors[key] for key in names if names[key] == part}, folder / part, {"format": "pt"})
        index = {"metadata": {"total_size": 1}, "weight_map": names}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        (folder / "model.safetensors").unlink()
    check_base("some/base")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 10**6}))
    with pytest.raises(ModelError, match=r"has num_hidden_layers 1000000 in its config\.json"):
        check_base("some/base")
    (folder / "config.json").write_text(json.dumps(config))
    vocab_id(folder, 4 * 10**9)
    with pytest.raises(ModelError, match="has a token of id"):
        check_base("some/base")
