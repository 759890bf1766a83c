"""Checkpoints of other kinds: what is refused before weights are loaded, and models that read images too."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path

import pytest
import torch
from helpers_families import VOCAB, small, tiny
from helpers_models import tiny_base, tiny_model, tiny_tokenizer
from safetensors.torch import load_file

from mafrt.config.agent import LoraSpec
from mafrt.core.errors import CheckpointError, ConfigError, ModelError
from mafrt.core.shipped import TEACHING_BASE
from mafrt.models.bounded_trial import check_tokenizer_ends
from mafrt.models.memory_estimate import model_shape
from mafrt.models.multi_lora import decoder_blocks
from mafrt.models.shared_base import SharedBase
from mafrt.scripts.exporting.merged import check_mergeable

pytestmark = pytest.mark.takes(fast=7, slow=12)

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
        ({"model_type": "qwen3_omni_moe", "architectures": ["Qwen3OmniMoeForConditionalGeneration"]},
         ("several models in one", "qwen3_omni_moe_thinker")),
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
        (LLAMA | {"quantization_config": {"bits": 4}}, ("no method named", "gradient")),
        (LLAMA | {"quantization": {"group_size": 64, "bits": 4}}, ("no method named", "gradient")),  # MLX
        (LLAMA | {"compression_config": {"quant_method": "compressed-tensors"}}, ("compressed-tensors", "gradient")),
        ({"model_type": "qwen3_vl", "text_config": GPTQ}, ("gptq", "gradient")),
        ({"model_type": "chatglm", "auto_map": {"AutoModel": "m.M"}}, ("code of its own", "AutoModelForCausalLM")),
        (LLAMA | {"model_type": 5}, ("model_type", "5", "a name")),
        (LLAMA | {"quantization_config": [1]}, ("quantization_config", "[1]", "an object")),
        (LLAMA | {"architectures": "LlamaForCausalLM"}, ("architectures", "LlamaForCausalLM", "a list of names")),
        (LLAMA | {"architectures": [3]}, ("architectures", "[3]", "a list of names")),
        (LLAMA | {"auto_map": ["x"]}, ("auto_map", "['x']", "an object")),
        (LLAMA | {"_attn_implementation": "owner/kernel"}, ("owner/kernel", "--trust_remote_code")),
        (LLAMA | {"attn_implementation": "owner/kernel@main:f"}, ("owner/kernel@main:f", "--trust_remote_code")),
        (LLAMA | {"attn_implementation": {"text_config": "owner/kernel"}}, ("owner/kernel", "--trust_remote_code")),
        (LLAMA | {"text_config": {"_attn_implementation_internal": "paged|owner/kernel"}}, ("owner/kernel",)),
        (LLAMA | {"x": [{"experts_implementation": "owner/kernel"}]}, ("owner/kernel", "--trust_remote_code")),
        (LLAMA | {"num_attention_heads": "four"}, ("cannot be loaded", "num_attention_heads", "TypeError")),
        (LLAMA | {"tie_word_embeddings": "maybe"}, ("cannot be loaded", "tie_word_embeddings", "expected bool")),
        (LLAMA | {"num_hidden_layers": -1}, ("no weights",)),
        ([], ("config.json", "no JSON object")),
    ],
)  # fmt: skip
def test_other_kinds_are_refused_in_a_sentence(config, words, tmp_path):
    with pytest.raises(ModelError) as caught:
        SharedBase.load(folder_of(tmp_path, config), device="cpu")
    said = str(caught.value)
    assert all(word in said for word in words) and "\n" not in said and str(tmp_path) in said


def checkpoint(folder, change):
    """A tiny model whose tensors, by name, were changed after it was saved."""
    from safetensors.torch import load_file, save_file

    tiny_model("llama").save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    save_file(change(load_file(folder / "model.safetensors")), folder / "model.safetensors", metadata={"format": "pt"})
    return str(folder)


def test_a_base_that_computes_no_numbers_is_refused_as_such(tmp_path):
    folder = Path(checkpoint(tmp_path, dict))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"rms_norm_eps": float("nan")}))
    with pytest.raises(ModelError, match="computes what is no number"):
        SharedBase.load(str(folder), device="cpu")


def test_a_tokenizer_with_code_of_its_own_names_the_flag(tmp_path):
    folder = checkpoint(tmp_path, dict)
    file = tmp_path / "tokenizer_config.json"
    settings = {"tokenizer_class": "Ours", "auto_map": {"AutoTokenizer": ["tokenization_ours.Ours", None]}}
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))
    with pytest.raises(ModelError, match=r"tokenizer.*--trust_remote_code"):
        SharedBase.load(folder, device="cpu")


def test_a_base_with_code_of_its_own_is_not_merged(tmp_path):
    folder = folder_of(tmp_path, {"model_type": "ours", "auto_map": {"AutoConfig": "configuration_ours.Ours"}})
    with pytest.raises(ConfigError, match=r"code of its own.*leave merged out"):
        check_mergeable([folder], {})


LAYER = "model.layers.0.mlp.up_proj"


@pytest.mark.parametrize(("change", "words"), [
    (lambda own: own | {f"{LAYER}.weight_scale_inv": torch.ones(1, 1)}, (f"{LAYER}.weight_scale_inv", "bfloat16")),
    (lambda own: own | {f"{LAYER}.bias": torch.ones(64)}, (f"{LAYER}.bias",)),
    (lambda own: own | {f"{LAYER}.weight": own[f"{LAYER}.weight"][:, ::2].contiguous()},
     (f"{LAYER}.weight", "[64, 16]", "[64, 32]")),
    *((lambda own, part=part: {key: each for key, each in own.items() if key != f"{LAYER}.weight"} | {
        f"{LAYER}.{part}": torch.ones(4, 64, dtype=torch.int32)}, (f"{LAYER}.{part}", "quantised", "bfloat16"))
      for part in ("qweight", "weight_packed", "W_q", "weight._data")),  # no weight of that name is left
])  # fmt: skip
def test_layers_saved_in_another_form_are_refused_by_name(change, words, tmp_path):
    with pytest.raises(ModelError) as caught:
        SharedBase.load(checkpoint(tmp_path, change), device="cpu")
    assert all(word in str(caught.value) for word in words)


def test_parts_that_the_model_does_not_have_are_named(tmp_path, caplog):
    folder = checkpoint(tmp_path, lambda own: own | {"score.weight": torch.ones(1, 32)})
    SharedBase.load(folder, device="cpu")
    assert "score.weight" in caplog.text and "LlamaForCausalLM" in caplog.text


@pytest.mark.parametrize(
    ("config", "word"), [(LLAMA | GPTQ, "gptq"), ({"model_type": "t5", "is_encoder_decoder": True}, "encoder-decoder")]
)
def test_no_memory_is_estimated_of_what_cannot_be_trained(config, word, tmp_path):
    with pytest.raises(ModelError, match=word):
        model_shape(folder_of(tmp_path, config))


@pytest.mark.parametrize("kind", ["llama", "ours"])
def test_code_of_its_own_trains_through_quantised_weights_no_more_than_ours(kind, tmp_path):
    folder = folder_of(tmp_path, {**LLAMA, **GPTQ, "model_type": kind, "auto_map": {"AutoModelForCausalLM": "m.M"}})
    with pytest.raises(ModelError, match=r"quantised \(gptq\).*gradient"):
        SharedBase.load(folder, device="cpu", trust_remote_code=True)


@pytest.mark.parametrize("method", ["fp8", "mxfp4", "gptq"])
def test_quantised_weights_are_not_quantised_again(method, tmp_path):
    config = LLAMA | {"quantization_config": {"quant_method": method}}
    with pytest.raises(ModelError, match=f"quantised already .{method}.*load_in_4bit"):
        SharedBase.load(folder_of(tmp_path, config), device="cpu", bits=4)


@pytest.mark.parametrize("kind", ["int8", "uint8", "bool", "complex64", "float8_e8m0fnu"])
def test_weights_of_no_real_numbers_are_refused_where_nothing_says_how_to_read_them(kind, tmp_path):
    from safetensors.torch import load_file, save_file

    folder = tmp_path / "base"
    tiny_model("llama").save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    weights, name = load_file(folder / "model.safetensors"), "model.layers.0.self_attn.q_proj.weight"
    weights[name] = weights[name].abs().to(getattr(torch, kind))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=f"has {name} in numbers of type .*; expected bfloat16"):
        SharedBase.load(str(folder), device="cpu")


def test_a_package_that_a_class_needs_is_named():
    from mafrt.models.pretrained import _told

    said = "\nTimmWrapperModel requires the timm library but it was not found in your environment. You can install it"
    with (
        pytest.raises(ModelError, match=r"^the model 'x' needs the package timm.*pip install timm"),
        _told("x", trust_remote_code=False),
    ):
        raise ImportError(said)


def test_an_adapter_is_no_model(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ModelError, match=r"holds an adapter.*--model_name_or_path"):
        SharedBase.load(str(tmp_path), device="cpu")


@pytest.mark.slow
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
    """A tiny random checkpoint of a class that reads images or sound too."""
    from transformers import AutoConfig, AutoModelForMultimodalLM

    first = AutoConfig.for_model(kind)
    config = type(first)(**small(first))
    torch.manual_seed(0)
    model = AutoModelForMultimodalLM.from_config(config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.mul_(3.0)
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen3_5", "gemma3", "gemma4", "qwen3_5_moe", "voxtral", "qwen2_audio"])
def test_the_text_of_a_model_that_reads_images_is_trained_and_goes_home_to_its_class(kind, tmp_path):
    from peft import PeftModel
    from transformers import AutoModelForMultimodalLM

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
    whole = AutoModelForMultimodalLM.from_pretrained(tmp_path / "base", dtype="float32")
    with torch.no_grad():
        expected = PeftModel.from_pretrained(whole, tmp_path / "a").eval()(input_ids=ids).logits.log_softmax(-1)
    assert (found - expected).abs().max() < 1e-4 < (found - bare).abs().max()
    base.save_adapter("a", tmp_path / "again")
    again = SharedBase.load(str(tmp_path / "base"), device="cpu", dtype="float32")
    again.load_adapter("a", tmp_path / "again")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gemma3", "qwen3_5", "llava"])
def test_names_of_layers_mean_those_that_text_passes_and_not_those_of_towers(kind, tmp_path, caplog):
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForMultimodalLM

    base = SharedBase.load(with_images(kind, tmp_path / "base"), device="cpu", dtype="float32")
    for number, targets in enumerate((("q_proj", "v_proj"), (".*[qv]_proj",))):
        base.add_adapter(f"a{number}", LoraSpec(targets=targets), seed=0)
        assert all("language_model." in path for path in base.adapter_layers(f"a{number}"))
    tower = next(p for p in base.linear_paths() if re.search("vis", p) and p not in base.adaptable())
    with pytest.raises(ConfigError, match=r"no linear layer.* that text passes; expected all-linear, or"):
        base.add_adapter("b", LoraSpec(targets=(tower,)), seed=0)
    whole = AutoModelForMultimodalLM.from_pretrained(tmp_path / "base", dtype="float32")
    found = get_peft_model(whole, LoraConfig(target_modules=["q_proj", tower], init_lora_weights=False)).eval()
    found.save_pretrained(tmp_path / "theirs")
    base.load_adapter("theirs", tmp_path / "theirs")
    assert f"text never passes {tower.rsplit('.', 1)[-1]}" in caplog.text
    ids = torch.randint(5, VOCAB, (2, 9))
    with torch.no_grad():
        ours = base.logits(base.forward(ids, None, torch.full((2,), base.adapter_index("theirs"))))
        assert (ours.log_softmax(-1) - found(input_ids=ids).logits.log_softmax(-1)).abs().max() < 1e-4


def text_alone(folder, target):
    """The text of a checkpoint that reads images too, saved as a model of its class for text."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    whole = AutoModelForImageTextToText.from_pretrained(folder, dtype="float32")
    body = getattr(whole, "model", whole).language_model
    text = AutoModelForCausalLM.from_config(whole.config.get_text_config()).float()
    text.model.load_state_dict(getattr(body, "model", body).state_dict())
    text.get_output_embeddings().load_state_dict(whole.get_output_embeddings().state_dict())
    text.config.architectures = [type(text).__name__]
    text.save_pretrained(target)
    tiny_tokenizer().save_pretrained(target)
    return str(target)


