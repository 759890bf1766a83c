"""Sampling by the kernel in C, against running sums in float64; also as it is compiled without AVX-512."""

from __future__ import annotations

import math
import shutil

import pytest
import torch
from helpers_kernels import without_avx512
from hypothesis import given, settings
from hypothesis import strategies as st

from mafrt.core.types import SamplingParams
from mafrt.cpu import sample as sample_module
from mafrt.cpu.sample import sample, serves
from mafrt.engines.local.sampler import NonFiniteLogitsError, Sampler, draw_uniforms

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
DTYPES = [torch.float32, torch.bfloat16]
SIZES = [1, 5, 16, 127, 128, 129, 1147, 5000]
LAST = 1 - 2**-24
"""the largest uniform number"""


def random_logits(rows, words, dtype=torch.float32, seed=0):
    return (2 * torch.randn(rows, words, generator=torch.Generator().manual_seed(seed + words))).to(dtype)


def drawn(logits, temperature=1.0, uniforms=None):
    rows = len(logits)
    temperatures = torch.as_tensor(temperature, dtype=torch.float32).expand(rows)
    uniforms = draw_uniforms(1, rows) if uniforms is None else torch.as_tensor(uniforms).expand(rows)
    return sample(logits, temperatures, uniforms)


def shares(logits, temperature=1.0):
    """Probabilities in float64."""
    return (logits.double() / temperature).softmax(1)


def right(logits, temperature, uniforms):
    """Ids and log-probabilities are those of float64, but for uniform numbers on the edge of two tokens."""
    ids, logprobs, totals = drawn(logits, temperature, uniforms)
    probs = shares(logits, temperature)
    own = probs.gather(1, ids.unsqueeze(1)).squeeze(1)
    upto = probs.cumsum(1).gather(1, ids.unsqueeze(1)).squeeze(1)
    assert totals.isfinite().all() and (own > 0).all()
    assert (upto >= uniforms - 1e-6).all() and (upto - own <= uniforms + 1e-6).all()
    torch.testing.assert_close(logprobs.double(), own.log(), rtol=1e-6, atol=1e-6)


@pytest.fixture(params=["as for this processor", "AVX2"])
def compiled(request, monkeypatch):
    """The kernel of this processor, and that of one with AVX2 and nothing later."""
    if request.param == "AVX2":
        monkeypatch.setattr(sample_module, "library", without_avx512)
        monkeypatch.setattr(sample_module, "_function", sample_module._function.__wrapped__)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.7])
def test_tokens_are_those_of_running_sums_in_float64(compiled, dtype, temperature):
    for words in SIZES:
        logits, uniforms = random_logits(40, words, dtype), draw_uniforms(words, 40)
        right(logits, temperature, uniforms)
        right(logits, temperature, torch.tensor([0.0, LAST]).repeat(20))


@settings(max_examples=60, deadline=None)
@given(
    words=st.integers(1, 700),
    dtype=st.sampled_from(DTYPES),
    temperature=st.floats(0.0625, 5.0, width=32),
    uniform=st.floats(0.0, LAST, width=32),
    barred=st.floats(0.0, 1.0),
    seed=st.integers(0, 1000),
)
def test_any_size_temperature_and_barred_tokens(words, dtype, temperature, uniform, barred, seed):
    logits = random_logits(3, words, dtype, seed)
    out = torch.rand(3, words, generator=torch.Generator().manual_seed(seed)) < barred
    out[:, seed % words] = False  # one is left
    logits[out] = -torch.inf
    right(logits, temperature, torch.full((3,), uniform))


@pytest.mark.parametrize("dtype", DTYPES)
def test_frequencies_are_those_of_the_softmax(compiled, dtype):
    draws, logits = 40000, random_logits(1, 300, dtype)
    logits[0, 100:280] = -torch.inf
    uniforms = torch.rand(draws, generator=torch.Generator().manual_seed(5))
    ids, _, _ = drawn(logits.expand(draws, -1), 1.3, uniforms)
    expected = draws * shares(logits, 1.3)[0]
    counts = torch.bincount(ids, minlength=300).double()
    assert counts[expected == 0].sum() == 0
    # Rare tokens are counted together.
    common = expected >= 5
    pairs = [*zip(counts[common], expected[common], strict=True), (counts[~common].sum(), expected[~common].sum())]
    chi2 = float(sum((seen - meant) ** 2 / meant for seen, meant in pairs))
    freedom = len(pairs) - 1
    # By the normal approximation; the seeds are fixed.
    assert chi2 < freedom + 4 * math.sqrt(2 * freedom), (chi2, freedom)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("uniform", [0.0, 0.5, LAST])
