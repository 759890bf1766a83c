"""Routers are known by what they are: beside experts, with a number for each of them."""

from __future__ import annotations

import pytest
import torch
from helpers_families import tiny
from helpers_models import tiny_tokenizer
from torch import nn

from mafrt.models.routers import routers
from mafrt.models.shared_base import SharedBase

NAMED_LIKE_ROUTERS = {
    "minimax": "self_attn.output_gate",
    "xlstm": "ffn.proj_up_gate",
    "gemma4_text": "per_layer_input_gate",
    "gemma3n_text": "altup.modality_router",
    "kimi_linear": "self_attn.forget_gate.f_a_proj",
}


@pytest.mark.slow
@pytest.mark.parametrize("family", NAMED_LIKE_ROUTERS)
def test_a_linear_layer_that_is_named_like_a_router_gets_an_adapter(family):
    base = SharedBase(tiny(family), tiny_tokenizer(), family)
    layers = base.match_targets("ann", ("all-linear",))
    assert any(path.endswith(NAMED_LIKE_ROUTERS[family]) for path in layers)
    assert not any(NAMED_LIKE_ROUTERS[family] in kind for kind in base.left_out(layers))


@pytest.mark.slow
@pytest.mark.parametrize(("family", "changes", "expected"), [
    ("mixtral", {}, "mlp.gate"), ("gpt_oss", {}, "mlp.router"), ("hunyuan_v1_moe", {}, "mlp.gate"),
    ("longcat_flash", {}, "mlp.router"), ("zaya", {}, "mlp.gate"), ("inkling_text", {}, "mlp.gate"),
    ("jetmoe", {}, "self_attention.experts.router"), ("qwen2_moe", {}, "mlp.shared_expert_gate"),
    ("llama4_text", {}, "feed_forward.router"), ("nemotron_h", {}, "mixer.gate"),
    ("gemma4_text", {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32},
     "router"),
])  # fmt: skip
def test_a_router_is_found_whatever_its_name_and_place(family, changes, expected):
    model = tiny(family, **changes)
    found = routers(model)
    assert any(path.endswith(f".{expected}") for path in found)
    linear = {path for path, module in model.named_modules() if isinstance(module, nn.Linear)}
    assert not any(path.endswith(("_proj", "w1", "w2", "w3")) for path in set(found) & linear)


class Own(nn.Module):
    """A block of somebody's own code: experts as modules, routers under names of no meaning."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.chooser = nn.Sequential(nn.Linear(16, 8), nn.Linear(8, experts))
        self.bank = nn.ModuleList(nn.Sequential(nn.Linear(16, 12), nn.Linear(12, 16)) for _ in range(experts))
        self.always = nn.Sequential(nn.Linear(16, 12), nn.Linear(12, 16))
        self.how_much = nn.Linear(16, 1)
        self.gate = nn.Linear(16, 16)
        self.heads = nn.Linear(16, 2 * experts)


def test_experts_in_a_list_have_a_router_too():
    assert routers(Own(4)) == ["chooser", "how_much"]


def test_nothing_is_a_router_without_experts():
    layer = nn.Module()
    layer.gate, layer.router, layer.one = nn.Linear(8, 8), nn.Linear(8, 4), nn.Linear(8, 1)
    layer.conv = nn.Conv1d(4, 4, 3)
    layer.heads = nn.Module()
    layer.heads.q = nn.Parameter(torch.zeros(8, 2, 4))
    assert routers(layer) == []


def test_the_list_of_blocks_is_no_router():
    model = nn.Module()
    model.blocks, model.head = nn.ModuleList(Own(4) for _ in range(4)), nn.Linear(16, 99)
    assert routers(model) == [f"blocks.{n}.{name}" for n in range(4) for name in ("chooser", "how_much")]
