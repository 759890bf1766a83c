"""Checkpoints of other kinds: what is refused before weights are loaded, and models that read images too."""

from __future__ import annotations

import json

import pytest
import torch
from helpers_families import VOCAB, small, tiny
from helpers_models import tiny_tokenizer

from mafrt.config.agent import LoraSpec
from mafrt.core.errors import CheckpointError, ModelError
from mafrt.models.multi_lora import decoder_blocks
from mafrt.models.shared_base import SharedBase

GPTQ = {"quantization_config": {"quant_method": "gptq", "bits": 4}}
LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}


def folder_of(tmp_path, config):
    """A folder without weights: what is refused is refused before they are looked for."""
    tiny_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config))
    return str(tmp_path)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"model_type": "clip", "architectures": ["CLIPModel"]}, ("CLIPModel", "does not write text")),
        ({"model_type": "vit", "architectures": ["ViTForImageClassification"]}, ("next token", "causal")),
        ({"model_type": "bert", "architectures": ["BertForMaskedLM"]}, ("BertForMaskedLM", "next token", "causal")),
        ({"model_type": "qwen2", "architectures": ["Qwen2ForSequenceClassification"]}, ("next token", "causal")),
        ({"model_type": "llama", "architectures": ["LlamaForTokenClassification"]}, ("next token", "causal")),
        ({"model_type": "t5", "architectures": ["T5ForConditionalGeneration"], "is_encoder_decoder": True},
         ("encoder-decoder", "T5ForConditionalGeneration", "causal")),
        ({"model_type": "bart", "architectures": ["BartForConditionalGeneration"], "is_encoder_decoder": True},
         ("encoder-decoder", "causal")),
        ({"model_type": "whisper", "architectures": ["WhisperForConditionalGeneration"], "is_encoder_decoder": True},
         ("encoder-decoder", "causal")),
        ({"model_type": "mt5"}, ("encoder-decoder", "causal")),
        ({"model_type": "ours", "auto_map": {"AutoModelForCausalLM": "modeling_ours.Ours"}},
         ("modeling_ours.Ours", "--trust_remote_code")),
        ({"model_type": "of_next_year", "architectures": ["NextForCausalLM"]}, ("does not know", "upgrade")),
        (LLAMA | GPTQ, ("gptq", "gradient", "bfloat16", "--load_in_4bit")),
        (LLAMA | {"quantization_config": {"quant_method": "awq"}}, ("awq", "gradient", "bfloat16")),
        (LLAMA | {"quantization_config": {"quant_method": "compressed-tensors"}}, ("compressed-tensors", "gradient")),
        (LLAMA | {"quantization_config": {"quant_method": "hqq"}}, ("hqq", "gradient")),
        (LLAMA | {"quantization_config": [1]}, ("quantization_config", "[1]", "an object")),
        (LLAMA | {"architectures": "LlamaForCausalLM"}, ("architectures", "LlamaForCausalLM", "a list of names")),
        (LLAMA | {"architectures": [3]}, ("architectures", "[3]", "a list of names")),
        (LLAMA | {"auto_map": ["x"]}, ("auto_map", "['x']", "an object")),
        (LLAMA | {"num_attention_heads": "four"}, ("cannot be loaded", "num_attention_heads")),
        (LLAMA | {"num_hidden_layers": -1}, ("cannot be loaded",)),
        ([], ("config.json", "list", "a JSON object")),
    ],
)  # fmt: skip
def test_other_kinds_are_refused_in_a_sentence(config, words, tmp_path):
    with pytest.raises(ModelError) as caught:
        SharedBase.load(folder_of(tmp_path, config), device="cpu")
    said = str(caught.value)
    assert all(word in said for word in words) and "\n" not in said and str(tmp_path) in said


@pytest.mark.parametrize("method", ["fp8", "mxfp4", "gptq"])
def test_quantised_weights_are_not_quantised_again(method, tmp_path):
    config = LLAMA | {"quantization_config": {"quant_method": method}}
    with pytest.raises(ModelError, match=f"quantised already .{method}.*load_in_4bit"):
        SharedBase.load(folder_of(tmp_path, config), device="cpu", bits=4)


def test_an_adapter_is_no_model(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ModelError, match=r"holds an adapter.*--model_name_or_path"):
        SharedBase.load(str(tmp_path), device="cpu")


