"""Weights from elsewhere: PEFT folders of another shape, a critic that is none of ours, and damaged files."""

from __future__ import annotations

import json
import logging
import os
import shutil

import pytest
import torch
from helpers_models import tiny_base, tiny_model, tiny_tokenizer
from safetensors.torch import load_file, save, save_file
from toy import make

from mafrt.config.agent import LoraSpec
from mafrt.core.errors import CheckpointError, ModelError
from mafrt.models.shared_base import SharedBase


def foreign(folder):
    """Adapters of rank 3 on q_proj and v_proj, as MARFT writes them, and a critic of another kind."""
    base = tiny_base()
    for name in ("first", "second"):
        base.add_adapter(name, LoraSpec(3, 7.0, ("q_proj", "v_proj")), seed=5)
        base.save_adapter(name, folder / name)
    torch.save({"v_head.weight": torch.zeros(3)}, folder / "critic.pth")
    return base


@pytest.mark.slow
def test_folders_of_another_shape_load_by_their_own_configuration(tmp_path, caplog):
    given = foreign(tmp_path / "marft")
    with caplog.at_level(logging.WARNING, logger="mafrt"):
        logging.getLogger("mafrt").propagate = True
        runner = make(None, tmp_path / "marft", iterations=1, eval_episodes=0)
    record = runner.base.records["first"]
    assert (record.rank, record.alpha) == (3, 7.0)
    assert {path.rsplit(".", 1)[-1] for path in record.layers} == {"q_proj", "v_proj"}
    for key, value in given.adapter_state("first").items():
        assert torch.equal(runner.base.adapter_state("first")[key], value)
    said = caplog.text
    assert "the critic is set aside" in said and "rank 3 and alpha 7" in said
    runner.run()


def test_weights_that_are_not_finite_are_found_when_a_base_is_loaded(tmp_path):
    model = tiny_model()
    with torch.no_grad():
        next(model.parameters())[0, 0] = float("nan")
    model.save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="damaged: found NaN or infinity in"):
        SharedBase.load(str(tmp_path))


def test_a_folder_holds_the_bytes_that_safetensors_writes_of_the_weights_as_they_are_now(tmp_path):
    base = tiny_base()
    base.add_adapter("first", LoraSpec(3, 7.0, ("q_proj", "v_proj", "down_proj")), seed=5)
    for step in range(2):
        with torch.no_grad():
            for parameter in base.adapter_parameters("first"):
                parameter.add_(0.5)
        base.save_adapter("first", tmp_path / "first")
        written = {file.name: file.read_bytes() for file in (tmp_path / "first").iterdir()}
        expected = save(base.adapter_state("first"), metadata={"format": "pt"})
        assert written["adapter_model.safetensors"] == expected, step
        assert base.adapter_files("first") == written


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_one_number_that_is_not_finite_is_found(value):
    base = tiny_base()
    base.add_adapter("first", LoraSpec(3, 7.0, ("q_proj", "v_proj")), seed=5)
    assert base.finite("first")
    with torch.no_grad():
        base.adapter_parameters("first")[2][1, 1] = value
    assert not base.finite("first")


@pytest.mark.slow
def test_a_folder_of_this_base_is_not_sent_to_its_own_base(tmp_path):
    """What keeps a file from loading is named: other parameters, or the same layers under other names."""
    base = SharedBase.load("teaching-base")
    base.add_adapter("a", LoraSpec(4, 8.0, ("q_proj",)), seed=0)
    base.save_adapter("a", tmp_path / "a")
    good = load_file(tmp_path / "a" / "adapter_model.safetensors")
    faults = {
        "modules_to_save": {**good, "base_model.model.model.embed_tokens.weight": torch.zeros(2, 2)},
        "here that layer is called": {
            k.replace("model.model.model.layers.0", "model.model.layers.0"): v for k, v in good.items()
        },
        "save_pretrained": {k.replace(".weight", ".default.weight"): v for k, v in good.items()},
    }
    for said, tensors in faults.items():
        save_file(tensors, tmp_path / "a" / "adapter_model.safetensors")
        with pytest.raises(CheckpointError, match=said) as caught:
            base.load_adapter("b", tmp_path / "a")
        assert "its own base" not in str(caught.value) and "load it on" not in str(caught.value)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plain") / "first"
    base = tiny_base()
    base.add_adapter("first", LoraSpec(3, 7.0, ("q_proj", "v_proj")), seed=5)
    base.save_adapter("first", folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"target_modules": ["nothing"]}, "weights of the targets alone"),
        ({"target_modules": []}, "weights of the targets alone"),
        ({"target_modules": ["q_proj"]}, "weights of the targets alone"),
        ({"layers_to_transform": [17]}, "layers_to_transform"),
        ({"layers_to_transform": 17}, "layers_to_transform"),
        ({"layers_to_transform": []}, "layers_to_transform"),
        ({"layers_pattern": "blocks"}, "layers_pattern"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out"),
        ({"rank_pattern": {"([a-z0-9._]+)+!": 4}}, "pattern"),
        ({"rank_pattern": {"(.|.)" * 25 + "!": 4}}, "pattern"),
        ({"rank_pattern": {".*" * 20 + "x": 4}}, "pattern"),
        ({"alpha_pattern": {"x" * 2000: 4}}, "pattern"),
        ({"alpha_pattern": {"q_proj(": 4}}, "pattern"),
    ],
)
def test_settings_that_do_not_fit_the_weights_are_refused(plain, tmp_path, change, words):
    folder = tmp_path / "first"
    shutil.copytree(plain, folder)
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(CheckpointError, match=words):
        tiny_base().load_adapter("first", folder)


