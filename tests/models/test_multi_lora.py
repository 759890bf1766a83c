"""The mixed-adapter forward and backward against PEFT with `set_adapter`, which is the independent reference."""

from __future__ import annotations

import copy
import hashlib
from contextlib import nullcontext

import pytest
import torch
from helpers_models import ALL, ATTENTION, add_random_adapter, random_ids, tiny_base, tiny_model
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mafrt.config.agent import LoraSpec
from mafrt.core.errors import ConfigError
from mafrt.models.compute import reference

FORMS = ("reference", "own")
"""of the formulas: plain torch, and the one made for this device"""
SPECS = {"solver": (4, 8.0, ALL), "verifier": (2, 16.0, ATTENTION), "coder": (7, 7.0, ("down_proj", "q_proj"))}
TOLERANCE = 1e-5


def computed(form):
    return reference() if form == "reference" else nullcontext()


def team_base(kind="qwen3", **model_settings):
    base = tiny_base(kind, **model_settings)
    for i, (name, (rank, alpha, targets)) in enumerate(SPECS.items()):
        add_random_adapter(base, name, rank, alpha, targets, seed=i)
    return base


def peft_twin(base, kind="qwen3", **model_settings):
    """The same model and adapters in PEFT, built from the same seed and our exported tensors."""
    from peft import LoraConfig, get_peft_model, set_peft_model_state_dict

    model = None
    for name, (rank, alpha, targets) in SPECS.items():
        config = LoraConfig(r=rank, lora_alpha=alpha, target_modules=list(targets), task_type="CAUSAL_LM")
        if model is None:
            model = get_peft_model(tiny_model(kind, **model_settings), config, adapter_name=name)
        else:
            model.add_adapter(name, config)
        missing = set_peft_model_state_dict(model, base.adapter_state(name), adapter_name=name)
        assert not missing.unexpected_keys
    return model.eval()


def peft_gradients(model, name):
    """PEFT's gradients of one adapter under our key names."""
    return {
        key.replace(f".{name}.weight", ".weight"): p.grad.clone()
        for key, p in model.named_parameters()
        if f".{name}.weight" in key and p.grad is not None
    }


def our_gradients(base, name):
    layers = base.adapter_layers(name)
    grads = {}
    for path, (a, b) in layers.items():
        if a.grad is not None:
            grads[f"base_model.model.{path}.lora_A.weight"] = a.grad.clone()
        if b.grad is not None:
            grads[f"base_model.model.{path}.lora_B.weight"] = b.grad.clone()
    return grads


def loss_weights(base, rows, steps, *, seed):
    """`[rows, steps, V]` random weights of a linear loss, scaled so that gradients are about 1 at most."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, steps, base.config.vocab_size, generator=generator) / 200


def clear(base):
    for name in base.adapters:
        for parameter in base.adapter_parameters(name):
            parameter.grad = None


def run(base, ids, index, weights, *, form="own", mask=None, train=None):
    """Logits of all rows and every adapter's gradient of `sum(logits * weights)`."""
    clear(base)
    with computed(form):
        hidden = base.forward(ids, mask, index, train=train)
        logits = base.logits(hidden)
        (logits * weights).sum().backward()
    return logits.detach(), {name: our_gradients(base, name) for name in base.adapters}


def peft_run(model, ids, names, weights):
    """The same from PEFT, one pass per adapter (None: adapters disabled) over that adapter's rows."""
    logits = torch.zeros_like(weights)
    grads = {name: {} for name in SPECS}
    for name in dict.fromkeys(names):
        rows = [i for i, n in enumerate(names) if n == name]
        model.zero_grad(set_to_none=True)
        if name is None:
            with model.disable_adapter(), torch.no_grad():
                logits[rows] = model(input_ids=ids[rows]).logits
            continue
        model.set_adapter(name)
        out = model(input_ids=ids[rows]).logits
        (out * weights[rows]).sum().backward()
        logits[rows] = out.detach()
        grads[name] = peft_gradients(model, name)
    return logits, grads


