"""Models that cap or scale: Gemma 2's scores and logits, Cohere's and Granite's logits, against transformers' own."""

from __future__ import annotations

import copy
import sys

import pytest
import torch
from helpers_models import CHARS, SPECIAL, random_ids, tiny_model, tiny_tokenizer
from torch import Tensor

from mafrt.config.agent import LoraSpec
from mafrt.core.errors import ModelError
from mafrt.engines.local.engine import LocalEngine
from mafrt.engines.logprob_check import nats_apart, self_check
from mafrt.models import family_checks
from mafrt.models.logprobs import PLAIN, FrozenHead, LogitForm, token_logprobs
from mafrt.models.packed_attention import capped_attention
from mafrt.models.shared_base import SharedBase


def cohere_or_granite(kind: str, **changes: float):
    import transformers

    shape = {
        "vocab_size": len(CHARS) + len(SPECIAL),
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "pad_token_id": 0,
        "bos_token_id": None,
        "eos_token_id": 1,
    }
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**shape, **changes)
    return getattr(transformers, f"{kind}ForCausalLM")(config).eval()


def theirs_of(kind: str):
    """A model and the same one as transformers computes it exactly."""
    if kind == "gemma2":
        model = tiny_model("gemma2")
        exact = copy.deepcopy(model)
        exact.set_attn_implementation("eager")  # transformers' sdpa leaves the cap out
        return model, exact
    changes = {"logit_scale": 0.25} if kind == "Cohere" else {"logits_scaling": 4.0, "residual_multiplier": 0.5}
    model = cohere_or_granite(kind, **changes)
    return model, copy.deepcopy(model)