FLAGS = ("use_dora", "use_qalora", "use_bdlora", "lora_bias", "fan_in_fan_out", "ensure_weight_tying")
NAMES = ("modules_to_save", "layers_pattern", "trainable_token_indices", "layer_replication")
SET = {
    **dict.fromkeys(FLAGS, True),
    **{name: ["q_proj"] for name in NAMES},
    **{name: {"x": 1} for name in ("arrow_config", "kasa_config", "monteclora_config")},
    # No version of PEFT has these; one that is to come may.
    "use_something": True,
    "scale_of_values": 2.5,
    "another_config": {"x": {"y": 1}},
    "r_of_keys": [1],
    "decompose": "all",
}


@pytest.mark.parametrize("name", SET)
def test_a_setting_that_is_not_computed_here_is_refused_where_it_is_set(plain, tmp_path, name):
    folder, base = tmp_path / "first", tiny_base()
    shutil.copytree(plain, folder)
    config = json.loads((folder / "adapter_config.json").read_text())
    for unset in (None, False, [], {}, ""):
        (folder / "adapter_config.json").write_text(json.dumps({**config, name: unset}))
        base.load_adapter("first", folder)
    (folder / "adapter_config.json").write_text(json.dumps({**config, name: SET[name]}))
    with pytest.raises(CheckpointError, match=f"found {name}="):
        base.load_adapter("first", folder)


OTHER_TASKS = ("SEQ_CLS", "SEQ_2_SEQ_LM", "TOKEN_CLS", "QUESTION_ANS", "FEATURE_EXTRACTION", "causal_lm", 7, ["x"])


@pytest.mark.parametrize(
    "kind", ["IA3", "LOHA", "VERA", "OFT", "PREFIX_TUNING", "PROMPT_TUNING", "LN_TUNING", "BOFT", 5]
)
def test_an_adapter_of_another_kind_is_named(plain, tmp_path, kind):
    """None of them has a `lora_alpha`, and some no rank."""
    folder = shutil.copytree(plain, tmp_path / "other")
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": kind, "task_type": "CAUSAL_LM", "r": 8}))
    with pytest.raises(CheckpointError, match=rf"peft_type='?{kind}'?, expected .*LoRA") as caught:
        tiny_base().load_adapter("a", folder)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("task", OTHER_TASKS, ids=str)
def test_an_adapter_of_another_task_is_refused(plain, tmp_path, task):
    shutil.copytree(plain, tmp_path / "first")
    path = tmp_path / "first" / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "task_type": task}))
    with pytest.raises(CheckpointError, match="found task_type="):
        tiny_base().load_adapter("first", path.parent)


OF_TRAINING = {
    "lora_dropout": 0.05,
    "loftq_config": {"loftq_bits": 4},
    "eva_config": {"rho": 2.0},
    "corda_config": {"cache_file": "x"},
    "lora_ga_config": {"direction": "ArB2r"},
    "velora_config": {"num_groups": 32},
    "megatron_config": {"tensor_model_parallel_size": 2},
    "runtime_config": {"ephemeral_gpu_offload": True},
}


@pytest.mark.parametrize("name", OF_TRAINING)
def test_settings_of_training_elsewhere_are_taken_with_a_line_that_names_them(plain, tmp_path, caplog, name):
    shutil.copytree(plain, tmp_path / "first")
    path, base = tmp_path / "first" / "adapter_config.json", tiny_base()
    base.load_adapter("first", path.parent)
    assert not caplog.records
    path.write_text(json.dumps({**json.loads(path.read_text()), name: OF_TRAINING[name]}))
    base.load_adapter("first", path.parent)
    [line] = caplog.messages
    assert f"{name} of PEFT's training is not read" in line and "\n" not in line