def assert_same_gradients(ours, theirs):
    assert ours.keys() == theirs.keys()
    for name in ours:
        assert ours[name].keys() == theirs[name].keys(), name
        for key in ours[name]:
            torch.testing.assert_close(
                ours[name][key],
                theirs[name][key],
                atol=TOLERANCE,
                rtol=3 * TOLERANCE,
                msg=lambda m, key=key, name=name: f"{name} {key}: {m}",
            )


@pytest.mark.parametrize("kind", ["qwen3", "qwen2", "llama"])
@pytest.mark.parametrize("form", FORMS)
def test_mixed_unsorted_unequal_batch_equals_peft(kind, form):
    base, peft = team_base(kind), peft_twin(team_base(kind), kind)
    names = ["coder", "solver", None, "solver", "verifier", "coder", "solver", None, "solver"]
    ids = random_ids(len(names), 12)
    weights = loss_weights(base, len(names), 12, seed=1)
    index = torch.tensor([base.adapter_index(n) for n in names])
    logits, grads = run(base, ids, index, weights, form=form)
    expected, expected_grads = peft_run(peft, ids, names, weights)
    torch.testing.assert_close(logits, expected, atol=TOLERANCE, rtol=TOLERANCE)
    assert_same_gradients(grads, expected_grads)


def test_adapters_change_the_logits_and_none_is_the_bare_base():
    base = team_base()
    ids = random_ids(4, 8)
    with torch.no_grad():
        logits = base.logits(base.forward(ids[:1].repeat(4, 1), None, torch.tensor([0, 1, 2, -1])))
        bare = tiny_model()(input_ids=ids[:1]).logits[0]
    torch.testing.assert_close(logits[3], bare, atol=1e-6, rtol=1e-6)
    for row in range(3):
        assert (logits[row] - bare).abs().max() > 0.01


def test_a_fresh_adapter_changes_nothing():
    base = tiny_base()
    base.add_adapter("new", LoraSpec(rank=4), seed=3)
    ids = random_ids(2, 8)
    with torch.no_grad():
        assert torch.equal(
            base.forward(ids, None, torch.tensor([0, 0])), base.forward(ids, None, torch.tensor([-1, -1]))
        )


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_an_index_per_token_equals_peft_where_a_row_is_one_adapters(form):
    """Constant rows of a `[B, T]` index are the `[B]` index; PEFT has no index per token to compare with."""
    base, peft = team_base(), peft_twin(team_base())
    names = ["verifier", None, "solver", "verifier"]
    ids = random_ids(4, 9)
    weights = loss_weights(base, 4, 9, seed=2)
    index = torch.tensor([base.adapter_index(n) for n in names])[:, None].expand(4, 9)
    logits, grads = run(base, ids, index, weights, form=form)
    expected, expected_grads = peft_run(peft, ids, names, weights)
    torch.testing.assert_close(logits, expected, atol=TOLERANCE, rtol=TOLERANCE)
    assert_same_gradients(grads, expected_grads)


