"""PEFT folders out and in, and every way in which a folder can be wrong."""

from __future__ import annotations

import json

import pytest
import torch
import transformers
from helpers_families import tiny
from helpers_models import ALL, ATTENTION, add_random_adapter, random_ids, tiny_base, tiny_model, tiny_tokenizer
from safetensors.torch import load as load_bytes
from safetensors.torch import save_file

from mafrt.config.agent import LoraSpec
from mafrt.core import patterns
from mafrt.core.errors import CheckpointError, ConfigError, ModelError
from mafrt.models.peft_format import CONFIG, WEIGHTS
from mafrt.models.shared_base import SharedBase

IDS = random_ids(3, 10)


def logits(base, name):
    with torch.no_grad():
        return base.logits(base.forward(IDS, None, torch.full((3,), base.adapter_index(name))))


def peft_folder(path, *, kind="qwen3", model=None, spread=0.2, **config):
    """A folder that PEFT wrote, with B not zero; returns PEFT's logits."""
    from peft import LoraConfig, get_peft_model

    settings = {"r": 4, "lora_alpha": 8, "target_modules": list(ATTENTION), "task_type": "CAUSAL_LM", **config}
    peft = get_peft_model(model or tiny_model(kind), LoraConfig(**settings)).eval()
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in peft.named_parameters():
            if "lora_B" in name:
                parameter.copy_(spread * torch.randn(parameter.shape, generator=generator))
        peft.save_pretrained(path)
        return peft(input_ids=IDS).logits


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen3", "qwen2", "llama"])
def test_an_exported_adapter_gives_the_same_logits_in_peft(tmp_path, kind):
    from peft import PeftModel

    base = tiny_base(kind)
    add_random_adapter(base, "solver", 3, 10.0, ("q_proj", "up_proj"), seed=1)
    base.save_adapter("solver", tmp_path / "solver")
    assert sorted(p.name for p in (tmp_path / "solver").iterdir()) == [CONFIG, WEIGHTS]
    peft = PeftModel.from_pretrained(tiny_model(kind), str(tmp_path / "solver")).eval()
    with torch.no_grad():
        theirs = peft(input_ids=IDS).logits
    torch.testing.assert_close(logits(base, "solver"), theirs, atol=1e-5, rtol=1e-5)
    assert (theirs - logits(base, None)).abs().max() > 0.01


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"r": 2, "lora_alpha": 3, "target_modules": list(ALL)},
        {"use_rslora": True, "r": 9},
        {"target_modules": r".*layers\.1\..*_proj"},
        {"target_modules": "all-linear"},
        {"rank_pattern": {"q_proj": 6}, "alpha_pattern": {"k_proj": 32, r"layers\.1.*o_proj": 5}},
        {"layers_to_transform": [1]},
        {"lora_dropout": 0.1},
        {"exclude_modules": ["v_proj"]},
    ],
    ids=lambda config: "-".join(config) or "plain",
)
def test_an_adapter_that_peft_trained_gives_the_same_logits_here_and_when_written_again(tmp_path, config):
    from peft import PeftModel

    theirs = peft_folder(tmp_path / "a", **config)
    base = tiny_base()
    base.load_adapter("solver", tmp_path / "a")
    torch.testing.assert_close(logits(base, "solver"), theirs, atol=1e-5, rtol=1e-5)
    assert (theirs - logits(base, None)).abs().max() > 0.001
    base.save_adapter("solver", tmp_path / "b")
    again = PeftModel.from_pretrained(tiny_model(), str(tmp_path / "b")).eval()
    with torch.no_grad():
        torch.testing.assert_close(again(input_ids=IDS).logits, theirs, atol=1e-5, rtol=1e-5)


def test_a_round_trip_is_bit_for_bit_and_keeps_the_parameters_that_an_optimizer_holds(tmp_path):
    base = tiny_base()
    add_random_adapter(base, "solver", seed=1)
    held = base.adapter_parameters("solver")
    before = base.adapter_state("solver")
    base.save_adapter("solver", tmp_path)
    with torch.no_grad():
        for parameter in held:
            parameter.zero_()
    version = base.versions["solver"]
    base.load_adapter("solver", tmp_path)
    after = base.adapter_state("solver")
    assert all(torch.equal(before[key], after[key]) for key in before)
    assert all(a is b for a, b in zip(held, base.adapter_parameters("solver"), strict=True))
    assert base.versions["solver"] == version + 1