def test_a_checkpoint_in_mxfp4_is_loaded_in_ordinary_numbers(tmp_path, caplog):
    """As gpt-oss is published: experts as blocks of 32 numbers of 4 bits with a scale of 8 bits."""
    from safetensors.torch import load_file, save_file

    model = tiny("gpt_oss")
    model.save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    weights, draw = load_file(tmp_path / "model.safetensors"), torch.Generator().manual_seed(0)
    for path in [path for path in weights if path.endswith(("gate_up_proj", "down_proj"))]:
        experts, inner, outer = weights.pop(path).shape
        blocks = torch.randint(0, 256, (experts, outer, inner // 32, 16), generator=draw, dtype=torch.uint8)
        scales = torch.randint(124, 127, (experts, outer, inner // 32), generator=draw, dtype=torch.uint8)
        weights |= {f"{path}_blocks": blocks, f"{path}_scales": scales}
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    base = SharedBase.load(str(tmp_path), device="cpu", dtype="float32")
    assert "mxfp4" in caplog.text and not base.quantised
    experts = base.model.get_submodule("model.layers.0.mlp.experts")
    assert experts.gate_up_proj.dtype == torch.float32 and experts.gate_up_proj.shape == (4, 64, 192)
    base.add_adapter("a", LoraSpec(), seed=0)
    assert any(path.endswith("experts.gate_up_proj") for path in base.adapter_layers("a"))
    base.forward(torch.tensor([[5, 6, 7]]), None, torch.tensor([0])).sum().backward()
    assert all(p.grad is not None for p in base.adapter_parameters("a"))


def with_images(kind, folder):
    """A tiny random checkpoint of a class that reads images too."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    first = AutoConfig.for_model(kind)
    config = type(first)(**small(first))
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.mul_(3.0)
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen3_5", "gemma3", "gemma4", "qwen3_5_moe"])
def test_the_text_of_a_model_that_reads_images_is_trained_and_goes_home_to_its_class(kind, tmp_path):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    base = SharedBase.load(with_images(kind, tmp_path / "base"), device="cpu", dtype="float32")
    assert type(base.model).__name__.endswith("ForConditionalGeneration")
    base.add_adapter("a", LoraSpec(), seed=0)
    assert all(path.startswith("model.language_model.") for path in base.adapter_layers("a"))
    assert len(decoder_blocks(base.inner)) == 4
    ids, draw = torch.randint(5, VOCAB, (2, 9)), torch.Generator().manual_seed(0)
    bare = base.logits(base.forward(ids, None, torch.tensor([-1, -1]))).log_softmax(-1).detach()
    with torch.no_grad():
        for _, b in base.adapter_layers("a").values():
            b.copy_(0.1 * torch.randn(b.shape, generator=draw))
        base.bump("a")
    found = base.logits(base.forward(ids, None, torch.tensor([0, 0]))).float().log_softmax(-1)
    found[0, 1, 7].backward()
    assert any(p.grad.abs().max() > 0 for p in base.adapter_parameters("a"))
    base.save_adapter("a", tmp_path / "a")
    whole = AutoModelForImageTextToText.from_pretrained(tmp_path / "base", dtype="float32")
    with torch.no_grad():
        expected = PeftModel.from_pretrained(whole, tmp_path / "a").eval()(input_ids=ids).logits.log_softmax(-1)
    assert (found - expected).abs().max() < 1e-4 < (found - bare).abs().max()
    base.save_adapter("a", tmp_path / "again")
    again = SharedBase.load(str(tmp_path / "base"), device="cpu", dtype="float32")
    again.load_adapter("a", tmp_path / "again")
    if kind == "qwen3_5":  # a folder of the class of text alone calls the same layers otherwise
        AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype="float32").save_pretrained(tmp_path / "text")
        tiny_tokenizer().save_pretrained(tmp_path / "text")
        text = SharedBase.load(str(tmp_path / "text"), device="cpu", dtype="float32")
        assert type(text.model).__name__ == "Qwen3_5ForCausalLM"
        with pytest.raises(CheckpointError, match=r"is called base_model\.model\.model\.layers.*class of this base"):
            text.load_adapter("a", tmp_path / "a")
        text.add_adapter("a", LoraSpec(), seed=0)
        text.save_adapter("a", tmp_path / "other")
        with pytest.raises(CheckpointError, match=r"is called base_model\.model\.model\.language_model"):
            SharedBase.load(str(tmp_path / "base"), device="cpu").load_adapter("b", tmp_path / "other")