@pytest.mark.parametrize("form", FORMS)
def test_an_adapter_that_starts_with_the_action_equals_a_cache_filled_without_it(form):
    """No adapter over the prompt, the agent's from its own words on: the same as decoding on the bare base's cache."""
    from transformers import DynamicCache

    base = team_base()
    ids = random_ids(4, 12)
    agents = torch.tensor([2, 0, 1, 0])
    index = agents[:, None].repeat(1, 12)
    index[:, :7] = -1
    index[3, 7:9] = -1
    with torch.no_grad(), computed(form):
        whole = base.forward(ids, None, index)
        for row in range(4):
            cut = 9 if row == 3 else 7
            cache = DynamicCache(config=base.model.config)
            first = base.forward(ids[row : row + 1, :cut], None, torch.tensor([-1]), past_key_values=cache)
            rest = base.forward(ids[row : row + 1, cut:], None, agents[row : row + 1], past_key_values=cache)
            torch.testing.assert_close(whole[row], torch.cat([first, rest], 1)[0], atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.slow
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_any_grouping_gives_each_row_what_it_gets_alone(data):
    """Over random groupings, `[B]` or `[B, T]`: both forms agree with each other and with every row run by itself."""
    base = _property_base()
    rows, steps = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 5))
    per_token = data.draw(st.booleans())
    shape = (rows, steps) if per_token else (rows,)
    count = rows * steps if per_token else rows
    index = torch.tensor(data.draw(st.lists(st.integers(-1, 2), min_size=count, max_size=count))).view(shape)
    ids = random_ids(rows, steps, seed=data.draw(st.integers(0, 99)))
    weights = loss_weights(base, rows, steps, seed=rows)
    train = set(data.draw(st.sampled_from([list(SPECS), ["solver"], ["coder", "verifier"]])))
    # Without any gradient there is nothing to go backward through.
    index.view(-1)[0] = base.adapter_index(min(train))
    plain, plain_grads = run(base, ids, index, weights, form="reference", train=train)
    found, found_grads = run(base, ids, index, weights, form="own", train=train)
    torch.testing.assert_close(plain, found, atol=TOLERANCE, rtol=TOLERANCE)
    assert_same_gradients(plain_grads, found_grads)
    present = {name for name, k in base.adapters.items() if (index == k).any()}
    assert {name for name, g in plain_grads.items() if g} == present & train
    row = data.draw(st.integers(0, rows - 1))
    with torch.no_grad():
        alone = base.logits(base.forward(ids[row : row + 1], None, index[row : row + 1]))
    torch.testing.assert_close(found[row], alone[0], atol=TOLERANCE, rtol=TOLERANCE)


_BASE = []


def _property_base():
    if not _BASE:
        _BASE.append(team_base())
    return _BASE[0]


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_nothing(side):
    base = team_base()
    lengths, width = [5, 9, 7, 9], 13
    index = torch.tensor([1, -1, 0, 1])
    ids, mask = torch.zeros(4, width, dtype=torch.long), torch.zeros(4, width, dtype=torch.long)
    places = []
    for row, length in enumerate(lengths):
        place = slice(width - length, width) if side == "left" else slice(0, length)
        ids[row, place], mask[row, place] = random_ids(1, length, seed=row)[0], 1
        places.append(place)
    weights = loss_weights(base, 4, width, seed=3)
    weights = weights * mask.unsqueeze(-1)
    logits, padded = run(base, ids, index, weights, mask=mask)
    total = {name: {} for name in base.adapters}
    for row, place in enumerate(places):
        if index[row] < 0:
            with torch.no_grad():
                alone = base.logits(base.forward(ids[row : row + 1, place], None, index[row : row + 1]))
        else:
            alone, grads = run(base, ids[row : row + 1, place], index[row : row + 1], weights[row : row + 1, place])
            for name in grads:
                for key, value in grads[name].items():
                    total[name][key] = total[name].get(key, 0) + value
        torch.testing.assert_close(logits[row, place], alone[0], atol=TOLERANCE, rtol=TOLERANCE)
    assert_same_gradients(padded, total)


def digest(tensors):
    return hashlib.sha256(b"".join(t.detach().contiguous().numpy().tobytes() for t in tensors)).hexdigest()


@pytest.mark.parametrize("form", FORMS)
def test_training_one_adapter_leaves_the_base_and_all_others_bit_identical(form):
    base = team_base()
    frozen = [p for p in base.model.parameters() if not p.requires_grad]
    before = {name: digest(base.adapter_parameters(name)) for name in base.adapters}
    base_before = digest(frozen)
    optimizers = {n: torch.optim.AdamW(base.adapter_parameters(n), lr=0.1, weight_decay=0.1) for n in base.adapters}
    ids, index = random_ids(6, 8), torch.tensor([0, 1, 2, -1, 1, 0])
    for _ in range(3):
        with computed(form):
            base.forward(ids, None, index, train={"verifier"}).pow(2).sum().backward()
        for optimizer in optimizers.values():
            optimizer.step()
            optimizer.zero_grad()
        base.bump("verifier")
    after = {name: digest(base.adapter_parameters(name)) for name in base.adapters}
    assert digest(frozen) == base_before
    assert after["verifier"] != before["verifier"]
    assert after["solver"] == before["solver"] and after["coder"] == before["coder"]
    assert base.versions == {"solver": 1, "verifier": 4, "coder": 1}