def test_state_goes_in_and_out_in_memory():
    base = tiny_base()
    add_random_adapter(base, "solver", seed=1)
    base.add_adapter("twin", LoraSpec(rank=4, alpha=8.0, targets=ALL), seed=2)
    base.load_adapter_state("twin", base.adapter_state("solver"))
    assert torch.equal(logits(base, "twin"), logits(base, "solver"))
    state = base.adapter_state("solver")
    state.pop("base_model.model.model.layers.0.mlp.up_proj.lora_B.weight")
    with pytest.raises(CheckpointError, match=r"lacks .*up_proj\.lora_B"):
        base.load_adapter_state("twin", state)
    base.add_adapter("small", LoraSpec(rank=2, alpha=8.0, targets=ALL), seed=2)
    with pytest.raises(CheckpointError, match=r"shape \[4, .*expected \[2, "):
        base.load_adapter_state("small", base.adapter_state("solver"))


def refusal(base, folder, name="solver"):
    """The message, after checking that it names the folder and that nothing was half added."""
    before = dict(base.adapters)
    with pytest.raises(CheckpointError) as caught:
        base.load_adapter(name, folder)
    message = str(caught.value)
    assert str(folder) in message and ("expected" in message), message
    assert base.adapters == before and "\n" not in message
    return message


def test_a_folder_that_is_missing_or_incomplete(tmp_path):
    base = tiny_base()
    assert "no such folder" in refusal(base, tmp_path / "nowhere")
    peft_folder(tmp_path / "a")
    (tmp_path / "a" / WEIGHTS).unlink()
    assert f"found no {WEIGHTS}" in refusal(base, tmp_path / "a")


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        (CONFIG, b"{", "corrupt"),
        (CONFIG, b"[]", "corrupt"),
        (CONFIG, b"\xff\xfe", "corrupt"),
        (CONFIG, b"{}", "found no 'r'"),
        (CONFIG, b'{"r": "eight", "lora_alpha": 8}', "corrupt"),
        (WEIGHTS, b"", "corrupt"),
        (WEIGHTS, b"garbage" * 50, "corrupt"),
    ],
)
def test_files_with_other_contents(tmp_path, file, content, message):
    peft_folder(tmp_path / "a")
    (tmp_path / "a" / file).write_bytes(content)
    assert message in refusal(tiny_base(), tmp_path / "a")