def trained(base, ids):
    """A random adapter `a`; log-probabilities with it, and with adapter number `k`."""
    base.add_adapter("a", LoraSpec(), seed=0)
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for _, b in base.adapter_layers("a").values():
            b.copy_(0.1 * torch.randn(b.shape, generator=draw))
    base.bump("a")

    @torch.no_grad()
    def logprobs(k=0):
        return base.logits(base.forward(ids, None, torch.full((len(ids),), k))).float().log_softmax(-1)

    return logprobs


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen3_5", "qwen3_5_moe", "gemma3", "gemma4", "mistral3", "llava", "llama4"])
def test_an_adapter_of_the_class_that_reads_images_acts_in_the_class_for_text_and_back(kind, tmp_path):
    whole = SharedBase.load(with_images(kind, tmp_path / "whole"), device="cpu", dtype="float32")
    text = SharedBase.load(text_alone(tmp_path / "whole", tmp_path / "text"), device="cpu", dtype="float32")
    assert type(whole.model).__name__.endswith("ForConditionalGeneration")
    assert type(text.model).__name__.endswith("ForCausalLM")
    ids = torch.randint(5, VOCAB, (2, 9))
    in_whole, in_text = trained(whole, ids), trained(text, ids)
    whole.save_adapter("a", tmp_path / "of_whole")
    text.save_adapter("a", tmp_path / "of_text")
    text.load_adapter("b", tmp_path / "of_whole")
    whole.load_adapter("b", tmp_path / "of_text")
    assert (in_text(1) - in_whole(0)).abs().max() < 1e-4 < (in_text(0) - in_text(-1)).abs().max()
    assert (in_whole(1) - in_text(0)).abs().max() < 1e-4


