"""Sampling against the exact distribution; the reference for the filters is transformers' own."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from mafrt.core.errors import ConfigError, MafrtError
from mafrt.core.types import SamplingParams
from mafrt.cpu import sample
from mafrt.engines.local.sampler import NonFiniteLogitsError, Sampler, check_sampling, draw_uniforms
from mafrt.models.compute import draw, truncate

CASES = [
    SamplingParams(),
    SamplingParams(temperature=0.6),
    SamplingParams(temperature=1.7),
    SamplingParams(top_k=4),
    SamplingParams(top_p=0.7),
    SamplingParams(temperature=1.3, top_k=6, top_p=0.8),
    SamplingParams(top_k=1000, top_p=0.999),
    SamplingParams(top_p=1e-6),
]


@pytest.fixture(scope="module", params=["the machine's", "torch"], autouse=True)
def kernels(request):
    """With the kernel in C, where the machine has it, and without."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "torch":
            patch.setattr(sample, "serves", lambda logits: False)
        yield


def random_logits(rows=1, vocabulary=12, seed=0):
    return 1.5 * torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed))


def reference(logits, params):
    """The distribution `generate` would sample from, `[rows, V]`."""
    scores = TemperatureLogitsWarper(float(params.temperature))(None, logits)
    if params.top_k:
        scores = TopKLogitsWarper(params.top_k)(None, scores)
    if params.top_p < 1:
        scores = TopPLogitsWarper(params.top_p)(None, scores)
    return scores.softmax(-1)


def sampler(params, seeds, adapters=None, steps=1):
    return Sampler(params, seeds, adapters or [None] * len(params), steps)


@pytest.mark.slow
@pytest.mark.parametrize("params", CASES, ids=str)
def test_frequencies_and_logprobs_are_those_of_the_filtered_softmax(params):
    draws, logits = 20000, random_logits()
    expected = reference(logits, params)[0]
    ids, logprobs = sampler([params] * draws, range(draws))(logits.expand(draws, -1), 0)
    torch.testing.assert_close(logprobs, expected.log()[ids], atol=1e-5, rtol=1e-5)
    counts = torch.bincount(ids, minlength=len(expected)).double()
    possible = expected > 0
    assert counts[~possible].sum() == 0
    chi2 = ((counts - draws * expected.double()) ** 2 / (draws * expected.double()))[possible].sum()
    # 11 degrees of freedom at most: above 37 in one case of 10,000; the seeds are fixed.
    assert chi2 < 37, chi2


def test_temperature_zero_is_the_argmax_with_log_probability_zero():
    logits = random_logits(5)
    ids, logprobs = sampler([SamplingParams(temperature=0.0)] * 5, range(5))(logits, 0)
    assert ids.tolist() == logits.argmax(1).tolist()
    assert logprobs.tolist() == [0.0] * 5


def test_greedy_sampled_and_truncated_rows_mix():
    params = [SamplingParams(temperature=0.0), SamplingParams(), SamplingParams(top_k=1), SamplingParams(top_p=0.5)]
    logits = random_logits(1).expand(4, -1)
    ids, logprobs = sampler(params, [7] * 4)(logits, 0)
    assert ids[0] == ids[2] == logits[0].argmax()
    assert logprobs[0] == 0.0 and abs(float(logprobs[2])) < 1e-6
    for row in (1, 3):
        expected = reference(logits[:1], params[row])[0].log()[ids[row]]
        assert float(logprobs[row]) == pytest.approx(float(expected), abs=1e-5)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from([*CASES, SamplingParams(temperature=0.0)]), min_size=1, max_size=6), st.data())
def test_a_rows_sample_does_not_depend_on_the_others(params, data):
    rows, steps = len(params), 3
    seeds = data.draw(st.lists(st.integers(0, 2**63 - 1), min_size=rows, max_size=rows))
    logits = random_logits(rows * steps, 30).view(steps, rows, 30)
    together = sampler(params, seeds, steps=steps)
    kept = sampler(params, seeds, steps=steps)
    some = data.draw(st.lists(st.integers(0, rows - 1), min_size=1, max_size=rows, unique=True).map(sorted))
    kept.keep(torch.tensor(some))
    for step in range(steps):
        ids, logprobs = together(logits[step], step)
        fewer, their_logprobs = kept(logits[step, some], step)
        assert fewer.tolist() == ids[some].tolist()
        torch.testing.assert_close(their_logprobs, logprobs[some])
        for row in range(rows):
            alone = sampler([params[row]], [seeds[row]], steps=steps)
            assert alone(logits[step, row : row + 1], step)[0].tolist() == ids[row : row + 1].tolist()


@pytest.mark.parametrize("uniform", [0.0, 0.5, 1 - 2**-24])
def test_the_ends_of_the_unit_interval_give_tokens_that_have_a_probability(uniform):
    logits = random_logits(64, 1000)
    logits[:, :3] = logits[:, -3:] = -torch.inf
    pick = sampler([SamplingParams()] * 64, range(64))
    pick.uniforms.fill_(uniform)
    ids, logprobs = pick(logits, 0)
    assert int(ids.min()) >= 3 and int(ids.max()) < 997
    assert bool(logprobs.isfinite().all())


