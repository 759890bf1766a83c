"""Adapters on experts that a block holds as one parameter: PEFT's layout, mixed over agents in one batch."""

from __future__ import annotations

import json

import pytest
import torch
from helpers_families import VOCAB, in_double, tiny
from helpers_models import ALL, tiny_tokenizer

from mafrt.config.agent import LoraSpec
from mafrt.config.train_config import EngineConfig
from mafrt.core.errors import CheckpointError, ConfigError
from mafrt.core.types import Request, SamplingParams
from mafrt.engines.checks import check_engine
from mafrt.engines.local.engine import LocalEngine
from mafrt.models import expert_lora, family_checks
from mafrt.models.shared_base import SharedBase

RECURRENT = "qwen3_5_moe_text"
FAMILIES = ("gpt_oss", *(pytest.param(name, marks=pytest.mark.slow) for name in ("qwen3_moe", "mixtral", RECURRENT)))
"""with biases and the inner width last, without, and beside recurrent layers"""
ROWS = (0, 1, -1, 0, 2)
"""adapters of a batch's rows"""


def draw(base, names):
    """Weights that matter."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name in names:
            for _, b in base.adapter_layers(name).values():
                b.copy_(0.1 * torch.randn(b.shape, generator=generator))
            base.bump(name)


def team(family, targets=("all-linear",)):
    """Three adapters of unequal rank and alpha; the last without experts."""
    base = SharedBase(tiny(family), tiny_tokenizer(), family)
    base.add_adapter("a", LoraSpec(rank=3, alpha=5, targets=targets), seed=0)
    base.add_adapter("b", LoraSpec(rank=8, alpha=16, targets=targets), seed=1)
    base.add_adapter("c", LoraSpec(rank=4, alpha=8, targets=("q_proj", "v_proj")), seed=2)
    draw(base, "abc")
    return base


def chosen(logits, ids):
    return logits.float().log_softmax(-1)[:, :-1].gather(-1, ids[:, 1:, None]).squeeze(-1)


def batch():
    return torch.randint(5, VOCAB, (len(ROWS), 9), generator=torch.Generator().manual_seed(0))


def learnt(base, ids, rows):
    """Log-probabilities of the ids, whose sum has gone backward."""
    states = base.forward(ids, torch.ones_like(ids), torch.tensor(rows))
    found = chosen(base.logits(states), ids)
    found.sum().backward()
    return found.detach()


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_values_and_gradients_are_those_of_peft_with_one_adapter_after_the_other(family, tmp_path):
    from peft import PeftModel

    base, ids = team(family), batch()
    found = learnt(base, ids, ROWS)
    for number, name in enumerate("abc"):
        own = [row for row, adapter in enumerate(ROWS) if adapter == number]
        base.save_adapter(name, tmp_path / name)
        model = PeftModel.from_pretrained(tiny(family), tmp_path / name, is_trainable=True).eval()
        expected = chosen(model(input_ids=ids[own]).logits, ids[own])
        expected.sum().backward()
        assert (found[own] - expected).abs().max() < 1e-4
        theirs = {path.replace(".default", ""): p.grad for path, p in model.named_parameters() if p.requires_grad}
        ours = base.stored_layers(name)
        assert len(theirs) == 2 * len(ours)
        assert any(".experts" in stem for stem in ours) == (name != "c")
        for stem, pair in ours.items():
            for part, parameter in zip(("lora_A", "lora_B"), pair, strict=True):
                grad = theirs[f"base_model.model.{stem}.{part}.weight"]
                # A recurrence in float32 differs more from itself, where rows stand in another batch.
                bound = (1e-4 if family == RECURRENT else 1e-5) * max(1.0, float(grad.abs().max()))
                assert (grad - parameter.grad).abs().max() <= bound, stem


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_next", RECURRENT, "gpt_oss"])
def test_in_float64_gradients_are_those_of_peft_up_to_rounding(family, tmp_path, monkeypatch):
    """What a recurrence differs by in float32 is rounding."""
    from peft import PeftModel

    ids, saved = batch(), SharedBase(tiny(family), tiny_tokenizer(), family)
    shapes = {"a": LoraSpec(rank=2, alpha=8), "b": LoraSpec(rank=8, alpha=16)}
    for name, spec in shapes.items():
        saved.add_adapter(name, spec, seed=len(name))
    draw(saved, "ab")
    for name in shapes:
        saved.save_adapter(name, tmp_path / name)
    base = SharedBase(in_double(monkeypatch, family), tiny_tokenizer(), family)
    for name in shapes:
        base.load_adapter(name, tmp_path / name)
        for parameter in base.adapter_parameters(name):
            parameter.data = parameter.data.double()
    rows = (0, 1, -1, 0, 1)
    learnt(base, ids, rows)
    for number, name in enumerate(shapes):
        own = [row for row, adapter in enumerate(rows) if adapter == number]
        plain = in_double(monkeypatch, family)
        model = PeftModel.from_pretrained(plain, tmp_path / name, is_trainable=True).eval().double()
        chosen(model(input_ids=ids[own]).logits, ids[own]).sum().backward()
        theirs = {path.replace(".default", ""): p.grad for path, p in model.named_parameters() if p.requires_grad}
        for stem, pair in base.stored_layers(name).items():
            for part, parameter in zip(("lora_A", "lora_B"), pair, strict=True):
                grad = theirs[f"base_model.model.{stem}.{part}.weight"]
                assert grad.dtype == torch.float64
                assert (grad - parameter.grad).abs().max() <= 1e-9 * max(1.0, float(grad.abs().max())), stem


@pytest.mark.slow
def test_a_batch_of_several_is_a_pass_for_each():
    ids = batch()
    base, alone = team("mixtral"), team("mixtral")
    mixed = learnt(base, ids, ROWS)
    for adapter in set(ROWS):
        own = [row for row, each in enumerate(ROWS) if each == adapter]
        with torch.set_grad_enabled(adapter >= 0):
            states = alone.forward(ids[own], torch.ones_like(ids[own]), torch.tensor([adapter] * len(own)))
            found = chosen(alone.logits(states), ids[own])
        assert (found - mixed[own]).abs().max() < 1e-5
        if adapter >= 0:
            found.sum().backward()
    for name in "abc":
        for one, other in zip(base.adapter_parameters(name), alone.adapter_parameters(name), strict=True):
            assert (one.grad - other.grad).abs().max() <= 1e-5 * max(1.0, float(one.grad.abs().max()))


@pytest.mark.slow
def test_an_adapter_that_does_not_learn_acts_and_gets_no_gradient():
    base, ids = team("qwen3_moe"), batch()
    found = learnt(base, ids, ROWS)
    base.forward(ids, torch.ones_like(ids), torch.tensor(ROWS)).detach()
    for name in "abc":
        for parameter in base.adapter_parameters(name):
            parameter.grad = None
    states = base.forward(ids, torch.ones_like(ids), torch.tensor(ROWS), train=["b"])
    again = chosen(base.logits(states), ids)
    again.sum().backward()
    assert torch.equal(again.detach(), found)
    assert all(parameter.grad is None for parameter in base.adapter_parameters("a"))
    assert all(parameter.grad.abs().max() > 0 for parameter in base.adapter_parameters("b"))


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradients_do_not_depend_on_checkpointing(checkpointing):
    base, ids = team("gpt_oss"), batch()
    base.gradient_checkpointing(checkpointing)
    learnt(base, ids, ROWS)
    plain = team("gpt_oss")
    learnt(plain, ids, ROWS)
    for one, other in zip(base.adapter_parameters("a"), plain.adapter_parameters("a"), strict=True):
        assert torch.allclose(one.grad, other.grad, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("targets", [
    ("experts.down_proj",), ("experts.gate_up_proj",), ("q_proj", "mlp.experts.down_proj"),
    (r"model\.layers\.[01]\.mlp\.experts\..*",), ("k_proj", r".*\.1\..*experts\.gate_up_proj"),
])  # fmt: skip
@pytest.mark.parametrize("family", ["qwen3_moe", "qwen2_moe"])
def test_a_part_of_the_experts_goes_home(family, targets, tmp_path):
    from peft import PeftModel

    base, ids = team(family, targets), batch()
    base.save_adapter("a", tmp_path / "a")
    model = PeftModel.from_pretrained(tiny(family), tmp_path / "a").eval()
    with torch.no_grad():
        expected = model(input_ids=ids).logits.log_softmax(-1)
        found = base.logits(base.forward(ids, None, torch.zeros(len(ids), dtype=torch.long))).log_softmax(-1)
        bare = base.logits(base.forward(ids, None, torch.full((len(ids),), -1))).log_softmax(-1)
    assert (found - expected).abs().max() < 1e-4 < (found - bare).abs().max()
    again = SharedBase(tiny(family), tiny_tokenizer(), family)
    again.load_adapter("a", tmp_path / "a")
    assert again.adapter_files("a") == base.adapter_files("a")


def test_a_folder_of_peft_loads_with_its_own_ranks(tmp_path):
    """Patterns of PEFT name parameters as they name layers."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(
        r=4, lora_alpha=8, target_modules=["q_proj"], target_parameters=["experts.gate_up_proj", "experts.down_proj"],
        rank_pattern={"experts.down_proj": 2}, alpha_pattern={r"layers\.1\..*gate_up_proj": 3},
    )  # fmt: skip
    model = get_peft_model(tiny("qwen3_moe"), config).eval()
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            if "lora_B" in path:
                parameter.normal_(std=0.1)
    model.save_pretrained(tmp_path)
    base, ids = SharedBase(tiny("qwen3_moe"), tiny_tokenizer(), "qwen3_moe"), batch()
    base.load_adapter("x", tmp_path)
    with torch.no_grad():
        expected = model(input_ids=ids).logits.log_softmax(-1)
        found = base.logits(base.forward(ids, None, torch.zeros(len(ids), dtype=torch.long))).log_softmax(-1)
    assert (found - expected).abs().max() < 1e-4
    assert {rank for rank, _ in base.records["x"].layers.values()} == {2, 4}
    base.save_adapter("x", tmp_path / "ours")
    theirs = tiny("qwen3_moe")
    from peft import PeftModel

    with torch.no_grad():
        again = PeftModel.from_pretrained(theirs, tmp_path / "ours").eval()(input_ids=ids).logits.log_softmax(-1)
    assert (again - expected).abs().max() < 1e-4