def of_another_class(folder, target, begin, **more):
    """An adapter's folder under other names of its layers."""
    from safetensors.torch import load_file, save_file

    target.mkdir()
    weights = {key.replace("base_model.model.model.", f"base_model.model.{begin}"): w.contiguous()
               for key, w in load_file(folder / "adapter_model.safetensors").items()}  # fmt: skip
    save_file(weights | {key: torch.zeros(4, 4) for key in more.pop("keys", ())}, target / "adapter_model.safetensors")
    config = json.loads((folder / "adapter_config.json").read_text()) | more
    (target / "adapter_config.json").write_text(json.dumps(config))
    return target


@pytest.mark.parametrize("begin", ["model.language_model.", "language_model.model.", "thinker.model.", ""])
def test_layers_of_other_names_are_the_same_layers(begin, tmp_path):
    base, ids = tiny_base("llama"), torch.randint(5, VOCAB, (2, 9))
    logprobs = trained(base, ids)
    base.save_adapter("a", tmp_path / "a")
    layer = f"{begin}layers.1.mlp.up_proj"
    base.load_adapter("b", of_another_class(tmp_path / "a", tmp_path / "b", begin))
    assert torch.equal(logprobs(0), logprobs(1))
    # Settings of single layers name them as the folder does.
    single = of_another_class(tmp_path / "a", tmp_path / "c", begin, alpha_pattern={f"^{re.escape(layer)}$": 64})
    base.load_adapter("c", single)
    scalings = {path: scaling for path, (_, scaling) in base.records["c"].layers.items()}
    assert scalings.pop("model.layers.1.mlp.up_proj") == 8.0 and set(scalings.values()) == {2.0}