def test_tiny_temperatures_do_not_overflow():
    logits = 100 * random_logits(4)
    ids, logprobs = sampler([SamplingParams(temperature=1e-30)] * 4, range(4))(logits, 0)
    assert ids.tolist() == logits.argmax(1).tolist()
    assert logprobs.abs().max() < 1e-6


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("params", [SamplingParams(temperature=0.0), *CASES[:6]], ids=str)
def test_logits_that_are_not_finite_are_an_error_that_names_the_adapters(value, params):
    logits = random_logits(4)
    logits[1, 5] = logits[3, 0] = value
    with pytest.raises(NonFiniteLogitsError, match="adapter 'solver', the bare base") as caught:
        sampler([params] * 4, range(4), ["a", "solver", "b", None])(logits, 0)
    assert caught.value.adapters == ("solver", None)
    assert isinstance(caught.value, MafrtError)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_that_bars_every_token_is_an_error(temperature):
    with pytest.raises(NonFiniteLogitsError):
        sampler([SamplingParams(temperature=temperature)], [0])(torch.full((1, 5), -torch.inf), 0)


ONE = torch.ones(1)


def test_equal_logits_at_the_edge_of_top_k_leave_exactly_k():
    kept = truncate(torch.zeros(1, 8), ONE, torch.tensor([3]), ONE)
    assert kept.isfinite().tolist() == [[True] * 3 + [False] * 5]
    # Of eight equal tokens the first four make up half.
    kept = truncate(torch.zeros(1, 8), ONE, torch.tensor([0]), ONE / 2)
    assert kept.isfinite().tolist() == [[True] * 4 + [False] * 4]


def test_looking_at_the_k_best_only_equals_sorting_everything():
    logits, heat = random_logits(6, 50), torch.tensor([0.5, 1.0, 2.0, 1.0, 0.1, 1.0])
    top_k, top_p = torch.tensor([1, 5, 9, 2, 3, 9]), torch.tensor([1.0, 0.5, 0.9, 1.0, 0.2, 1.0])
    assert torch.equal(truncate(logits, heat, top_k, top_p, widest=9), truncate(logits, heat, top_k, top_p, widest=0))


def test_a_row_that_is_cut_leaves_its_neighbours_as_they_are():
    logits = random_logits(3)
    cut, plain = SamplingParams(top_p=0.5), SamplingParams()
    alone = sampler([plain] * 3, range(3))(logits, 0)
    beside = sampler([plain, cut, plain], range(3))(logits, 0)
    for before, after in zip(alone, beside, strict=True):
        assert torch.equal(before[[0, 2]], after[[0, 2]])


def test_uniforms_are_a_function_of_the_seed_and_a_longer_draw_begins_with_the_shorter():
    assert torch.equal(draw_uniforms(3, 100)[:7], draw_uniforms(3, 7))
    assert not torch.equal(draw_uniforms(3, 7), draw_uniforms(4, 7))
    assert draw_uniforms(2**63 - 1, 1).shape == (1,)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(max_new_tokens=0),
        SamplingParams(temperature=-0.1),
        SamplingParams(temperature=math.nan),
        SamplingParams(top_p=0.0),
        SamplingParams(top_p=1.1),
        SamplingParams(top_k=-1),
        SamplingParams(stop=("",)),
        SamplingParams(stop="text"),  # type: ignore[arg-type]
    ],
    ids=str,
)
def test_parameters_out_of_range_are_one_sentence(params):
    with pytest.raises(ConfigError, match=r"^sampling: found \w+=.*, expected .*$"):
        check_sampling(params)


def test_the_running_sum_of_a_large_vocabulary_draws_no_token_without_probability():
    size = 5000
    probs = torch.rand(6, size, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    probs[1, : size - 3] = 0.0  # all at the end
    probs[2, 128:256] = 0.0
    probs[3, 0], probs[3, 1:] = 1.0, 0.0
    probs[4, ::2] = 0.0
    probs[5] *= 7.0  # not normalised
    cumulative = probs.cumsum(1)
    for share in (0.0, 0.1, 0.3, 0.5, 0.77, 0.999, 1.0 - 2**-24):
        uniforms = torch.full((6,), share, dtype=torch.float64)
        expected = (cumulative <= (uniforms.unsqueeze(1) * cumulative[:, -1:])).sum(1)
        found, logprobs = draw(probs, uniforms)
        assert torch.equal(found, expected)
        own = probs.gather(1, found.unsqueeze(1)) / probs.sum(1, keepdim=True)
        torch.testing.assert_close(logprobs, own.log().squeeze(1))
        # In float32 sums are rounded, and a token of probability 0 is not drawn all the same.
        some, _ = draw(probs.float(), uniforms.float())
        assert (probs.gather(1, some.unsqueeze(1)) > 0).all()
        reached = cumulative.gather(1, some.unsqueeze(1)).squeeze(1) / cumulative[:, -1]
        assert (reached >= share - 1e-5).all()
        assert (reached - probs.gather(1, some.unsqueeze(1)).squeeze(1) / cumulative[:, -1] <= share + 1e-5).all()
