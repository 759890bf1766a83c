"""What a GPU computes in fewer launches equals the reference; it is plain torch, so a CPU can tell."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch
from helpers_families import tiny
from helpers_models import ALL, ATTENTION, add_random_adapter, random_ids, tiny_base, tiny_tokenizer

from bench._gpu.pretend_cuda import PretendCuda
from mafrt.models import compute
from mafrt.models.compute import Compute
from mafrt.models.gpu import adapted_linear, sampling
from mafrt.models.gpu.compute import GpuCompute
from mafrt.models.shared_base import SharedBase


class AsOnGpu(GpuCompute):
    """But for the attention and the decoder, which have tests of their own."""

    packed_attention = Compute.packed_attention
    decode_model = Compute.decode_model
    family_tokens = Compute.family_tokens


def base_of(form, monkeypatch, kind, ranks):
    monkeypatch.setitem(compute._registered, "cpu", form)
    base = tiny_base(kind)
    for number, rank in enumerate(ranks):
        targets = (ALL, ATTENTION, ("up_proj", "k_proj"))[number % 3]
        add_random_adapter(base, f"agent{number}", rank=rank, targets=targets, seed=number)
    return base


def scores_and_grads(base, index, train, checkpointing, steps=2):
    base.gradient_checkpointing(checkpointing)
    ids = random_ids(len(index), 11, seed=4)
    mask = (torch.arange(11) < torch.tensor([11, 7, 9, 11, 3, 8])[: len(index), None]).long()
    done = []
    for _ in range(steps):  # gradients of several passes add up
        hidden = base.forward(ids, mask, torch.tensor(index), train=train)
        real = mask[:, 1:].bool()
        logprobs, _ = base.token_logprobs(hidden[:, :-1][real], ids[:, 1:][real])
        logprobs.sum().backward()
        done.append(logprobs.detach())
    return done, {n: [p.grad for p in base.adapter_parameters(n)] for n in base.adapters}


@pytest.mark.cases(8)
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize(
    ("ranks", "index", "train"),
    [
        ((4,), [0, 0, -1, 0], None),
        ((3, 3, 3), [0, 1, 2, 2, -1, 0], None),
        ((2, 5, 3), [0, 1, 2, 2, -1, 0], None),
        ((2, 5, 3), [1, 1, 0], ["agent1"]),
    ],
)
@pytest.mark.parametrize("kind", ["qwen3", "qwen2"])
def test_adapted_layers_equal_the_reference(monkeypatch, kind, ranks, index, train, checkpointing):
    found = scores_and_grads(base_of(AsOnGpu(), monkeypatch, kind, ranks), index, train, checkpointing)
    wanted = scores_and_grads(base_of(Compute(), monkeypatch, kind, ranks), index, train, checkpointing)
    for own, theirs in zip(found[0], wanted[0], strict=True):
        torch.testing.assert_close(own, theirs, atol=1e-5, rtol=1e-5)
    for name in wanted[1]:
        for own, theirs in zip(found[1][name], wanted[1][name], strict=True):
            assert (own is None) == (theirs is None), name
            if theirs is not None:
                assert own.dtype == torch.float32 and own.is_contiguous()
                torch.testing.assert_close(own, theirs, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("shape", [(3, 5, 16), (4, 16)])
def test_a_model_may_write_into_what_a_layer_returns(shape):
    weight, down, up = torch.randn(8, 16), torch.randn(2, 16), torch.randn(8, 2)
    found = []
    for inplace in (True, False):
        x = torch.ones(shape).requires_grad_()
        mask = torch.ones(shape[0], 1, 2)
        out = adapted_linear._Adapted.apply(x, weight, None, down, up, mask)
        out = out.mul_(3.0) if inplace else out * 3.0
        out.sum().backward()
        found.append((out.detach(), x.grad))
    torch.testing.assert_close(*found)


def test_layers_whose_weight_is_no_plain_one_are_left_to_the_reference(monkeypatch):
    class Own(torch.nn.Linear):
        pass

    base = base_of(AsOnGpu(), monkeypatch, "qwen3", (3,))
    whole = scores_and_grads(base, [0, 0], None, False, steps=1)
    layer = next(layer for path, layer in base.adapted_layers.items() if "o_proj" in path)
    layer.base_layer.__class__ = Own
    assert not adapted_linear.serves(layer)
    for p in base.adapter_parameters("agent0"):
        p.grad = None
    part = scores_and_grads(base, [0, 0], None, False, steps=1)
    torch.testing.assert_close(part[0], whole[0], atol=1e-5, rtol=1e-5)


@pytest.mark.slow
def test_adapters_of_all_layers_are_laid_out_and_their_gradients_taken_back_together():
    launches = {}
    for layers in (1, 3):
        with PretendCuda() as gpu:
            base = tiny_base(layers=layers)
            base = type(base)(base.model.to("cuda"), base.tokenizer, base.name)
            for number in range(2):
                add_random_adapter(base, f"agent{number}", rank=3, seed=number)
            ids = random_ids(4, 9, seed=1).to("cuda")
            hidden = base.forward(ids, None, torch.tensor([0, 1, 1, 0]))
            gpu.clear()
            hidden.sum().backward()
            launches[layers] = gpu.launches["_foreach_copy_"], gpu.launches["_to_copy"]
    assert launches[1][0] <= 2 and launches[3][0] <= 4
    assert launches[1][1] == launches[3][1] == 0


def test_layers_that_no_loss_depends_on_get_no_zeros_to_copy():
    with PretendCuda():
        base = tiny_base(layers=2)
        base = type(base)(base.model.to("cuda"), base.tokenizer, base.name)
        add_random_adapter(base, "agent", rank=3)
        last = base.model.model.layers[1].self_attn
        last.register_forward_hook(lambda module, args, out: (out[0].detach(), *out[1:]))
        base.forward(random_ids(2, 9, seed=1).to("cuda"), None, torch.tensor([0, 0])).sum().backward()
        moved = [bool(p.grad.any()) for p in base.adapter_parameters("agent") if p.grad is not None]
    assert any(moved) and not all(moved)


@pytest.mark.parametrize("size", [128, 1000, 4224])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tokens_are_drawn_as_by_the_reference(size, dtype):
    draw = torch.Generator().manual_seed(size)
    logits = (3 * torch.randn(400, size, generator=draw)).to(dtype)
    logits[:40, ::3] = -torch.inf
    temperatures = torch.tensor([1.0, 0.0, 0.3, 1.7, 1e-6]).repeat(80)
    uniforms = torch.rand(400, generator=draw)
    uniforms[:5] = 0.0
    uniforms[5:10] = 1 - 2**-24
    ids, logprobs, totals = sampling.sample(logits, temperatures, uniforms)
    theirs = Compute().sample(logits, temperatures, uniforms)
    # A uniform number within rounding of an edge may fall on either side.
    same = ids == theirs[0]
    assert same.float().mean() > 0.98
    torch.testing.assert_close(logprobs[same], theirs[1][same], atol=2e-5, rtol=2e-5)
    assert totals.isfinite().all() and bool((logits.gather(1, ids[:, None]) > -torch.inf).all())
    assert not logprobs[temperatures == 0].any() and bool((ids < size).all())


def test_draws_have_the_probabilities_of_the_softmax():
    logits = torch.tensor([[0.0, 1.0, -torch.inf, 2.0]]).expand(60_000, 4)
    uniforms = (torch.arange(60_000) + 0.5) / 60_000
    ids, logprobs, _ = sampling.sample(logits, torch.ones(60_000), uniforms)
    wanted = logits[0].softmax(0)
    torch.testing.assert_close(ids.bincount(minlength=4) / 60_000, wanted, atol=1e-4, rtol=0)
    torch.testing.assert_close(logprobs.exp(), wanted[ids], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf])
def test_rows_that_cannot_be_drawn_from_are_told(wrong):
    logits = torch.randn(4, 300)
    logits[1, 7] = wrong
    logits[2] = -torch.inf
    ids, _, totals = sampling.sample(logits, torch.ones(4), torch.rand(4))
    assert totals.isfinite().tolist() == [True, False, False, True]
    assert bool(((ids >= 0) & (ids < 384)).all()), "a place to look at, whatever it holds"


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("kind", "shapes"), [("qwen3", {"plain"}), ("gemma3_text", {"one more"}), ("qwen3_5_text", {"one more", "gated"})]
)
def test_norms_of_every_form_are_few_launches_and_equal_transformers(kind, shapes, dtype):
    model = tiny(kind).to(dtype).requires_grad_(False)
    torch.manual_seed(0)
    theirs = [module for module in model.modules() if "RMSNorm" in type(module).__name__]
    for norm in theirs:
        norm.weight.copy_(torch.randn(len(norm.weight)))
    ours, found = copy.deepcopy(model), set()
    GpuCompute().adopt(SimpleNamespace(model=ours))
    for own, norm in zip([m for m in ours.modules() if "RMSNorm" in type(m).__name__], theirs, strict=True):
        form = own.form
        found.add("gated" if form.gated else "one more" if form.plus_one else "plain")
        given = [torch.randn(5, len(norm.weight)).to(dtype).requires_grad_() for _ in range(2 if form.gated else 1)]
        made = own(*given), norm(*given)
        grads = [torch.autograd.grad(out.float().square().sum(), given) for out in made]
        for one, other in zip((made[0], *grads[0]), (made[1], *grads[1]), strict=True):
            assert one.dtype == other.dtype
            torch.testing.assert_close(one, other, **({} if dtype == torch.float32 else {"rtol": 0.05, "atol": 0.1}))
    assert found == shapes
    with PretendCuda() as gpu, torch.no_grad():
        on_gpu = SharedBase(model.to("cuda"), tiny_tokenizer(), kind)
        for norm in (m for m in on_gpu.model.modules() if "RMSNorm" in type(m).__name__):
            given = [torch.randn(5, len(norm.weight)).to(dtype).to("cuda") for _ in range(2 if norm.form.gated else 1)]
            gpu.clear()
            norm(*given)
            assert gpu.launched <= (5 if norm.form.gated else 2)