def test_frozen_adapters_still_act_and_pass_gradients_through():
    base = team_base()
    ids, index = random_ids(2, 6), torch.tensor([[0, 0, 0, 1, 1, 1]]).repeat(2, 1)
    weights = torch.ones(2, 6, base.config.vocab_size)
    both, all_grads = run(base, ids, index, weights)
    one, grads = run(base, ids, index, weights, train={"solver"})
    assert torch.equal(both, one)
    assert grads["verifier"] == {}
    assert_same_gradients({"solver": grads["solver"]}, {"solver": all_grads["solver"]})


@pytest.mark.parametrize("form", FORMS)
def test_bump_is_what_makes_a_change_visible_to_cached_weights(form):
    base = team_base()
    ids, index = random_ids(3, 6), torch.tensor([0, 1, 2])
    with torch.no_grad(), computed(form):
        before = base.forward(ids, None, index)
        for parameter in base.adapter_parameters("solver"):
            parameter.add_(0.3)
        base.bump("solver")
        after = base.forward(ids, None, index)
    assert (after[0] - before[0]).abs().max() > 0.01
    assert torch.equal(after[1:], before[1:])


@pytest.mark.parametrize("form", FORMS)
def test_gradient_checkpointing_gives_the_same_gradients(form):
    base = team_base()
    ids, index = random_ids(5, 8), torch.tensor([0, 2, -1, 1, 0])
    weights = loss_weights(base, 5, 8, seed=4)
    logits, grads = run(base, ids, index, weights, form=form)
    base.gradient_checkpointing(True)
    kept_logits, kept = run(base, ids, index, weights, form=form)
    # A forward in between must not disturb the recomputation of the first one's blocks.
    clear(base)
    hidden = base.forward(ids, None, index)
    with torch.no_grad():
        base.forward(ids[:2], None, torch.tensor([1, 1]))
    (base.logits(hidden) * weights).sum().backward()
    late = {name: our_gradients(base, name) for name in base.adapters}
    base.gradient_checkpointing(False)
    assert torch.equal(logits, kept_logits)
    assert_same_gradients(grads, kept)
    assert_same_gradients(grads, late)
    assert_same_gradients(run(base, ids, index, weights, form=form)[1], grads)


def test_a_cache_grown_step_by_step_equals_one_pass():
    from transformers import DynamicCache

    base = team_base()
    ids, index = random_ids(5, 10), torch.tensor([2, 0, -1, 1, 0])
    mask = torch.ones(5, 10, dtype=torch.long)
    mask[1, :3] = mask[4, :1] = 0
    with torch.no_grad():
        whole = base.forward(ids, mask, index)
        cache = DynamicCache(config=base.model.config)
        parts = [base.forward(ids[:, :6], mask[:, :6], index, past_key_values=cache)]
        for t in range(6, 10):
            parts.append(base.forward(ids[:, t : t + 1], mask[:, : t + 1], index, past_key_values=cache))
    real = mask.bool()
    torch.testing.assert_close(torch.cat(parts, 1)[real], whole[real], atol=TOLERANCE, rtol=TOLERANCE)


def test_a_four_dimensional_mask_is_passed_through():
    base = team_base()
    ids, index = random_ids(3, 7), torch.tensor([2, 0, 1])
    causal = torch.full((7, 7), torch.finfo(torch.float32).min).triu(1).expand(3, 1, 7, 7)
    with torch.no_grad():
        given, own = base.forward(ids, causal, index), base.forward(ids, None, index)
    torch.testing.assert_close(given, own, atol=TOLERANCE, rtol=TOLERANCE)