def test_all_that_peft_writes_of_plain_lora_is_taken(plain, tmp_path):
    from peft import LoraConfig

    folder = tmp_path / "first"
    shutil.copytree(plain, folder)
    own = json.loads((folder / "adapter_config.json").read_text())
    LoraConfig(r=3, lora_alpha=7, target_modules=["q_proj", "v_proj"]).save_pretrained(folder)
    theirs = json.loads((folder / "adapter_config.json").read_text())
    told = {"auto_mapping": {"base_model_class": "X", "parent_library": "x", "unsloth_fixed": True}, "revision": "main"}
    (folder / "adapter_config.json").write_text(json.dumps({**own, **theirs, **told, "lora_dropout": 0.1}))
    tiny_base().load_adapter("first", folder)


@pytest.mark.parametrize(
    "change",
    [
        {"target_parameters": ["nothing.weight"]},
        {"target_parameters": ["q_proj.bias"]},
        {"target_parameters": [""]},
        {"target_parameters": ["mlp.experts.down_proj"]},
        {"target_parameters": ["up_proj.weight"]},
        {"target_modules": None, "target_parameters": ["q_proj.weight", "v_proj.weight", "up_proj.weight"]},
        {"target_modules": None, "target_parameters": ["q_proj.weight"]},
        {"rank_pattern": {"nothing": 4}},
        {"rank_pattern": {"q_proj": 3, "layers.99.v_proj": 3}},
        {"alpha_pattern": {"nothing": 4}},
        {"alpha_pattern": {"_proj": 4}},
        {"alpha_pattern": {"^q_proj$": 4}},
        {"alpha_pattern": {"": 4}},
        {"alpha_pattern": {"q_proj": 7, r"blocks\.0\..*": 7}},
    ],
)
def test_names_that_stand_for_nothing_are_refused(plain, tmp_path, change):
    folder = tmp_path / "first"
    shutil.copytree(plain, folder)
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(CheckpointError) as caught:
        tiny_base().load_adapter("first", folder)
    assert any(name in str(caught.value) for name in (*change, "up_proj"))


@pytest.mark.parametrize("dtype", [torch.int8, torch.int64, torch.bool, torch.uint8])
def test_weights_that_are_whole_numbers_are_refused(plain, tmp_path, dtype):
    folder = tmp_path / "first"
    shutil.copytree(plain, folder)
    tensors = load_file(folder / "adapter_model.safetensors")
    name = sorted(tensors)[0]
    save_file({**tensors, name: tensors[name].to(dtype)}, folder / "adapter_model.safetensors")
    with pytest.raises(CheckpointError, match="floating-point"):
        tiny_base().load_adapter("first", folder)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("r", [0, -1, 8.5, True, "8", None, [8], float("nan"), float("inf"), 10**400]),
        ("lora_alpha", [0, -1.0, True, "8", None, float("nan"), float("inf"), 1e300, 10**400]),
        ("rank_pattern", [[1], "x", 5, {"q_proj": 0}, {"q_proj": float("nan")}, {"q_proj": "x"}, {"q_proj": [1]}]),
        ("alpha_pattern", [[1], "x", {"q_proj": None}, {"q_proj": float("inf")}, {"q_proj": {}}, {"q_proj": -2}]),
        ("target_modules", [5, True, {"q_proj": 1}, [None], [["q_proj"]]]),
        ("exclude_modules", [5, True, {"a": 1}, [None]]),
        ("target_parameters", [5, True, "x.weight", [None], {"a": 1}]),
        ("layers_to_transform", ["1", True, {"a": 1}, [[1]], [None], [0.0], float("inf")]),
        ("use_rslora", ["no", [1], 1]),
        ("alora_invocation_tokens", [5, [-1], ["a"], [10**30]]),
    ],
)
def test_a_setting_of_another_kind_is_refused_by_its_name(plain, tmp_path, name, values):
    folder, base = tmp_path / "first", tiny_base()
    shutil.copytree(plain, folder)
    config = json.loads((folder / "adapter_config.json").read_text())
    for value in values:
        (folder / "adapter_config.json").write_text(json.dumps({**config, name: value}))
        with pytest.raises(CheckpointError) as caught:
            base.load_adapter("first", folder)
        assert name in str(caught.value) and len(str(caught.value)) < 500


