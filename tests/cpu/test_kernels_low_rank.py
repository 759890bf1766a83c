"""The kernels for the adapters' part of a product, against float64; also as compiled for processors without AVX-512."""

from __future__ import annotations

import shutil
from contextlib import contextmanager
from itertools import pairwise

import pytest
import torch
from helpers_kernels import without_avx512
from hypothesis import given, settings
from hypothesis import strategies as st

from mafrt.cpu import low_rank, panels
from mafrt.cpu.low_rank import LowRank, Segments, columns_for, join
from mafrt.cpu.panels import Panels

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
DTYPES = [torch.float32, torch.bfloat16]
ROUNDING = {torch.float32: 5e-6, torch.bfloat16: 2**-6}
"""allowed error, of the largest entry; in bfloat16 `x A^T` is rounded, and so is the result"""


def close(found, exact, dtype):
    error = (found.double() - exact).abs().max() / exact.abs().max().clamp(min=1e-30)
    assert error <= ROUNDING[dtype], f"{error:.1e}"


def random(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(dtype)


@contextmanager
def built(how):
    """The kernels as they are compiled for this processor, or for one with AVX2."""
    with pytest.MonkeyPatch.context() as patch:
        if how == "AVX2":
            low_rank._functions.cache_clear()
            patch.setattr(low_rank, "library", without_avx512)
        try:
            yield
        finally:
            if how == "AVX2":
                low_rank._functions.cache_clear()


class Case:
    """Rows of several adapters, those of number -1 of none, and what float64 says about them."""

    def __init__(self, ranks, runs, size, widths, dtype, scale=1.5):
        self.widths, self.dtype, self.scale = widths, dtype, scale
        self.adapters = [
            join(
                [
                    (random(r, size, seed=k), random(width, r, seed=k + 9), scale) if r else None
                    for r, width in zip(each, widths, strict=True)
                ],
                widths,
                dtype,
            )
            for k, each in enumerate(ranks)
        ]
        stops = torch.tensor([rows for _, rows in runs]).cumsum(0).tolist()
        self.spans = list(pairwise([0, *stops]))
        self.segments = Segments(stops, [k for k, _ in runs])
        self.x = random(stops[-1], size + 3, dtype=dtype)[:, :size]  # rows with gaps between them
        self.grad = random(stops[-1], sum(widths), dtype=dtype)
        self.weight = random(sum(widths), size, dtype=dtype)

    def table(self, panels):
        own = [None if k < 0 else self.adapters[k] for k in self.segments.owners]
        # Filled with what must not be read.
        numbers = torch.full((len(self.x), columns_for(own)), torch.nan, dtype=self.dtype)
        return LowRank(self.segments, own, self.widths, numbers, panels=panels)

    def parts(self):
        """Owner, rows, A and scaled B in float64."""
        for k, (start, stop) in zip(self.segments.owners, self.spans, strict=True):
            if k >= 0:
                yield k, slice(start, stop), self.adapters[k].down.double(), self.adapters[k].up.double()

    def added(self):
        exact = torch.zeros(self.grad.shape, dtype=torch.float64)
        for _, rows, down, up in self.parts():
            exact[rows] += self.x[rows].double() @ down.t() @ up
        return exact

    def onto_inputs(self):
        exact = torch.zeros(self.x.shape, dtype=torch.float64)
        for _, rows, down, up in self.parts():
            exact[rows] += self.grad[rows].double() @ up.t() @ down
        return exact

    def gradients(self, low, numbers, learning):
        """What `backward` finds: the numbers for the inputs, and by owner the gradients of A and of B of each layer."""
        count, targets = 2 * len(self.widths), []
        for owner in self.segments.owners:
            places = [(n, owner * count + 2 * n, self.scale) for n in range(len(self.widths))]
            targets.append(tuple(t for t in places if self.adapters[owner].ranks[t[0]]) if owner in learning else None)
        onto, found = low.backward(self.grad, self.x, numbers, targets, count * len(self.adapters))
        each = {owner: found[owner * count : (owner + 1) * count] for owner in range(len(self.adapters))}
        return onto, {k: (own[0::2], own[1::2]) for k, own in each.items() if any(g is not None for g in own)}

    def onto_adapter(self, owner):
        """Gradients of A and, in the block of each layer, of B."""
        downs, ups = torch.zeros(()), torch.zeros(())
        for k, rows, down, up in self.parts():
            if k == owner:
                x, grad = self.x[rows].double(), self.grad[rows].double()
                downs = downs + (grad @ up.t()).t() @ x
                ups = ups + self.scale * (x @ down.t()).t() @ grad
        return downs, ups


cases = st.builds(
    Case,
    ranks=st.just([[8, 8], [3, 1], [0, 5], [16, 12]]),
    runs=st.lists(st.tuples(st.integers(-1, 3), st.integers(1, 90)), min_size=1, max_size=6),
    size=st.sampled_from([16, 34, 64, 130]),
    widths=st.sampled_from([(48, 48), (16, 33), (20, 110)]),
    dtype=st.sampled_from(DTYPES),
)


@settings(max_examples=60, deadline=None)
@given(case=cases)
def test_rows_add_their_own_adapters_part_to_a_product(case):
    if not panels.serves(case.weight):
        pytest.skip("no product in panels here")
    exact = case.x.double() @ case.weight.double().t() + case.added()
    close(Panels.of(case.weight).product(case.x, low=case.table(True)), exact, case.dtype)


@pytest.mark.slow
@pytest.mark.ci
@settings(max_examples=25, deadline=None)
@given(case=cases, how=st.sampled_from(["this processor", "AVX2"]))
def test_the_part_alone_and_its_gradients(case, how):
    with built(how):
        low, out = case.table(False), case.grad.clone()
        low.add_to(out, case.x)
        close(out, case.grad.double() + case.added(), case.dtype)
        for k, (start, stop) in zip(case.segments.owners, case.spans, strict=True):
            assert k >= 0 or torch.equal(out[start:stop], case.grad[start:stop])
        onto, found = case.gradients(low, low.release(), {0, 2, 3})
        assert set(found) == {k for k in case.segments.owners if k >= 0} - {1}
        for owner, (of_a, of_b) in found.items():
            downs, ups = case.onto_adapter(owner)
            row = column = 0
            for rank, width, down, up in zip(case.adapters[owner].ranks, case.widths, of_a, of_b, strict=True):
                assert (down is None) == (up is None) == (rank == 0)
                if rank:
                    close(down, downs[row : row + rank], case.dtype)
                    close(up, ups[row : row + rank, column : column + width].t(), case.dtype)
                row, column = row + rank, column + width
        back = [own and own.back for own in low.adapters]
        inputs = torch.zeros(case.x.shape, dtype=case.dtype)
        LowRank(low.segments, back, [inputs.shape[1]], onto, given=True, panels=False).add_to(inputs, case.grad)
        close(inputs, case.onto_inputs(), case.dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_inputs_gradient_is_one_product_with_the_transposed_weight(dtype):
    case = Case([[8, 8], [3, 2]], [(0, 70), (-1, 5), (1, 9), (0, 1)], 34, (16, 48), dtype)
    if not panels.serves(case.weight):
        pytest.skip("no product in panels here")
    low = case.table(True)
    Panels.of(case.weight).product(case.x, low=low)
    onto, _ = case.gradients(low, low.release(), {0, 1})
    back = LowRank(low.segments, [own and own.back for own in low.adapters], [34], onto, given=True, panels=True)
    found = Panels.of(case.weight.t().contiguous()).product(case.grad, low=back)
    close(found, case.grad.double() @ case.weight.double() + case.onto_inputs(), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_results_depend_neither_on_the_threads_nor_on_other_rows(dtype):
    case, before = Case([[8], [5]], [(0, 200), (1, 77)], 64, (130,), dtype), torch.get_num_threads()
    alone = Case([[8], [5]], [(0, 200)], 64, (130,), dtype)
    alone.x, alone.grad = case.x[:200], case.grad[:200]

    def results(case):
        low, out = case.table(False), case.grad.clone()
        low.add_to(out, case.x)
        onto, found = case.gradients(low, low.release(), {0, 1})
        return out[:200], onto[:200, :8], *found[0][0], *found[0][1]

    whole = results(case)
    assert all(map(torch.equal, whole, results(alone)))
    try:
        torch.set_num_threads(2)
        assert all(map(torch.equal, whole, results(case)))
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_gradient_that_does_not_lie_row_by_row(dtype):
    case = Case([[8], [5]], [(0, 40), (1, 7)], 64, (130,), dtype)
    low = case.table(False)
    low.add_to(torch.zeros_like(case.grad), case.x)
    numbers = low.release()

    def results(grad):
        case.grad = grad
        onto, found = case.gradients(low, numbers, {0, 1})
        return onto[:40, :8], onto[40:, :5], *found[0][0], *found[1][1]

    turned = case.grad.t().contiguous().t()
    assert all(map(torch.equal, results(turned), results(turned.contiguous())))
    one = torch.ones((), dtype=dtype).expand_as(case.grad)
    assert all(map(torch.equal, results(one), results(one.contiguous())))


def test_a_broken_adapter_spoils_its_own_rows_only():
    case = Case([[4], [4]], [(0, 3), (1, 2), (0, 4), (-1, 2)], 32, (48,), torch.float32)
    case.adapters[1].blocks[0] = torch.nan
    case.segments = Segments([3, 5, 9, 11], [0, 1, 0, -1])
    bad = [False] * 3 + [True] * 2 + [False] * 6
    out = torch.zeros(11, 48)
    case.table(False).add_to(out, case.x)
    assert out.isnan().any(1).tolist() == bad
    if panels.serves(case.weight):
        assert Panels.of(case.weight).product(case.x, low=case.table(True)).isnan().any(1).tolist() == bad


def test_rows_that_leave_take_their_place_with_them():
    case = Case([[4], [4]], [(0, 3), (1, 2), (0, 4)], 32, (48,), torch.float32)
    low, kept = case.table(False), [0, 2, 6, 7]
    exact = case.added()[kept]
    case.segments.move([2, 2, 4])
    out = torch.zeros(4, 48)
    low.add_to(out, case.x[kept])
    close(out, exact, torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_adapter_whose_rows_have_all_left_gets_gradients_of_zero(dtype):
    case = Case([[8, 4], [8, 4]], [(0, 9), (1, 6)], 40, (50, 30), dtype)
    low = case.table(False)
    low.add_to(torch.zeros_like(case.grad), case.x)
    case.segments.move([15, 15])
    torch.full((10_000,), torch.nan)  # likely to be the memory of the sums
    _, found = case.gradients(low, low.release(), {0, 1})
    assert all(bool((grad == 0).all()) for each in found[1] for grad in each)
    assert all(bool(grad.isfinite().all()) and bool(grad.any()) for each in found[0] for grad in each)


@pytest.mark.slow
@settings(max_examples=80, deadline=None)
@given(
    ranks=st.lists(st.integers(0, 9), min_size=1, max_size=4).filter(any),
    widths=st.lists(st.integers(1, 130), min_size=4, max_size=4),
    size=st.integers(1, 40),
    dtype=st.sampled_from(DTYPES),
    how=st.sampled_from(["this processor", "AVX2", "torch"]),
)
def test_an_adapters_weights_are_laid_out_as_the_products_read_them(ranks, widths, size, dtype, how):
    widths = widths[: len(ranks)]
    pairs = [
        (random(r, size, seed=k), random(width, r, seed=k + 9), 1.5 - k) if r else None
        for k, (r, width) in enumerate(zip(ranks, widths, strict=True))
    ]
    with built(how), pytest.MonkeyPatch.context() as patch:
        if how == "torch":
            patch.setattr(low_rank, "serves", lambda dtype, device: False)
        found = join(pairs, widths, dtype)
        assert torch.equal(found.down, torch.cat([pair[0] for pair in pairs if pair]).to(dtype))
        exact = torch.zeros(sum(ranks), sum(widths), dtype=dtype)
        row = column = 0
        for pair, rank, width in zip(pairs, ranks, widths, strict=True):
            if pair:
                exact[row : row + rank, column : column + width] = (pair[1].t() * pair[2]).to(dtype)
            row, column = row + rank, column + width
        assert torch.equal(found.up, exact)
        if how == "torch":
            return
        # In panels: of each the ranks of its outputs' layers, in bfloat16 in pairs.
        step, at, flat = 2 if dtype == torch.bfloat16 else 1, 0, found.panels
        firsts, ends = (torch.tensor([0, *own]).cumsum(0).tolist() for own in (ranks, widths))
        for column in range(0, sum(widths), low_rank.PANEL):
            there = [n for n in range(len(ranks)) if ends[n] < column + low_rank.PANEL and ends[n + 1] > column]
            begin = firsts[there[0]] // step * step
            rows = -(-firsts[there[-1] + 1] // step) * step - begin
            panel = flat[at : at + rows * low_rank.PANEL].view(rows // step, low_rank.PANEL, step).transpose(1, 2)
            expected = torch.zeros(rows, low_rank.PANEL, dtype=dtype)
            first = firsts[there[0]]
            own = exact[first : firsts[there[-1] + 1], column : column + low_rank.PANEL]
            expected[first - begin : first - begin + len(own), : own.shape[1]] = own
            assert torch.equal(panel.reshape(rows, low_rank.PANEL), expected)
            at += rows * low_rank.PANEL
        assert at == len(flat)