def test_a_truncated_or_nan_weight_file(tmp_path):
    peft_folder(tmp_path / "a")
    path = tmp_path / "a" / WEIGHTS
    whole = path.read_bytes()
    tensors = load_bytes(whole)
    path.write_bytes(whole[: len(whole) // 2])
    assert "corrupt" in refusal(tiny_base(), tmp_path / "a")
    next(iter(tensors.values()))[0, 0] = float("nan")
    save_file(tensors, path)
    assert "NaN" in refusal(tiny_base(), tmp_path / "a")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"use_dora": True}, "use_dora=True"),
        ({"bias": "all"}, "bias='all'"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"peft_type": "IA3"}, "peft_type='IA3'"),
        ({"init_lora_weights": "pissa"}, "pissa"),
        ({"r": 5}, r"expected \[5, "),
        ({"target_modules": "nothing"}, "weights of model.layers.0"),
        ({"target_modules": r".*\.(q|k|v)_proj"}, "o_proj"),
        ({"target_modules": "^(a+)+$|(.*)*x"}, "weights of model.layers.0|too long"),
        ({"exclude_modules": ["q_proj"]}, "q_proj"),
        ({"exclude_modules": r".*\.0\..*"}, "weights of model.layers.0"),
        ({"target_modules": [*ATTENTION, "up_proj"]}, "found no base_model.model.model.layers.0.mlp.up_proj.lora_A"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_adapters_that_are_not_plain_lora_or_contradict_themselves(tmp_path, change, message):
    import re

    peft_folder(tmp_path / "a")
    path = tmp_path / "a" / CONFIG
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    found = refusal(tiny_base(), tmp_path / "a")
    assert message in found or re.search(message, found)


@pytest.mark.parametrize(
    "change",
    [
        {"target_modules": r".*\.self_attn\.(q|k|v|o)_proj"},
        {"target_modules": r"model\.layers\.\d+\.self_attn\..*"},
        {"target_modules": "all-linear"},
        {"exclude_modules": ["up_proj", "lm_head"]},
        {"exclude_modules": r".*mlp.*"},
    ],
)
def test_targets_may_be_an_expression_and_have_exceptions(tmp_path, change):
    peft_folder(tmp_path / "a")
    path = tmp_path / "a" / CONFIG
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    base = tiny_base()
    base.load_adapter("a", tmp_path / "a")
    assert "a" in base.adapters


def test_a_name_of_a_tensor_is_told_on_one_line(tmp_path):
    peft_folder(tmp_path / "a")
    path = tmp_path / "a" / WEIGHTS
    save_file(load_bytes(path.read_bytes()) | {"a\nb" * 500: torch.ones(1)}, path)
    assert len(refusal(tiny_base(), tmp_path / "a")) < 1000


@pytest.mark.slow
def test_an_adapter_made_for_another_base(tmp_path):
    peft_folder(tmp_path / "wide", model=tiny_model(width=64))
    message = refusal(tiny_base(), tmp_path / "wide")
    assert ", 64]" in message and ", 32]" in message and "the base it was trained on" in message
    peft_folder(tmp_path / "deep", model=tiny_model(layers=3))
    assert "layers.2" in refusal(tiny_base(), tmp_path / "deep")
    peft_folder(tmp_path / "head", target_modules=["q_proj", "lm_head"])
    message = refusal(tiny_base(), tmp_path / "head")
    assert "lm_head.base_layer.weight" in message and "linear layer" in message


@pytest.mark.slow
def test_an_adapter_of_another_base_with_the_same_shape_is_warned_of(tmp_path, caplog):
    base = tiny_base()
    add_random_adapter(base, "solver", 4, 8.0, ATTENTION)
    base.save_adapter("solver", tmp_path / "a")
    path = tmp_path / "a" / CONFIG
    cached = f"/snapshots/{'0' * 40}"
    for trained_on, warned in (
        (base.name, ""),
        (f"/elsewhere/{base.name}", ""),
        (f"/hub/models--x--{base.name}{cached}", ""),
        (f"/hub/models--x--games-base{cached}", "was trained on the base /hub/models--x--games-base"),
        (None, "does not say which base it was trained on"),
        ("games-base", "was trained on the base games-base"),
    ):
        path.write_text(json.dumps({**json.loads(path.read_text()), "base_model_name_or_path": trained_on}))
        caplog.clear()
        other = tiny_base()
        other.add_adapter("solver", LoraSpec(4, 8.0, ATTENTION), seed=0)
        other.load_adapter("solver", tmp_path / "a")
        lines = [line for line in caplog.messages if "trained on" in line]
        assert (len(lines) == 1 and warned in lines[0]) if warned else not lines


def test_a_folder_of_another_shape_than_the_run_asks_for(tmp_path):
    base = tiny_base()
    add_random_adapter(base, "solver", 4, 8.0, ATTENTION)
    base.save_adapter("solver", tmp_path / "a")
    for spec in (LoraSpec(8, 16.0, ATTENTION), LoraSpec(4, 16.0, ATTENTION), LoraSpec(4, 8.0, ALL)):
        other = tiny_base()
        other.add_adapter("solver", spec, seed=0)
        assert "give the agent the rank, alpha and targets" in refusal(other, tmp_path / "a")


@pytest.mark.slow
def test_a_base_loads_from_a_folder_and_says_what_is_wrong_with_others(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)  # the variable was read at import
    model = tiny_model()
    model.save_pretrained(tmp_path / "base")
    with pytest.raises(ModelError, match="holds no tokenizer"):
        SharedBase.load(str(tmp_path / "base"), device="cpu")
    tiny_tokenizer().save_pretrained(tmp_path / "base")
    base = SharedBase.load(str(tmp_path / "base"), device="cpu")
    with torch.no_grad():
        torch.testing.assert_close(logits(base, None), model(input_ids=IDS).logits, atol=1e-5, rtol=1e-5)
    assert base.eos_ids == {1} and base.pad_id == 0 and base.context_window == 256 and base.hidden_size == 32
    assert next(base.model.parameters()).dtype == torch.float32
    for name, message in (
        (str(tmp_path / "nowhere"), "found no model folder"),
        (str(tmp_path), "no config.json"),
        (str(tmp_path / "base" / "config.json"), "found the file"),
        ("./relative/nowhere", "found no model folder"),
        ("nobody-7f3a/no-such-model-9c1d", "cannot be loaded"),
    ):
        with pytest.raises(ModelError, match=message) as caught:
            SharedBase.load(name, device="cpu")
        assert "\n" not in str(caught.value) and caught.value.__cause__ is None
    weights = tmp_path / "base" / "model.safetensors"
    tensors = load_bytes(weights.read_bytes())
    tensors.pop("model.layers.1.mlp.up_proj.weight")
    save_file(tensors, weights, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"found no model\.layers\.1\.mlp\.up_proj\.weight"):
        SharedBase.load(str(tmp_path / "base"), device="cpu")
    with pytest.raises(ModelError, match="found dtype 'float3'"):
        SharedBase.load(str(tmp_path / "base"), dtype="float3")
    (tmp_path / "base" / "model.safetensors").write_bytes(b"garbage" * 50)
    with pytest.raises(ModelError, match="cannot be loaded"):
        SharedBase.load(str(tmp_path / "base"), device="cpu")


def test_an_unknown_adapter_is_a_configuration_error():
    with pytest.raises(ConfigError, match="'nobody'"):
        tiny_base().adapter_state("nobody")


@pytest.mark.slow
def test_experts_and_routers_that_no_adapter_reaches_are_named_once(caplog):
    """Default targets are the linear layers and the experts; what is left out, and the experts' share, is said."""
    common = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "moe_intermediate_size": 16}
    shape = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "num_experts_per_tok": 2}
    config = transformers.Qwen2MoeConfig(**common, **shape, num_experts=4, shared_expert_intermediate_size=16)
    base = SharedBase(transformers.Qwen2MoeForCausalLM(config), tiny_tokenizer(), "moe")
    base.add_adapter("a", LoraSpec(), seed=0)
    base.add_adapter("b", LoraSpec(), seed=0)
    [said] = [record.getMessage() for record in caplog.records if "no adapter reaches" in record.getMessage()]
    assert "mlp.gate (router)" in said and "q_proj" not in said and "experts" not in said
    [said] = [record.getMessage() for record in caplog.records if "are on experts" in record.getMessage()]
    assert "experts.gate_up_proj" in said and "--lora_targets: down_proj gate_proj k_proj" in said
    base.add_adapter("c", LoraSpec(targets=("q_proj", "mlp.experts.down_proj")), seed=0)
    assert {path.split(".", 4)[-1] for path in base.adapter_layers("c")} == {"q_proj", "experts.down_proj"}
    named = SharedBase(transformers.Qwen2MoeForCausalLM(config), tiny_tokenizer(), "moe")
    named.add_adapter("a", LoraSpec(targets=("q_proj",)), seed=0)
    assert "mlp.experts.gate_up_proj (experts)" in caplog.messages[-1]
    base = tiny_base()
    assert base.left_out(base.match_targets("a", ("all-linear",))) == []
    assert base.match_targets("a", ("all-linear",)) == base.match_targets("a", ALL) == list(base.linear_paths())
    assert base.match_targets("a", (r"model\.layers\.1\..*_proj",)) == base.match_targets("a", ALL)[7:]