@pytest.mark.slow
def test_folders_that_do_not_fit_the_experts_are_refused(tmp_path):
    base = team("qwen3_moe")
    base.save_adapter("a", tmp_path)
    other = SharedBase(tiny("mixtral"), tiny_tokenizer(), "mixtral")
    with pytest.raises(CheckpointError, match="expected"):
        other.load_adapter("a", tmp_path)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    for change, words in (
        ({"r": 4}, "shape"),
        ({"target_parameters": ["mlp.experts.w1"]}, "target_parameters"),
        ({"target_parameters": ["experts.down_proj"]}, "expected"),
    ):
        (tmp_path / "adapter_config.json").write_text(json.dumps(config | change))
        with pytest.raises(CheckpointError, match=words):
            SharedBase(tiny("qwen3_moe"), tiny_tokenizer(), "qwen3_moe").load_adapter("a", tmp_path)


@pytest.mark.parametrize("family", FAMILIES)
def test_play_uses_the_experts_adapters(family):
    base = team(family)
    ids = list(range(20, 30))
    asked = [
        Request(ids[: 5 + n % 3], name, SamplingParams(max_new_tokens=3 + n % 4), n)
        for n, name in enumerate(("a", "b", "c", None) * 3)
    ]
    engine = LocalEngine(base, eos_ids=())
    assert family != "qwen3_moe" or engine.decoding == "lean"
    differs = False
    for request, answer in zip(asked, engine.generate(asked), strict=True):
        row = torch.tensor([[*request.prompt_ids, *answer.ids]])
        index = torch.tensor([base.adapter_index(request.adapter)])
        with torch.no_grad():
            found = chosen(base.logits(base.forward(row, torch.ones_like(row), index)), row)
            bare = chosen(base.logits(base.forward(row, torch.ones_like(row), torch.tensor([-1]))), row)
        at = len(request.prompt_ids) - 1
        assert torch.allclose(found[0, at:], torch.tensor(answer.logprobs), atol=1e-3)
        differs |= request.adapter == "a" and bool((bare - found).abs().max() > 1e-2)
    assert differs