def test_weights_of_any_precision_are_read_or_found_to_lie_beyond_ours(plain, tmp_path):
    folder, base = tmp_path / "first", tiny_base()
    shutil.copytree(plain, folder)
    weights = folder / "adapter_model.safetensors"
    tensors = load_file(weights)
    name = sorted(tensors)[0]
    mixed = {**tensors, name: tensors[name].to(torch.float8_e4m3fn)}
    for each in (mixed, {key: tensor.double() for key, tensor in tensors.items()}):
        save_file(each, weights)
        base.load_adapter("first", folder)
    far, none = tensors[name].double(), mixed[name].clone()
    far[0, 0], none.view(torch.uint8)[0, 0] = 1e300, 0x7F
    for bad in (far, none):
        save_file({**tensors, name: bad}, weights)
        with pytest.raises(CheckpointError, match="NaN or infinity"):
            base.load_adapter("first", folder)


@pytest.mark.parametrize("kind", ["mistral", "llama"])
def test_a_folder_of_another_family_with_the_same_layers_is_refused(kind, tmp_path, caplog):
    """Nothing but its config.json tells it apart, or the class that PEFT noted."""
    folders = []
    for number, each in enumerate(("llama", kind)):
        folders.append(tmp_path / str(number) / "base")
        tiny_model(each).save_pretrained(folders[-1])
        tiny_tokenizer().save_pretrained(folders[-1])
    one, other = (SharedBase.load(str(folder), device="cpu") for folder in folders)
    one.add_adapter("a", LoraSpec(), seed=0)
    one.save_adapter("a", tmp_path / "a")
    settings = tmp_path / "a" / "adapter_config.json"
    written = json.loads(settings.read_text())
    noted = {"auto_mapping": {"base_model_class": "LlamaForCausalLM"}, "base_model_name_or_path": None}
    for changes in ({}, noted):
        settings.write_text(json.dumps(written | changes))
        if kind == "llama":
            other.load_adapter("a", tmp_path / "a")
            continue
        with pytest.raises(CheckpointError, match=r"[Mm]istral|is none") as caught:
            other.load_adapter("a", tmp_path / "a")
        assert "same names and sizes" in str(caught.value) and "\n" not in str(caught.value)
    lines = [line for line in caplog.messages if "trained on" in line]
    assert all("does not say which base" in line for line in lines) and len(lines) == (kind == "llama")
    settings.write_text(json.dumps(written | {"base_model_name_or_path": str(folders[1])}))
    other.load_adapter("a", tmp_path / "a")  # said to be of this base


@pytest.mark.parametrize("class_", ["LlamaForConditionalGeneration", "LlamaModel", "LlamaTextForCausalLM", None, 5])
def test_classes_of_one_family_share_adapters(class_, tmp_path):
    tiny_model("llama").save_pretrained(tmp_path / "base")
    tiny_tokenizer().save_pretrained(tmp_path / "base")
    base = SharedBase.load(str(tmp_path / "base"), device="cpu")
    base.add_adapter("a", LoraSpec(), seed=0)
    base.save_adapter("a", tmp_path / "a")
    settings = tmp_path / "a" / "adapter_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"auto_mapping": {"base_model_class": class_}}))
    base.load_adapter("a", tmp_path / "a")


@pytest.mark.parametrize("class_", ["ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering",
                                    "ForMultipleChoice", "ForRewardModel"])  # fmt: skip
@pytest.mark.parametrize("by", ["PEFT's note", "the checkpoint"])
def test_a_class_of_the_family_that_does_not_write_is_refused(class_, by, tmp_path):
    base = tiny_base("llama")
    base.add_adapter("a", LoraSpec(), seed=0)
    base.save_adapter("a", tmp_path / "a")
    settings, noted = tmp_path / "a" / "adapter_config.json", {"auto_mapping": {"base_model_class": f"Llama{class_}"}}
    if by == "the checkpoint":
        (tmp_path / "other").mkdir()
        (tmp_path / "other/config.json").write_text(json.dumps({"architectures": [f"Llama{class_}"]}))
        noted = {"base_model_name_or_path": str(tmp_path / "other")}
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"task_type": None} | noted))
    with pytest.raises(
        CheckpointError, match=f"was trained on a Llama{class_}, whose outputs are no next tokens"
    ) as said:
        base.load_adapter("b", tmp_path / "a")
    assert "\n" not in str(said.value) and "b" not in base.adapters


@pytest.mark.parametrize("told", [False, True])
def test_weights_of_a_terabyte_are_not_read(told, tmp_path):
    base = tiny_base()
    base.add_adapter("a", LoraSpec(), seed=0)
    base.save_adapter("a", tmp_path / "a")
    weights = tmp_path / "a" / "adapter_model.safetensors"
    if told:
        header = json.dumps({"x": {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 2**42]}}).encode()
        weights.write_bytes(len(header).to_bytes(8, "little") + header)
        os.truncate(weights, 8 + len(header) + 2**42)
    else:
        os.truncate(weights, 2**40)
    with pytest.raises(CheckpointError, match="is corrupt"):
        base.load_adapter("a", tmp_path / "a")