@pytest.mark.parametrize(("family", "layer"), [("minimax", "output_gate"), ("gemma4_text", "per_layer_input_gate")])
def test_gates_of_attention_and_of_inputs_get_adapters(family, layer):
    base = SharedBase(tiny(family), tiny_tokenizer(), family)
    assert [path for path in base.match_targets("a", ("all-linear",)) if path.endswith(layer)]
    assert not [kind for kind in base.left_out(base.match_targets("a", ("all-linear",))) if layer in kind]


def test_every_adapter_says_what_it_leaves_out(caplog):
    """An agent's own layers, and those of an adapter that was loaded; nothing twice, and no advice without layers."""
    base = SharedBase(tiny("qwen3_moe"), tiny_tokenizer(), "moe")
    everything = base.match_targets("a", ("all-linear",))
    for name, targets in (
        ("a", ("q_proj",)), ("b", ("q_proj",)), ("c", ("all-linear",)), ("d", ("experts.down_proj",)),
        ("e", ("k_proj", "v_proj")), ("f", ("all-linear",)),
    ):  # fmt: skip
        base.add_adapter(name, LoraSpec(rank=2, alpha=2, targets=targets), seed=0)
    base.place_adapter("g", 2, 2, dict.fromkeys(everything[:1], (2, 1.0)), seed=0)
    said = [record.getMessage() for record in caplog.records]
    experts = "mlp.experts.gate_up_proj (experts), mlp.experts.down_proj (experts)"
    assert said[0] == f"moe: the adapter 'a' does not reach {experts}"
    assert (
        said[1] == "moe: no adapter reaches mlp.gate (router)"
        and "67% of the" in said[2]
        and said[2].endswith("q_proj v_proj")
    )
    assert said[3] == "moe: the adapter 'd' does not reach mlp.experts.gate_up_proj (experts)"
    assert "100% of the" in said[4] and said[4].endswith("(experts.down_proj)")
    assert said[5] == f"moe: the adapter 'e' does not reach {experts}"
    assert said[6] == f"moe: the adapter 'g' does not reach {experts}" and len(said) == 7


@pytest.mark.parametrize(
    "target",
    ["^([a-z0-9._]+)+!$", r"(.*)*x", ".*" * 20 + "x", "(.|.)" * 25 + "!", r"(\w+\.?)+!", "((.{1,9}){1,9}){1,99}x",
     "x" * 1001, "(" * 400 + "a", "a{99999999999999999999}"],
)  # fmt: skip
def test_a_target_that_takes_for_ever_or_is_none_is_refused(target, monkeypatch):
    """A run's args.yaml and a team file may come from anybody."""
    monkeypatch.setattr(patterns, "CPU_S", 0.3)
    base = tiny_base()
    with pytest.raises(ConfigError, match="name the layers, as q_proj") as caught:
        base.match_targets("a", ("q_proj", target))
    assert len(str(caught.value)) < 500


def test_an_expression_may_have_choices():
    base = tiny_base()
    assert base.match_targets("a", ("(.*)(q|v)_proj",)) == base.match_targets("a", ("q_proj", "v_proj"))
