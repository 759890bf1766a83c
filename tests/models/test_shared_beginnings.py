"""Beginnings that rows share, of models whose rows are not packed: a recurrence goes on from the state after them."""

from __future__ import annotations

import pytest
import torch
from helpers_families import VOCAB, in_double, tiny
from helpers_models import tiny_tokenizer

from mafrt.core.types import Request, SamplingParams, Turn
from mafrt.engines.local.engine import LocalEngine
from mafrt.models import shared_beginnings
from mafrt.models.shared_base import SharedBase
from mafrt.training.batch import split

AGENTS = ("ann", "bob")
FAMILIES = (
    "qwen3_5_text",
    *(
        pytest.param(name, marks=pytest.mark.slow)
        for name in ("gemma3n_text", "lfm2", "mixtral", "nemotron_h", "qwen3_5_moe_text", "zamba2")
    ),
)
"""recurrence beside attention, convolutions, sliding windows, both in one layer, experts"""


def team(model, model_type, invocation=None):
    base = SharedBase(model, tiny_tokenizer(), model_type)
    draw = torch.Generator().manual_seed(1)
    for seed, name in enumerate(AGENTS):
        layers = dict.fromkeys(base.match_targets(name, ["all-linear"]), (4, 2.0))
        base.place_adapter(name, 4, 8, layers, seed=seed, invocation=invocation)
        for number, parameter in enumerate(base.adapter_parameters(name)):
            if number % 2:
                parameter.data = 0.1 * torch.randn(parameter.shape, generator=draw)
            parameter.data = parameter.data.to(model.dtype)
        base.bump(name)
    return base


def batch():
    """Answers to two prompts by two agents, one row alone; padded on the right."""
    draw = torch.Generator().manual_seed(2)

    def ids(count):
        return torch.randint(5, VOCAB, (count,), generator=draw).tolist()

    prompts = ids(30), ids(23)
    rows = [[*prompts[0], *ids(n)] for n in (5, 19, 2)] + [[*prompts[1], *ids(n)] for n in (3, 8)]
    rows += [ids(27), [*prompts[0], *ids(4)]]
    padded, real = torch.zeros(len(rows), 49, dtype=torch.long), torch.zeros(len(rows), 49, dtype=torch.long)
    for number, row in enumerate(rows):
        padded[number, : len(row)], real[number, : len(row)] = torch.tensor(row), 1
    return padded, real, torch.tensor([0, 0, 0, 1, 1, 0, 1])


def learnt(base, ids, real, index):
    """Hidden states of the tokens, and the gradients of a function of them."""
    for name in AGENTS:
        for parameter in base.adapter_parameters(name):
            parameter.grad = None
    states = base.forward(ids, real, index) * real.unsqueeze(-1)
    weights = torch.randn(states.shape, generator=torch.Generator().manual_seed(5)).to(states.dtype)
    (states * weights).sum().backward()
    return states.detach(), [p.grad for name in AGENTS for p in base.adapter_parameters(name)]


def counted(base, monkeypatch):
    """Tokens of each pass of the body."""
    passes, inner = [], base.inner.forward

    def forward(*given, **named):
        passes.append(named["input_ids"].numel())
        return inner(*given, **named)

    monkeypatch.setattr(base.inner, "forward", forward)
    return passes