@pytest.mark.parametrize("words", [1000, 4096 + 64])
def test_a_token_without_probability_is_never_drawn(dtype, uniform, words):
    logits = random_logits(64, words, dtype)
    logits[:, :300] = logits[:, -300:] = -torch.inf  # whole blocks, and parts of blocks
    logits[:, 500::2] = -1e4  # e^x is 0
    ids, logprobs, _ = drawn(logits, 1.0, uniform)
    assert int(ids.min()) >= 300 and int(ids.max()) < words - 300
    assert bool((logits.gather(1, ids.unsqueeze(1)) > -1e4).all()) and bool(logprobs.isfinite().all())
    only = torch.full((1, words), -torch.inf, dtype=dtype)
    for place in (0, 127, 128, words - 1):
        only[0, place] = -3.0
        found, its_logprob, _ = drawn(only, 1.0, uniform)
        assert int(found) == place and float(its_logprob) == 0.0
        only[0, place] = -torch.inf


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("place", [0, 200, 1146])
def test_a_row_that_is_not_finite_has_no_finite_total(dtype, value, temperature, place):
    logits = random_logits(4, 1147, dtype)
    logits[1, place], logits[3] = value, -torch.inf
    _, _, totals = drawn(logits, temperature)
    assert totals.isfinite().tolist() == [True, False, True, False]
    pick = Sampler([SamplingParams(temperature=temperature)] * 4, range(4), ["a", "b", "c", None], 1)
    with pytest.raises(NonFiniteLogitsError) as caught:
        pick(logits, 0)
    assert caught.value.adapters == ("b", None)


@pytest.mark.parametrize("dtype", DTYPES)
def test_temperature_zero_takes_the_first_of_the_largest(compiled, dtype):
    for words in SIZES:
        logits = random_logits(9, words, dtype)
        logits[4:] = (2 * logits[4:]).round()  # with equal ones
        logits[8, : words // 2] = -torch.inf
        ids, logprobs, totals = drawn(logits, 0.0)
        assert torch.equal(ids, logits.float().argmax(1)) and not logprobs.any() and totals.isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_tiny_and_large_temperatures(dtype):
    logits = 100 * random_logits(4, 300, dtype)
    for temperature in (1e-30, 1e-38):
        ids, logprobs, _ = drawn(logits, temperature)
        assert torch.equal(ids, logits.float().argmax(1)) and float(logprobs.abs().max()) < 1e-6
    right(logits, 1e6, draw_uniforms(0, 4))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_rows_sample_depends_neither_on_the_others_nor_on_the_threads(dtype):
    whole, uniforms, before = random_logits(7, 1147 + 5, dtype), draw_uniforms(3, 7), torch.get_num_threads()
    logits = whole[:, :1147]  # rows with gaps between them
    temperatures = torch.tensor([1.0, 0.0, 0.5, 1.0, 2.0, 0.7, 1.0])
    together = sample(logits, temperatures, uniforms)
    alone = [sample(logits[i : i + 1], temperatures[i : i + 1], uniforms[i : i + 1]) for i in range(7)]
    for each, one_by_one in zip(together, zip(*alone, strict=True), strict=True):
        assert torch.equal(each, torch.cat(one_by_one))
    columns = logits.t().contiguous().t()
    assert all(map(torch.equal, sample(columns, temperatures, uniforms), together))
    try:
        torch.set_num_threads(2)
        assert all(map(torch.equal, sample(logits, temperatures, uniforms), together))
    finally:
        torch.set_num_threads(before)


def test_a_neighbour_with_a_cut_changes_not_one_bit():
    logits = random_logits(3, 5000)
    plain, cut = SamplingParams(temperature=0.8), SamplingParams(top_k=3)
    alone = Sampler([plain] * 3, [1, 2, 3], [None] * 3, 1)(logits, 0)
    mixed = Sampler([plain, cut, plain], [1, 2, 3], [None] * 3, 1)(logits, 0)
    assert all(torch.equal(a[[0, 2]], b[[0, 2]]) for a, b in zip(alone, mixed, strict=True))
    assert int(mixed[0][1]) in logits[1].topk(3).indices.tolist()


@pytest.mark.parametrize("dtype", DTYPES)
def test_torch_draws_the_same_tokens(monkeypatch, dtype):
    params = [SamplingParams(), SamplingParams(temperature=0.6), SamplingParams(temperature=0.0)] * 20
    pick, logits = Sampler(params, range(60), [None] * 60, 1), random_logits(60, 5000, dtype)
    ids, logprobs = pick(logits, 0)
    monkeypatch.setattr(sample_module, "serves", lambda logits: False)
    theirs, their_logprobs = pick(logits, 0)
    assert torch.equal(ids, theirs)
    torch.testing.assert_close(logprobs, their_logprobs, atol=1e-5, rtol=1e-5)


def test_other_formats_and_devices_are_torchs():
    assert serves(torch.ones(1, 4)) and serves(torch.ones(1, 4, dtype=torch.bfloat16))
    assert not serves(torch.ones(1, 4, dtype=torch.float16)) and not serves(torch.ones(1, 4, device="meta"))


@pytest.mark.parametrize(
    ("temperatures", "uniforms"),
    [([-1.0] * 2, [0.5] * 2), ([1.0], [0.5] * 2), ([1.0] * 2, [0.5]), ([math.nan] * 2, [0.5] * 2),
     ([1.0] * 2, [1.0] * 2), ([1.0] * 2, [-0.1] * 2), ([1.0] * 2, [math.nan] * 2)],
)  # fmt: skip
def test_what_would_read_past_an_array_is_refused(temperatures, uniforms):
    with pytest.raises(ValueError, match="found"):
        sample(random_logits(2, 16), torch.tensor(temperatures), torch.tensor(uniforms))
    with pytest.raises(ValueError, match="found"):
        sample(random_logits(2, 16), torch.ones(2, dtype=torch.float64), torch.zeros(2))
