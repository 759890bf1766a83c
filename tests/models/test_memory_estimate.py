"""The memory formula, against what autograd keeps and what a model weighs."""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers_families import tiny, whole
from helpers_models import ALL, tiny_base, tiny_tokenizer

from mafrt.config.agent import LoraSpec
from mafrt.config.train_config import TrainConfig
from mafrt.core.errors import ConfigError
from mafrt.cpu import learn_attention
from mafrt.models.compute import reference
from mafrt.models.memory_estimate import (
    MODEL_SHAPES,
    MemoryInputs,
    ModelShape,
    activations,
    adapter_weights,
    fitting_micro_batch,
    footprint,
    model_shape,
    shape_of,
)
from mafrt.models.shared_base import SharedBase
from mafrt.runners.micro_batch import free_bytes, micro_batch_tokens
from mafrt.scripts.info import InfoSettings, main, memory


def shape_like(base) -> ModelShape:
    c = base.config
    return ModelShape(
        c.hidden_size,
        c.num_hidden_layers,
        c.intermediate_size,
        c.num_attention_heads,
        c.num_key_value_heads,
        c.head_dim,
        c.vocab_size,
        c.tie_word_embeddings,
    )


def kept(base, tokens: int, checkpointing: bool) -> int:
    """Bytes that autograd keeps for the backward pass of one forward, weights left out."""
    base.gradient_checkpointing(checkpointing)
    weights = [*base.model.parameters(), *base.adapter_parameters("a")]
    own = {p.untyped_storage().data_ptr() for p in weights}
    found: dict[int, int] = {}
    alive = []

    def pack(tensor):
        alive.append(tensor)
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            found[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        ids = torch.randint(5, 90, (tokens // 64, 64))
        alive.append(base.forward(ids, None, torch.zeros(len(ids), dtype=torch.long)))
    return sum(found.values())


@pytest.mark.parametrize("by_kernels", [True, False])
@pytest.mark.parametrize(
    ("dtype", "changes"),
    [
        *((torch.float32, one) for one in ({"head_dim": 32}, {"intermediate_size": 512}, {"num_key_value_heads": 4})),
        (torch.bfloat16, {}),
    ],
)
def test_activations_of_a_block_are_what_autograd_keeps(dtype, changes, by_kernels):
    if by_kernels and not learn_attention.serves(dtype):
        pytest.skip("needs a C compiler")
    counted, computed = [], []
    for checkpointing in (False, True):
        sizes = []
        with nullcontext() if by_kernels else reference():
            for layers in (1, 3):
                base = tiny_base(width=64, layers=layers, **changes)
                base.model.to(dtype)
                base.add_adapter("a", LoraSpec(rank=4, alpha=8.0, targets=ALL), seed=1)
                number = 2 if dtype == torch.bfloat16 else 4
                use = MemoryInputs(
                    rank=4, gradient_checkpointing=checkpointing, on_cpu=True, kernels="c" if by_kernels else "torch"
                )
                # 128 tokens more: the adapters' weights, which are kept too, are the same.
                few, many = (kept(base, tokens, checkpointing) for tokens in (128, 256))
                estimates = [
                    activations(shape_like(base), replace(use, micro_batch_tokens=n), number) for n in (128, 256)
                ]
                sizes.append((many - few, estimates[1] - estimates[0]))
        # Two blocks more: the rest (embedding, masks, head) is the same in both.
        counted.append(sizes[1][0] - sizes[0][0])
        computed.append(sizes[1][1] - sizes[0][1])
    assert counted[1] == computed[1]
    assert computed[0] == pytest.approx(counted[0], rel=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("by_kernels", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "changes", [{}, {"hidden_size": 128, "intermediate_size": 256}, {"linear_num_value_heads": 8}, {"head_dim": 64}]
)
def test_blocks_with_a_gated_delta_rule_are_what_autograd_keeps(dtype, changes, by_kernels):
    if by_kernels and not learn_attention.serves(dtype):
        pytest.skip("needs a C compiler")
    number, counted, computed = (2 if dtype == torch.bfloat16 else 4), [], []
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes |= {"head_dim": 32, "linear_num_key_heads": 4, "linear_num_value_heads": 4, "linear_key_head_dim": 16}
    sizes |= {"linear_value_head_dim": 32} | changes
    with nullcontext() if by_kernels else reference():
        for kinds in (["linear_attention"], ["linear_attention"] * 3 + ["full_attention"]):
            kinds = [*kinds, "full_attention"]
            base = SharedBase(
                tiny("qwen3_5_text", **sizes, num_hidden_layers=len(kinds), layer_types=kinds).to(dtype),
                tiny_tokenizer(),
                "qwen3_5",
            )
            base.add_adapter("a", LoraSpec(rank=4, alpha=8.0), seed=1)
            few, many = (kept(base, tokens, False) for tokens in (128, 256))
            shape = shape_of(base.config.to_dict())
            kernels = "c" if by_kernels else "torch"
            use = MemoryInputs(rank=4, gradient_checkpointing=False, on_cpu=True, kernels=kernels)
            counted.append(many - few)
            computed.append(
                activations(shape, replace(use, micro_batch_tokens=256), number)
                - activations(shape, replace(use, micro_batch_tokens=128), number)
            )
    # Three blocks more: the rest (embedding, masks, head) is the same in both.
    assert computed[1] - computed[0] == pytest.approx(counted[1] - counted[0], rel=0.02)


@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"])
def test_a_gated_delta_rule_is_counted_as_the_model_has_it(family):
    base = SharedBase(tiny(family), tiny_tokenizer(), family)
    base.add_adapter("a", LoraSpec(rank=4), seed=1)
    shape, use = shape_of(base.config.to_dict()), MemoryInputs(rank=4, rows=2, context=100)
    assert 0 < shape.recurrent < shape.layers
    assert adapter_weights(shape, use) == sum(p.numel() for p in base.adapter_parameters("a"))
    inner = base.adapter_layers("a")
    matrices = [base.model.get_parameter(path) for path in inner if path in base.fused]
    matrices += [base.model.get_submodule(path).weight for path in inner if path not in base.fused]
    assert shape.block_weights == sum(matrix.numel() for matrix in matrices)
    # A state is as large however long the row is.
    states = shape.recurrent * base.config.linear_num_value_heads * base.config.linear_key_head_dim
    states *= base.config.linear_value_head_dim
    short, long = (footprint(shape, replace(use, context=n)).keys_and_values for n in (100, 200))
    assert short - (long - short) == pytest.approx(2 * 4 * states)


def test_weights_are_counted_as_the_model_has_them():
    base = tiny_base(width=64, layers=3)
    base.add_adapter("a", LoraSpec(rank=4, alpha=8.0, targets=ALL), seed=1)
    shape = shape_like(base)
    linear = sum(p.numel() for n, p in base.model.named_parameters() if p.dim() == 2 and "lora" not in n)
    assert shape.block_weights + shape.other_weights == linear
    assert adapter_weights(shape, MemoryInputs(rank=4)) == sum(p.numel() for p in base.adapter_parameters("a"))
    # Qwen3-4B has 4.02 billion parameters, by its name and its model card.
    assert MODEL_SHAPES["Qwen/Qwen3-4B"].block_weights + MODEL_SHAPES["Qwen/Qwen3-4B"].other_weights == pytest.approx(
        4.02e9, rel=2e-3
    )
    assert MODEL_SHAPES["Qwen/Qwen3-8B"].block_weights + MODEL_SHAPES["Qwen/Qwen3-8B"].other_weights == pytest.approx(
        8.19e9, rel=2e-3
    )


@pytest.mark.parametrize("family", ["gemma2", "llama"])
def test_weights_tell_whether_the_head_is_the_embedding_where_the_configuration_does_not(family, tmp_path):
    tiny(family).save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    shape = model_shape(str(tmp_path))
    assert shape.tied is written.pop("tie_word_embeddings") is (family == "gemma2")
    (tmp_path / "config.json").write_text(json.dumps(written), encoding="utf-8")
    assert model_shape(str(tmp_path)) == shape


@pytest.mark.parametrize("family", ["gemma3", "qwen3_vl", "qwen3_vl_moe"])
def test_parts_that_text_does_not_pass_are_counted_where_their_weights_are(family, tmp_path):
    whole(family).save_pretrained(tmp_path)
    (weights,) = tmp_path.glob("*.safetensors")
    shape = model_shape(str(tmp_path))
    assert shape.towers > 0
    estimate = footprint(shape, MemoryInputs(bits=32)).base
    assert estimate == pytest.approx(weights.stat().st_size, rel=0.02)
    weights.write_bytes(b"none")
    assert model_shape(str(tmp_path)) == replace(shape, towers=0)


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen2_moe", "mixtral", "dots1", "glm4_moe"])
def test_experts_are_counted_as_the_model_has_them(family):
    """Also dense blocks among them, and an MLP beside the experts of a block."""
    base = SharedBase(tiny(family), tiny_tokenizer(), family)
    base.add_adapter("a", LoraSpec(rank=4), seed=1)
    shape, use = shape_of(base.config.to_dict()), MemoryInputs(rank=4)
    assert shape.sparse and shape.expert_inner
    own = sum(p.numel() for p in base.adapter_parameters("a"))
    assert adapter_weights(shape, use) == own
    inner = base.adapter_layers("a")
    matrices = [base.model.get_parameter(path) for path in inner if path in base.fused]
    matrices += [base.model.get_submodule(path).weight for path in inner if path not in base.fused]
    assert shape.block_weights == sum(matrix.numel() for matrix in matrices)
    without = adapter_weights(shape, MemoryInputs(rank=4, targets=("q_proj", "k_proj", "v_proj", "o_proj")))
    with_experts = adapter_weights(shape, MemoryInputs(rank=4, targets=("experts.gate_up_proj", "experts.down_proj")))
    assert 0 < without < own and 0 < with_experts < own
    assert footprint(shape, use).adapters > footprint(shape, MemoryInputs(rank=4, targets=("q_proj",))).adapters


def test_there_is_one_base_however_many_agents_and_shards_divide_it():
    shape = MODEL_SHAPES["Qwen/Qwen3-4B"]
    one, eight = (footprint(shape, MemoryInputs(agents=k)) for k in (1, 8))
    assert eight.base == one.base and eight.adapters == 8 * one.adapters
    # By hand: A = 8 * 36 * (2560+4096 + 2*(2560+1024) + 4096+2560 + 3*(2560+9728)) = 16,515,072 parameters; 4 bytes
    # each of weights, gradient and last good weights, 8 of moments, 2 of the sampler's copy: 22.
    assert one.adapters == 16_515_072 * 22
    third = footprint(shape, MemoryInputs(processes=8, layout="zero3"))
    assert third.base == one.base / 8 and third.base_whole == one.base
    assert footprint(shape, MemoryInputs(processes=8, layout="zero3", rows=0)).playing < one.base / 4
    assert footprint(shape, MemoryInputs(bits=4)).base < 0.4 * one.base


def test_a_folder_is_read_and_what_is_no_model_is_refused(tmp_path, capsys):
    (tmp_path / "config.json").write_text(
        json.dumps(
            {
                "hidden_size": 64,
                "num_hidden_layers": 2,
                "intermediate_size": 128,
                "num_attention_heads": 4,
                "vocab_size": 99,
            }
        )
    )
    assert model_shape(str(tmp_path)) == ModelShape(64, 2, 128, 4, 4, 16, 99, False)
    with pytest.raises(ConfigError, match=r"Qwen/Qwen3-4B.*nor a folder with a readable config\.json"):
        model_shape("Qwen/Qwen3-5B")
    with pytest.raises(ConfigError, match="layout is 'fdsp'"):
        footprint(MODEL_SHAPES["Qwen/Qwen3-4B"], MemoryInputs(layout="fdsp"))
    assert main(["--memory", str(tmp_path), "--agents", "2", "--gpus", "1"]) == 0
    out = capsys.readouterr().out
    assert "2 agents, bf16" in out and "peak of one GPU" in out and "ZeRO" not in out


@pytest.mark.parametrize(
    ("flag", "value", "low"),
    [("agents", 0, 1), ("gpus", 0, 1), ("lora_rank", -3, 1), ("rows", -1, 0), ("context", 0, 1)],
)
def test_numbers_that_nobody_can_have_are_refused(flag, value, low, capsys):
    assert main(["--memory", "Qwen/Qwen3-4B", f"--{flag}", str(value)]) == 2
    assert capsys.readouterr().err == f"error: {flag} is {value}; choose {low} or more.\n"


def test_the_table_of_the_document_is_computed():
    text = (Path(__file__).parents[2] / "bench" / "results" / "scale.md").read_text(encoding="utf-8")
    for model in ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-4B", "Qwen/Qwen3-14B", "Qwen/Qwen3-32B"):
        assert memory(model, InfoSettings(agents=(4,))) in text, f"run `mafrt info --memory {model} --agents 4`"


def test_a_micro_batch_takes_at_most_half_of_the_free_memory():
    shape, use = shape_like(tiny_base(width=64, layers=4)), MemoryInputs(bits=32, gradient_checkpointing=False)
    sizes = [fitting_micro_batch(shape, use, free, 8192) for free in (1e3, 3e7, 6e7, 1e12)]
    assert sizes == sorted(sizes) and sizes[0] == 256 and sizes[-1] == 8192 and 256 < sizes[1] < sizes[2] < 8192
    for tokens, free in zip(sizes[1:3], (3e7, 6e7), strict=True):
        assert activations(shape, replace(use, micro_batch_tokens=tokens), 4) <= 0.5 * free and tokens % 256 == 0
    assert fitting_micro_batch(shape, use, 1e12, 300) == 300  # never more than was asked for


def test_a_run_sizes_its_micro_batches_and_info_says_so(capsys):
    base, config = tiny_base(width=64, layers=4), TrainConfig.of()
    assert micro_batch_tokens(base, config, 1e12) == 8192 == micro_batch_tokens(base, config, None)
    assert 256 <= micro_batch_tokens(base, config, 3e7) < 8192
    base.config.to_dict = dict  # a configuration that the formula does not know
    assert micro_batch_tokens(base, config, 1.0) == 8192
    free = free_bytes(torch.device("cpu"))
    assert free is not None and free > 1e8
    assert main(["--memory", "Qwen/Qwen3-0.6B"]) == 0
    assert "On this machine's CPU" in (said := capsys.readouterr().out) and "micro-batches of" in said


SMALL = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "vocab_size": 99,
}


@pytest.mark.parametrize(
    "config",
    [
        [1],
        "text",
        {"text_config": [1]},
        *({**SMALL, key: value} for key in SMALL for value in (0, -5, "big", 2.5, True, [1])),
        {**SMALL, "head_dim": -1},
        {**SMALL, "num_key_value_heads": 0},
        *({name: value for name, value in SMALL.items() if name != key} for key in SMALL),
    ],
)
def test_a_config_of_another_form_is_one_sentence(tmp_path, config):
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="configuration of a Llama-like model"):
        model_shape(str(tmp_path))