@pytest.mark.slow
@pytest.mark.parametrize("by_token", [False, True])
@pytest.mark.parametrize("model_type", FAMILIES)
def test_states_and_gradients_are_those_of_whole_rows(model_type, by_token, monkeypatch):
    base = team(in_double(monkeypatch, model_type), model_type)
    ids, real, index = batch()
    if by_token:  # adapters that act from a token on, some of them from within the prompt
        starts = torch.tensor([31, 31, 12, 4, 4, 0, 12])
        index = torch.where(torch.arange(49) < starts.unsqueeze(1), -1, index.unsqueeze(1))
    assert base.continues and not base.packs and base.shares
    passes = counted(base, monkeypatch)
    found, gradients = learnt(base, ids, real, index)
    together = sum(passes)
    base.continues = False
    expected, others = learnt(base, ids, real, index)
    assert together < 0.75 * (sum(passes) - together)
    assert found.dtype == torch.float64
    assert (found - expected).abs().max() <= 1e-11 * expected.abs().max()
    for one, other in zip(gradients, others, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            assert (one - other).abs().max() <= 1e-9 * max(1.0, float(other.abs().max()))


@pytest.mark.slow
def test_an_adapter_that_does_not_learn_acts_and_gets_no_gradient():
    base = team(tiny("qwen3_5_text"), "qwen3_5_text")
    ids, real, index = batch()
    whole = base.forward(ids, real, index)
    states = base.forward(ids, real, index, train=["bob"])
    assert torch.allclose(states, whole, atol=1e-5)
    states.sum().backward()
    assert all(p.grad is None for p in base.adapter_parameters("ann"))
    assert all(p.grad is not None for p in base.adapter_parameters("bob"))


@pytest.mark.slow
def test_recomputed_blocks_read_whole_rows_with_the_same_gradients(monkeypatch):
    base = team(in_double(monkeypatch, "qwen3_5_text"), "qwen3_5_text")
    ids, real, index = batch()
    found, gradients = learnt(base, ids, real, index)
    base.gradient_checkpointing(True)
    assert not base.shares
    passes = counted(base, monkeypatch)
    expected, others = learnt(base, ids, real, index)
    assert passes == [ids.numel()]
    assert (found - expected).abs().max() <= 1e-11 * expected.abs().max()
    assert all(torch.allclose(one, other, rtol=0, atol=1e-9) for one, other in zip(gradients, others, strict=True))
    base.gradient_checkpointing(False)
    assert base.shares


def test_rows_without_a_common_beginning_are_read_whole():
    base = team(tiny("qwen3_5_text"), "qwen3_5_text")
    ids = torch.randint(5, VOCAB, (3, 20), generator=torch.Generator().manual_seed(0))
    real = torch.ones(ids.shape, dtype=torch.bool)
    assert shared_beginnings.forward(base, ids, real, torch.zeros(3, dtype=torch.long), None) is None


def test_a_cache_that_is_not_known_means_whole_rows():
    assert not team(tiny("rwkv"), "rwkv").continues


def layers_read(base, monkeypatch):
    """Tokens that pass through a recurrent and an attending block, in play and in learning."""
    counts = {}
    for kind, path in (("delta", "layers.0"), ("attention", "layers.3")):
        block, counts[kind] = base.inner.get_submodule(path), 0

        def forward(states, *given, kind=kind, inner=block.forward, **named):
            counts[kind] += states.shape[0] * states.shape[1]
            return inner(states, *given, **named)

        monkeypatch.setattr(block, "forward", forward)
    return counts


def test_eight_answers_share_their_prompt_in_play_and_in_learning(monkeypatch):
    """Of gated delta rules beside attention: blocks read the prompt once, and compute what separate rows would."""
    base = team(tiny("qwen3_5_text"), "qwen3_5_text")
    assert {type(base.inner.layers[n]).__name__ for n in (0, 3)} == {"Qwen3_5DecoderLayer"}
    assert hasattr(base.inner.layers[0], "linear_attn") and hasattr(base.inner.layers[3], "self_attn")
    prompt = torch.randint(5, VOCAB, (120,), generator=torch.Generator().manual_seed(4)).tolist()
    sampling = SamplingParams(max_new_tokens=6, temperature=1.0)
    asked = [Request(prompt, "ann", sampling, seed) for seed in range(8)]
    engine = LocalEngine(base, eos_ids=())
    engine.generate(asked[:1])
    counts = layers_read(base, monkeypatch)
    together = engine.generate(asked)
    # Each answer's first token follows from the prompt, and its last one is read by nobody.
    assert counts == dict.fromkeys(counts, 120 + 8 * 5)
    counts.update(dict.fromkeys(counts, 0))
    alone = [engine.generate([each])[0] for each in asked]
    assert counts == dict.fromkeys(counts, 8 * (120 + 5))
    assert [each.ids for each in together] == [each.ids for each in alone]
    for one, other in zip(together, alone, strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)
    ids = torch.tensor([[*prompt, *each.ids] for each in together])
    rows = ids, torch.ones_like(ids), torch.zeros(8, dtype=torch.long)
    counts.update(dict.fromkeys(counts, 0))
    states, gradients = learnt(base, *rows)
    assert 120 + 8 * 6 <= counts["delta"] <= 120 + 8 * 7  # a row keeps a token of its own before the answer
    assert counts["delta"] == counts["attention"]
    base.continues = False
    counts.update(dict.fromkeys(counts, 0))
    whole, others = learnt(base, *rows)
    assert counts == dict.fromkeys(counts, 8 * (120 + 6))
    assert (states - whole).abs().max() < 1e-4 * whole.abs().max()
    for one, other in zip(gradients, others, strict=True):
        assert (one is None) == (other is None)
        assert one is None or (one - other).abs().max() < 1e-3 * max(1.0, float(other.abs().max()))


def turn(prompt, answer, agent="ann"):
    return Turn(agent, prompt, answer, [0.0] * len(answer), "eos", "", turn=0, env_step=0, adapter_version=0)


def test_answers_of_one_prompt_share_a_micro_batch_that_is_counted_with_its_padding():
    turns = [turn([k] * 100, [n] * n) for n in (10, 30, 20) for k in (1, 2)]
    # A prompt and three answers as long as the longest.
    assert split(turns, 190, shares=True) == [[0, 4, 2], [1, 5, 3]]
    assert split(turns, 189, shares=True) == [[0, 4], [2], [1, 5], [3]]
    assert split(turns, 380, shares=True) == [[0, 4, 2, 1, 5, 3]]
    assert split(turns, 160, packs=True) == [[0, 4, 2], [1, 5, 3]]