@pytest.mark.parametrize(("begin", "keys", "words"), [
    ("model.language_model.", ["model.visual.blocks.0.attn.qkv"], "reads images or sound"),
    ("model.", ["model.vision_tower.encoder.layers.0.self_attn.q_proj"], "reads images or sound"),
    ("model.", ["audio_tower.layers.0.self_attn.q_proj"], "reads images or sound"),
    ("transformer.decoder.", ["lm_head"], "linear layer"),
    ("", ["model.layers.0.mlp.experts.0.up_proj"], "expected LoRA of a linear layer"),
])  # fmt: skip
def test_layers_that_are_not_of_the_text_are_refused_in_a_sentence(begin, keys, words, tmp_path):
    base = tiny_base("llama")
    base.add_adapter("a", LoraSpec(), seed=0)
    base.save_adapter("a", tmp_path / "a")
    keys = [f"base_model.model.{key}.lora_A.weight" for key in keys]
    folder = of_another_class(tmp_path / "a", tmp_path / "b", begin, keys=keys)
    with pytest.raises(CheckpointError, match=words) as caught:
        base.load_adapter("b", folder)
    assert "\n" not in str(caught.value) and "b" not in base.adapters


def test_a_tower_for_images_alone_is_no_text(tmp_path):
    base = tiny_base("llama")
    base.add_adapter("a", LoraSpec(targets=("q_proj",)), seed=0)
    base.save_adapter("a", tmp_path / "a")
    with pytest.raises(CheckpointError, match="reads images or sound"):
        base.load_adapter("b", of_another_class(tmp_path / "a", tmp_path / "b", "vision_tower.encoder."))