def test_vllm_is_not_given_experts(monkeypatch):
    """Their layout is another one there; what is refused names the way out."""
    monkeypatch.setattr("mafrt.engines.checks.check_package", lambda *needed: None)  # vLLM need not be there
    targets = {"a": ["model.layers.0.self_attn.q_proj", "model.layers.0.mlp.experts.gate_up_proj"]}
    with pytest.raises(ConfigError, match=r"experts.*--lora_targets"):
        check_engine(EngineConfig(engine="vllm"), {"a": 8}, targets)
    check_engine(EngineConfig(engine="vllm"), {"a": 8}, {"a": targets["a"][:1]})
    check_engine(EngineConfig(), {"a": 8}, targets)


@pytest.mark.parametrize(("inner", "outer"), [(8, 12), (5, 6), (8, 3)])
def test_groups_may_be_empty_and_of_any_width(inner, outer, monkeypatch):
    """The product of torch reads 16 bytes at a time, and older ones have none."""
    draw = torch.Generator().manual_seed(0)
    x, weights = torch.randn(7, inner, generator=draw), torch.randn(4, inner, outer, generator=draw)
    ends = torch.tensor([0, 3, 3, 7], dtype=torch.int32)
    expected = torch.cat((x[:3] @ weights[1], x[3:] @ weights[3]))
    assert torch.allclose(expert_lora.grouped(x, weights, ends), expected, atol=1e-5)
    monkeypatch.delattr(torch.nn.functional, "grouped_mm", raising=False)
    assert torch.allclose(expert_lora.grouped(x, weights, ends), expected, atol=1e-5)


def test_experts_that_compute_something_else_are_left_out(monkeypatch):
    """A family's own forward decides, when the base is loaded."""
    monkeypatch.setattr(family_checks, "KNOWN", ())
    model = tiny("mixtral")
    for block in model.model.layers:
        experts = block.mlp.experts
        experts.forward = lambda *given, own=experts.forward: own(*given) * 2
    base = SharedBase(model, tiny_tokenizer(), "mixtral")
    assert not base.fused and not any("experts" in path for path in base.match_targets("a", ("all-linear",)))
    assert {path.rsplit(".", 1)[-1] for path in base.match_targets("a", ("all-linear",))} < set(ALL)