@pytest.mark.parametrize("kind", ["gemma2", "Cohere", "Granite"])
def test_logits_logprobs_and_their_gradient_equal_the_models_own(kind):
    model, exact = theirs_of(kind)
    base = SharedBase(model, tiny_tokenizer(), kind)
    ids = random_ids(3, 30, seed=1)
    with torch.no_grad():
        expected = exact(input_ids=ids, use_cache=False).logits
        hidden = base.forward(ids, torch.ones_like(ids), torch.full((3,), -1))
        torch.testing.assert_close(base.logits(hidden), expected, atol=1e-5, rtol=1e-5)
    states = exact.base_model(input_ids=ids, use_cache=False).last_hidden_state.detach()[:, :-1].flatten(0, 1)
    states.requires_grad_()
    targets = ids[:, 1:].flatten()
    form = LogitForm.of(exact.config)
    reference = form(exact.get_output_embeddings()(states)).log_softmax(-1)
    torch.testing.assert_close(
        reference.gather(1, targets[:, None])[:, 0],
        expected[:, :-1].flatten(0, 1).log_softmax(-1).gather(1, targets[:, None])[:, 0],
        atol=1e-4,
        rtol=1e-4,
    )
    found, entropy = base.token_logprobs(states, targets)
    mine = torch.autograd.grad((found * torch.linspace(-1, 1, len(found))).sum() + entropy.sum(), states)[0]
    own, spread = reference.gather(1, targets[:, None])[:, 0], -(reference.exp() * reference).sum(1)
    theirs = torch.autograd.grad((own * torch.linspace(-1, 1, len(own))).sum() + spread.sum(), states)[0]
    torch.testing.assert_close(found, own, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("form", [PLAIN, LogitForm(0.3), LogitForm(cap=1.5), LogitForm(2.0, 0.7)])
def test_gradients_of_every_form(form):
    generator = torch.Generator().manual_seed(0)
    hidden, weight, bias = (torch.randn(s, generator=generator, dtype=torch.float64) for s in ((5, 3), (7, 3), (7,)))
    hidden.requires_grad_()
    targets, temperature = torch.tensor([0, 6, 3, 3, 1]), torch.tensor([1.0, 0.7, 1.3, 1.0, 0.5])

    def both(h: Tensor) -> tuple[Tensor, Tensor]:
        return token_logprobs(h, targets, FrozenHead(weight, bias, form), temperature=temperature, chunk=2)

    assert torch.autograd.gradcheck(both, (hidden,))


@pytest.mark.parametrize("mask", ["causal", "bool", "float", "one query"])
def test_capped_attention_equals_its_formula(mask, monkeypatch):
    module = sys.modules[capped_attention.__module__]
    monkeypatch.setattr(module, "MOST_SCORES", 4 * 6 * 6)  # one row at a time
    generator = torch.Generator().manual_seed(0)
    steps = 1 if mask == "one query" else 6
    q = torch.randn(3, 4, steps, 8, generator=generator, dtype=torch.float64, requires_grad=True)
    k, v = (torch.randn(3, 2, 6, 8, generator=generator, dtype=torch.float64, requires_grad=True) for _ in "kv")
    visible = torch.ones(3, 1, steps, 6, dtype=torch.bool)
    if mask != "one query":
        visible = visible.tril()
    if mask == "bool":
        visible[1, 0, :, :2] = False
        visible[1, 0, :2, 0] = True  # no query without a key
    given = {"bool": visible, "float": torch.zeros(3, 1, steps, 6).double().masked_fill(~visible, -torch.inf)}.get(mask)
    found = capped_attention(q, k, v, given, 0.5, 1.2)
    scores = 1.2 * (q @ k.repeat_interleave(2, 1).transpose(2, 3) * 0.5 / 1.2).tanh()
    weights = scores.masked_fill(~visible, -torch.inf).softmax(-1)
    expected = (weights @ v.repeat_interleave(2, 1)).transpose(1, 2)
    torch.testing.assert_close(found, expected)
    weight = torch.randn(expected.shape, generator=generator, dtype=torch.float64)
    for mine, theirs in zip(
        torch.autograd.grad((found * weight).sum(), (q, k, v)),
        torch.autograd.grad((expected * weight).sum(), (q, k, v)),
        strict=True,
    ):
        torch.testing.assert_close(mine, theirs)


def test_a_model_whose_windows_cannot_be_packed_still_caps_its_scores():
    model, exact = theirs_of("gemma2")
    model.config.use_bidirectional_attention = True  # named by its config only; nothing in this model reads it
    base = SharedBase(model, tiny_tokenizer(), "gemma2")
    assert not base.packs
    ids = random_ids(2, 20, seed=2)
    with torch.no_grad():
        hidden = base.forward(ids, torch.ones_like(ids), torch.full((2,), -1))
        expected = exact.base_model(input_ids=ids, use_cache=False).last_hidden_state
    torch.testing.assert_close(hidden, expected, atol=1e-5, rtol=1e-5)


def test_a_base_is_examined_without_gradients(monkeypatch):
    asked, own = [], family_checks._of_model

    def watched(base, ids):
        asked.append(torch.is_grad_enabled())
        return own(base, ids)

    monkeypatch.setattr(family_checks, "_of_model", watched)
    SharedBase(cohere_or_granite("Cohere"), tiny_tokenizer(), "cohere")
    assert asked and not any(asked)


@pytest.mark.parametrize("scale", [0.25, 0.0625])
def test_known_weights_are_seen_through_a_head_that_makes_logits_small(scale):
    base = SharedBase(cohere_or_granite("Cohere", logit_scale=scale), tiny_tokenizer(), "cohere")
    base.add_adapter("a", LoraSpec(rank=4), seed=0)
    check = self_check(LocalEngine(base), base)
    assert check.base_nats < 1e-5 and check.adapter_nats < 1e-5
    assert check.effect_nats > 3 * nats_apart(base)


def test_an_adapter_that_no_weights_make_heard_is_refused():
    base = SharedBase(cohere_or_granite("Cohere", logit_scale=1e-5), tiny_tokenizer(), "cohere")
    base.add_adapter("a", LoraSpec(rank=4), seed=0)
    with pytest.raises(ModelError, match="has no effect"):
        self_check(LocalEngine(base), base)