@pytest.mark.slow
@pytest.mark.parametrize(("of", "on"), [("qwen3", "qwen3_moe"), ("qwen3_moe", "qwen3"), ("gpt2", "llama"),
                                        ("qwen3_next", "qwen3"), ("qwen3", "glm4_moe")])  # fmt: skip
def test_another_class_with_other_layers_is_refused_in_a_sentence(of, on, tmp_path):
    bases = []
    for kind in (of, on):
        tiny(kind).save_pretrained(tmp_path / kind)
        tiny_tokenizer().save_pretrained(tmp_path / kind)
        bases.append(SharedBase.load(str(tmp_path / kind), device="cpu", dtype="float32"))
    bases[0].add_adapter("a", LoraSpec(), seed=0)
    bases[0].save_adapter("a", tmp_path / "a")
    with pytest.raises(CheckpointError, match="expected LoRA") as caught:
        bases[1].load_adapter("a", tmp_path / "a")
    assert len(str(caught.value)) < 700 and not bases[1].adapters
    assert f"load it on the base it was trained on ({tmp_path / of})" in str(caught.value)


def test_an_adapter_beside_a_model_is_not_taken_in_silence(tmp_path):
    folder = Path(folder_of(tmp_path, LLAMA))
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA", "base_model_name_or_path": "owner/other"}')
    with pytest.raises(ModelError, match=r"its base too.*--load_path"):
        SharedBase.load(str(folder), device="cpu")


LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"