def test_an_error_inside_the_forward_leaves_no_routing_behind():
    base = team_base()
    with pytest.raises(IndexError):
        base.forward(torch.tensor([[10_000]]), None, torch.tensor([0]))
    assert base.context.routing is None
    with torch.no_grad():
        inside = base.model(input_ids=random_ids(1, 4)).logits
        torch.testing.assert_close(inside, tiny_model()(input_ids=random_ids(1, 4)).logits, atol=1e-6, rtol=1e-6)


def test_a_base_in_bfloat16_keeps_float32_adapters_and_finite_gradients():
    base = team_base()
    _, exact_grads = run(base, *_bf16_batch(base))
    half = team_base()
    half.model.to(torch.bfloat16)
    for name in half.adapters:
        for parameter in half.adapter_parameters(name):
            parameter.data = parameter.data.float()
    half.bump("solver")
    logits, grads = run(half, *_bf16_batch(base))
    assert logits.dtype == torch.bfloat16
    for name in grads:
        for key, value in grads[name].items():
            assert value.dtype == torch.float32
            close = torch.nn.functional.cosine_similarity(value.flatten(), exact_grads[name][key].flatten(), dim=0)
            assert close > 0.98, key


def _bf16_batch(base):
    weights = loss_weights(base, 3, 6, seed=5)
    return random_ids(3, 6), torch.tensor([0, 1, 2]), weights


class Halved(torch.nn.Module):
    """Stands for a quantised layer: not an `nn.Linear`, computes `x W^T` from weights in a format of its own."""

    def __init__(self, linear):
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.register_buffer("weight", linear.weight.detach() / 2)
        self.bias = linear.bias

    def forward(self, x):
        return torch.nn.functional.linear(x, self.weight * 2, self.bias)


@pytest.mark.parametrize("form", FORMS)
def test_a_base_layer_of_another_kind_is_just_called(form):
    base = team_base()
    plain, grads = run(base, *_bf16_batch(base), form=form)
    odd = copy.deepcopy(base)
    for module in odd.model.modules():
        if hasattr(module, "base_layer"):
            module.base_layer = Halved(module.base_layer)
    logits, odd_grads = run(odd, *_bf16_batch(base), form=form)
    torch.testing.assert_close(logits, plain, atol=TOLERANCE, rtol=TOLERANCE)
    assert_same_gradients(odd_grads, grads)


def test_initial_weights_depend_on_seed_and_name_only():
    first, second = tiny_base(), tiny_base()
    spec = LoraSpec(rank=3, alpha=6.0, targets=ATTENTION)
    for name in ("a", "b"):
        first.add_adapter(name, spec, seed=1)
    for name in ("b", "c", "a"):
        second.add_adapter(name, spec, seed=1)
    for name in ("a", "b"):
        ours, theirs = first.adapter_state(name), second.adapter_state(name)
        assert all(torch.equal(ours[key], theirs[key]) for key in ours)
    key = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    assert not torch.equal(first.adapter_state("a")[key], first.adapter_state("b")[key])
    # kaiming_uniform with a = sqrt(5) is uniform in +-1/sqrt(in): in = 32 gives .1768.
    assert 0.15 < first.adapter_state("a")[key].abs().max() <= 0.1768


def test_wrong_names_and_targets_are_one_sentence():
    base = team_base()
    with pytest.raises(ConfigError, match="second adapter called 'solver'"):
        base.add_adapter("solver", LoraSpec(), seed=0)
    with pytest.raises(ConfigError, match="found target 'query', which is no linear layer"):
        base.add_adapter("x", LoraSpec(targets=("q_proj", "query")), seed=0)
    with pytest.raises(ConfigError, match=r"found adapter name 'nobody'.*solver, verifier, coder"):
        base.adapter_index("nobody")
    with pytest.raises(ValueError, match="found adapter index"):
        base.forward(random_ids(1, 3), None, torch.tensor([7]))
    with pytest.raises(ValueError, match="adapter_index of shape"):
        base.forward(random_ids(2, 3), None, torch.tensor([0]))
    assert base.adapter_index(None) == -1 and list(base.adapters) == list(SPECS)
