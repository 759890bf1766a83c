"""A base whose files say what no model can have is refused in one sentence, before its weights are loaded."""

from __future__ import annotations

import json

import pytest
from helpers_models import CHAT_TEMPLATE, tiny_model, tiny_tokenizer

from mafrt.core.errors import ModelError
from mafrt.models.shared_base import SharedBase
from mafrt.scripts.export import chat_template


def base_in(folder, change=None, file="config.json", **shape):
    tiny_model(**shape).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    found = json.loads((folder / file).read_text(encoding="utf-8"))
    (folder / file).write_text(json.dumps(found | (change or {})), encoding="utf-8")
    return str(folder)


@pytest.mark.parametrize(("change", "words"), [
    ({"max_position_embeddings": -5}, "-5 as max_position_embeddings.*above 0"),
    ({"max_position_embeddings": 0}, "0 as max_position_embeddings"),
    ({"eos_token_id": 10**9}, "1000000000 as eos_token_id in its config.json"),
    ({"eos_token_id": [1, 101]}, "101 as eos_token_id.*below its 101 tokens"),
    ({"eos_token_id": -1}, "-1 as eos_token_id"),
    ({"dtype": "int8"}, "'int8' as dtype.*float32, bfloat16, float16"),
    ({"dtype": "float8_e4m3fn"}, "'float8_e4m3fn' as dtype"),
    ({"dtype": None, "torch_dtype": "complex64"}, "'complex64' as torch_dtype"),
    ({"num_key_value_heads": 0}, "0 as num_key_value_heads"),
    ({"head_dim": -8}, "-8 as head_dim.*of at least 0"),
    ({"vocab_size": -1}, "-1 as vocab_size"),
    ({"rope_parameters": {"rope_type": "default", "rope_theta": -3.0}}, "-3.0 as rope_theta"),
    ({"rope_parameters": {"rope_type": "linear", "factor": 0, "rope_theta": 1e4}}, "0 as factor"),
])  # fmt: skip
def test_a_value_that_no_model_has_is_named(change, words, tmp_path):
    folder = base_in(tmp_path, change)
    with pytest.raises(ModelError, match=words):
        SharedBase.load(folder, device="cpu")


@pytest.mark.parametrize("end", [10**9, -3, "x", {}, [1, "x"]])
def test_end_tokens_of_the_generation_config_are_tokens(end, tmp_path):
    folder = base_in(tmp_path, {"eos_token_id": end}, "generation_config.json")
    with pytest.raises(ModelError, match=r"as eos_token_id in its generation_config.json"):
        SharedBase.load(folder, device="cpu")


@pytest.mark.parametrize("text", ["{", "[]", '"x"'])
def test_a_generation_config_that_is_none(text, tmp_path):
    folder = base_in(tmp_path)
    (tmp_path / "generation_config.json").write_text(text, encoding="utf-8")
    with pytest.raises(ModelError, match=r"generation_config.json that is no JSON object"):
        SharedBase.load(folder, device="cpu")


def test_a_tokenizer_with_more_tokens_than_the_embedding(tmp_path):
    with pytest.raises(ModelError, match=r"a token of number 100, and its config.json has 50 as vocab_size"):
        SharedBase.load(base_in(tmp_path, vocab_size=50), device="cpu")


@pytest.mark.parametrize("opening", ["'<|turn|>'", "'<|' + 'turn|>'"])
def test_an_added_token_without_a_row_is_refused_where_the_template_writes_it(opening, tmp_path):
    folder, tokenizer = base_in(tmp_path), tiny_tokenizer()
    tokenizer.add_tokens(["<|turn|>"], special_tokens=True)
    tokenizer.save_pretrained(folder)
    SharedBase.load(folder, device="cpu")
    tokenizer.chat_template = CHAT_TEMPLATE.replace("<|im_start|>", "{{ " + opening + " }}")
    tokenizer.save_pretrained(folder)
    with pytest.raises(ModelError, match=r"a token of number 101, and its config.json has 101 as vocab_size"):
        SharedBase.load(folder, device="cpu")


def test_a_chat_template_is_read_where_processors_keep_it_and_a_lack_is_told(tmp_path, caplog):
    folder = base_in(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    assert SharedBase.load(folder, device="cpu").tokenizer.chat_template is None and chat_template(folder) is None
    assert any("has no chat template" in line for line in caplog.messages)
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": CHAT_TEMPLATE}), encoding="utf-8")
    caplog.clear()
    assert SharedBase.load(folder, device="cpu").tokenizer.chat_template == chat_template(folder) == CHAT_TEMPLATE
    assert not caplog.messages
    (tmp_path / "chat_template.json").write_text("[]", encoding="utf-8")
    with pytest.raises(ModelError, match="cannot be loaded"):
        SharedBase.load(folder, device="cpu")


def test_of_chat_templates_with_names_the_default_is_taken_home(tmp_path):
    folder, tokenizer = base_in(tmp_path), tiny_tokenizer()
    tokenizer.chat_template = {"default": CHAT_TEMPLATE, "tool_use": "{{ tools }}"}
    tokenizer.save_pretrained(folder)
    assert chat_template(folder) == CHAT_TEMPLATE


def test_a_tokenizer_without_its_settings_that_makes_tokens_of_its_own(tmp_path):
    folder = base_in(tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    with pytest.raises(ModelError, match="101 as eos_token_id in its tokenizer"):
        SharedBase.load(folder, device="cpu")


@pytest.mark.parametrize("change", [
    {"eos_token_id": None}, {"eos_token_id": [1, 3]}, {"pad_token_id": -1}, {"bos_token_id": 10**9},
    {"dtype": "float16"}, {"max_position_embeddings": 10**9}, {"sliding_window": 0}, {"text_config": None},
    {"torch_dtype": "torch.float32"},
])  # fmt: skip
def test_values_that_models_have_are_taken(change, tmp_path):
    SharedBase.load(base_in(tmp_path, change), device="cpu")


def test_an_index_of_weights_that_cannot_be_read_is_told_as_such(tmp_path):
    folder = base_in(tmp_path)
    for text in ("{", "[]", "{}", '{"weight_map": {}}'):
        (tmp_path / "model.safetensors.index.json").write_text(text, encoding="utf-8")
        with pytest.raises(ModelError, match="has an index of weights that cannot be read"):
            SharedBase.load(folder, device="cpu")


def test_a_base_without_an_end_token_says_what_ends_its_answers(tmp_path, caplog):
    folder = base_in(tmp_path, {"eos_token_id": None})
    for file, change in (
        ("tokenizer_config.json", {"eos_token": None}),
        ("generation_config.json", {"eos_token_id": None}),
    ):
        found = json.loads((tmp_path / file).read_text(encoding="utf-8"))
        (tmp_path / file).write_text(json.dumps(found | change), encoding="utf-8")
    SharedBase.load(folder, device="cpu")
    assert any("answers end at --max_new_tokens only" in record.getMessage() for record in caplog.records)