@pytest.mark.slow
@pytest.mark.parametrize(
    "template",
    [
        LOOP,
        "{% if tools %}" + LOOP + "{% endif %}",
        "{% if messages[0].role == 'system' %}" + LOOP + "{% endif %}",
        "{% for a in range(99999) %}{% for b in range(99999) %}{{ a }}{% endfor %}{% endfor %}",
        "{% macro f() %}{% for a in range(9999) %}{{ caller() }}{% endfor %}{% endmacro %}"
        "{% call f() %}{% call f() %}{% for a in range(9999) %}{% endfor %}{% endcall %}{% endcall %}",
        "{{ 'x' * 10 ** 11 }}",
        "{{ '%9000000000d' % 1 }}",
        "{{ ('x' * 10 ** 8).center(10 ** 10) }}",
        "{% set ns = namespace(s='xx') %}{% for a in range(99999) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
        "{% set ns = namespace(s=[1]) %}{% for a in range(99999) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
        "{{ 10 ** (10 ** 10) }}",
    ],
)
def test_a_chat_template_that_does_not_end_is_refused(template, monkeypatch):
    monkeypatch.setattr("mafrt.core.forked_trial.TRIAL_CPU_S", 1)
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    with pytest.raises(ModelError, match="chat template of the model 'mine' does not end"):
        check_tokenizer_ends("mine", tokenizer)


@pytest.mark.parametrize(
    "template",
    [
        None,
        "{{ raise_exception('no') }}",
        "{{ ''.__class__ }}",
        "{% include '/etc/passwd' %}",
        "{% for a in range(999999) %}{% endfor %}",
        "{{ messages.append(1) }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% if",
        "{% for m in messages %}{{ m.content }}{% endfor %}",
    ],
)
def test_a_chat_template_that_ends_is_taken(template):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    check_tokenizer_ends("mine", tokenizer)


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 50_000, "{", "\xff"], ids=["list", "object", "cut", "bytes"])
def test_a_config_that_cannot_be_read_is_one_sentence(tmp_path, text):
    folder = folder_of(tmp_path, {})
    (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(ModelError, match="cannot be loaded"):
        SharedBase.load(folder)


SIZES = [
    {"num_hidden_layers": 10**6},
    {"num_hidden_layers": 10**6, "layer_types": None},
    {"head_dim": 10**7},
    {"hidden_size": 10**9},
    {"vocab_size": 10**11},
    {"num_attention_heads": 10**7, "num_key_value_heads": 10**7},
    {"intermediate_size": 10**8},
    {"head_dim": 1000},
    {"text_config": {"hidden_size": 10**9}},
]


@pytest.mark.parametrize("change", SIZES, ids=str)
def test_a_config_far_larger_than_its_weights_is_refused_before_it_is_laid_out(tmp_path, monkeypatch, change):
    shutil.copytree(TEACHING_BASE, tmp_path / "base")
    config = tmp_path / "base" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | change))
    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", lambda *_, **__: pytest.fail("laid out"))
    with pytest.raises(ModelError, match=f"(?s){'head_dim' if 'head_dim' in change else 'has'}.*its weights are"):
        SharedBase.load(str(tmp_path / "base"))


def test_a_width_that_no_block_has_is_taken(tmp_path):
    tiny("qwen3_moe", intermediate_size=6144).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    SharedBase.load(str(tmp_path), device="cpu")


def test_a_config_no_wider_than_any_tensor_is_compared_as_a_whole(tmp_path):
    head = {"lm_head.weight": {"dtype": "F32", "shape": [60_000, 2], "data_offsets": [0, 480_000]}}
    text = json.dumps(head).encode()
    wide = LLAMA | dict.fromkeys(("vocab_size", "hidden_size", "intermediate_size"), 60_000)
    folder = folder_of(tmp_path, wide | {"num_hidden_layers": 1, "num_attention_heads": 1})
    with open(tmp_path / "model.safetensors", "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + 480_000)
    with pytest.raises(ModelError, match=r"describes [0-9]+ numbers, and its weights are 120000"):
        SharedBase.load(folder)


class Runs:
    """Something that would run on being unpickled."""

    def __reduce__(self):
        return print, ("ran",)


def move_away(file, name):
    """Weights beside the folder, which an index names."""
    index = {"metadata": {}, "weight_map": dict.fromkeys(load_file(file), name)}
    (file.parent / "model.safetensors.index.json").write_text(json.dumps(index))
    file.rename(file.parent.parent / "outside.safetensors")


DAMAGES = {
    "a part above": lambda file: move_away(file, "../outside.safetensors"),
    "a part above a folder": lambda file: move_away(file, "x/../../outside.safetensors"),
    "a part by its whole path": lambda file: move_away(file, str(file.parent.parent / "outside.safetensors")),
    "a pipe": lambda file: (file.unlink(), os.mkfifo(file)),
    "a device": lambda file: (file.unlink(), file.symlink_to("/dev/zero")),
    "a link to nothing": lambda file: (file.unlink(), file.symlink_to("nowhere")),
    "none": lambda file: file.unlink(),
    "cut": lambda file: file.write_bytes(file.read_bytes()[:-100]),
    "longer": lambda file: file.write_bytes(file.read_bytes() + b"0"),
    "empty": lambda file: file.write_bytes(b""),
    "a header of 10^18 bytes": lambda file: file.write_bytes((10**18).to_bytes(8, "little")),
    "a header that is a list": lambda file: file.write_bytes((2).to_bytes(8, "little") + b"[]"),
    "a part missing": lambda file: (file.parent / "model.safetensors.index.json").write_text(
        '{"weight_map": {"a": "model-2.safetensors"}}'
    ),
    "an index of another form": lambda file: (file.parent / "model.safetensors.index.json").write_text("[]"),
    "unpickled code": lambda file: (torch.save({"a": Runs()}, file.parent / "pytorch_model.bin"), file.unlink()),
    "no pickle": lambda file: ((file.parent / "pytorch_model.bin").write_bytes(b"x" * 999), file.unlink()),
}  # fmt: skip


@pytest.mark.parametrize("kind", DAMAGES)
def test_weights_that_cannot_be_read_are_refused_before_anything_is_laid_out(kind, tmp_path, monkeypatch, capfd):
    shutil.copytree(TEACHING_BASE, tmp_path / "base")
    DAMAGES[kind](tmp_path / "base" / "model.safetensors")
    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", lambda *_, **__: pytest.fail("laid out"))
    with pytest.raises(ModelError, match=r"safetensors|pytorch_model|weights"):
        SharedBase.load(str(tmp_path / "base"))
    assert "ran" not in capfd.readouterr().out


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize("change", [None, *SIZES[::3]], ids=str)
def test_unpickled_weights_bound_sizes_too(tmp_path, monkeypatch, change, legacy):
    shutil.copytree(TEACHING_BASE, tmp_path / "base")
    weights, config = tmp_path / "base" / "model.safetensors", tmp_path / "base" / "config.json"
    torch.save(load_file(weights), tmp_path / "base" / "pytorch_model.bin", _use_new_zipfile_serialization=not legacy)
    weights.unlink()
    if change is None:
        assert not SharedBase.load(str(tmp_path / "base")).adapters
        return
    config.write_text(json.dumps(json.loads(config.read_text()) | change))
    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", lambda *_, **__: pytest.fail("laid out"))
    with pytest.raises(ModelError, match="its weights are"):
        SharedBase.load(str(tmp_path / "base"))


def test_numbers_that_repeat_do_not_make_weights_larger(tmp_path):
    shutil.copytree(TEACHING_BASE, tmp_path / "base")
    (tmp_path / "base" / "model.safetensors").unlink()
    wide = {f"x.{layer}": torch.zeros(1).expand(10**6, 10**6) for layer in range(9)}
    torch.save(wide, tmp_path / "base" / "pytorch_model.bin")
    config = tmp_path / "base" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"hidden_size": 10**5, "vocab_size": 10**6}))
    with pytest.raises(ModelError, match="its weights are"):
        SharedBase.load(str(tmp_path / "base"))


def test_a_quantisation_of_another_form_is_refused(tmp_path):
    config = {"model_type": "llama", "quantization_config": {"quant_method": ["x"]}}
    with pytest.raises(ModelError, match="is quantised"):
        SharedBase.load(folder_of(tmp_path, config))
