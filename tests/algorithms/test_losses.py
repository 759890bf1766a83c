"""Losses: numbers worked by hand, an independent padded implementation, and what micro-batching must not change."""

from __future__ import annotations

import math

import pytest
import torch
from helpers_losses import clipped_loss
from hypothesis import given, settings
from hypothesis import strategies as st

from mafrt.algorithms.losses import (
    AdaptiveKL,
    entropy_loss,
    kl_k1,
    kl_k3,
    kl_loss,
    mean_stats,
    truncated_importance_weights,
    value_loss,
)


def t(*numbers: float, grad: bool = False) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.float64, requires_grad=grad)


def logs(*ratios: float, grad: bool = False) -> torch.Tensor:
    return t(*(math.log(r) for r in ratios), grad=grad)


# -- policy loss ---------------------------------------------------------------------------------------------------


def test_clip_by_hand():
    # old log-probs 0, so log-probs are the log-ratios. clip [.8, 1.28], denominator 4.
    # rho 1.1, A 2: 2.2 ; rho 1.5, A 1: clipped 1.28 ; rho .5, A -1: min(-.5, -.8) = -.8 ; rho 2, A -1: -2
    # sum 2.2 + 1.28 - .8 - 2 = .68, loss -.17. The gradient of -rho*A/4 by log rho is itself, 0 where clipped.
    new = logs(1.1, 1.5, 0.5, 2.0, grad=True)
    loss, stats = clipped_loss(new, t(0, 0, 0, 0), t(2, 1, -1, -1), denominator=4, clip_high=0.28)
    loss.backward()
    assert loss.item() == pytest.approx(-0.17)
    assert new.grad.tolist() == pytest.approx([-0.55, 0.0, 0.0, 0.5])
    merged = mean_stats([stats])
    assert merged["clipped"] == 0.5 and merged["count"] == 4.0 and merged["nonfinite"] == 0.0
    assert merged["ratio"] == pytest.approx((1.1 + 1.5 + 0.5 + 2.0) / 4)
    assert merged["ratio_max"] == pytest.approx(2.0)
    # rho - 1 - log rho: .1 - .0953102, .5 - .4054651, -.5 + .6931472, 1 - .6931472
    want = (0.0046898 + 0.0945349 + 0.1931472 + 0.3068528) / 4
    assert merged["approx_kl"] == pytest.approx(want, abs=1e-6)


def test_dual_clip_by_hand():
    # rho 5, A -1: 5 without, c = 3 bounds it, and its gradient is 0. rho 5, A 1: clipped at 1.2, untouched by c.
    new = logs(5.0, 5.0, grad=True)
    loss, _ = clipped_loss(new, t(0, 0), t(-1, 1), denominator=1, dual_clip=3.0)
    loss.backward()
    assert loss.item() == pytest.approx(3.0 - 1.2)
    assert new.grad.tolist() == [0.0, 0.0]
    assert clipped_loss(new, t(0, 0), t(-1, 1), denominator=1)[0].item() == pytest.approx(5.0 - 1.2)


@pytest.mark.parametrize(
    ("normalize", "exponents"),
    # Turn 9: log-ratios .1, .3 over 2 tokens and 4 words; turn 4: -.2 over 1 token and 1 word.
    [("sum", (0.4, -0.2)), ("token", (0.2, -0.2)), ("word", (0.1, -0.2))],
)
def test_action_level_has_one_ratio_a_turn(normalize, exponents):
    # A = 1 and 2, weights 1 and .5, nothing clipped: -(exp(x) + .5 * 2 * exp(y)) / 2
    new = t(0.1, -0.2, 0.3, grad=True)
    loss, stats = clipped_loss(
        new,
        t(0, 0, 0),
        t(1, 2, 1),
        denominator=2,
        level="action",
        turn=torch.tensor([9, 4, 9]),
        normalization_mode=normalize,
        words=torch.tensor([4, 1, 4]),
        weights=t(1, 0.5, 1),
        clip_param=0.9,
        clip_high=9.0,
    )
    loss.backward()
    x, y = map(math.exp, exponents)
    assert loss.item() == pytest.approx(-(x + y) / 2)
    slope = {"sum": 1.0, "token": 1 / 2, "word": 1 / 4}[normalize]
    assert new.grad.tolist() == pytest.approx([-x * slope / 2, -y / 2, -x * slope / 2])
    assert int(stats["count"]) == 2


def naive(new, old, advantages, mask, *, level, low, high, dual, normalize, words, weights, denominator):
    """Padded [turns, time] and loops: the textbook, for comparison."""
    total = new.new_zeros(())
    for i in range(len(new)):
        n = int(mask[i].sum())
        if level == "token":
            parts = [new[i, j] - old[i, j] for j in range(n)]
        else:
            divide = {"sum": 1, "token": n, "word": int(words[i])}[normalize]
            parts = [sum(new[i, j] - old[i, j] for j in range(n)) / divide]
        for log_ratio in parts:
            ratio, a = torch.exp(log_ratio), float(advantages[i])
            kept = torch.stack([ratio * a, torch.clip(ratio, 1 - low, 1 + high) * a]).min()
            if dual is not None and a < 0:
                kept = torch.stack([kept, kept.new_tensor(dual * a)]).max()
            total = total - kept * weights[i]
    return total / denominator


@given(
    lengths=st.lists(st.integers(1, 5), min_size=1, max_size=6),
    level=st.sampled_from(["token", "action"]),
    normalize=st.sampled_from(["sum", "token", "word"]),
    dual=st.sampled_from([None, 1.5]),
    padding=st.integers(0, 3),
    cut=st.integers(1, 4),
    seed=st.integers(0, 2**16),
)
@settings(max_examples=40, deadline=None)
def test_equals_the_naive_padded_loss_in_any_order_and_micro_batches(
    lengths, level, normalize, dual, padding, cut, seed
):
    rng = torch.Generator().manual_seed(seed)
    shape = (len(lengths), max(lengths) + padding)

    def noise(*size):
        return torch.randn(*size, generator=rng, dtype=torch.float64)

    new, old = noise(*shape).mul_(0.4).requires_grad_(), noise(*shape) * 0.4
    advantages, weights = noise(shape[0]), noise(shape[0]).abs()
    words = torch.randint(1, 4, (shape[0],), generator=rng)
    mask = torch.arange(shape[1])[None] < torch.tensor(lengths)[:, None]
    denominator = float(mask.sum()) if level == "token" else len(lengths)
    want = naive(
        new, old, advantages, mask, level=level, low=0.2, high=0.28, dual=dual, normalize=normalize, words=words,
        weights=weights, denominator=denominator,
    )  # fmt: skip
    (want_grad,) = torch.autograd.grad(want, new)
    # Now ours: turns shuffled, cut into micro-batches of `cut` turns, tokens flat, one global denominator.
    mode = normalize if level == "action" else None
    order = torch.randperm(len(lengths), generator=rng).tolist()
    got, stats = torch.zeros((), dtype=torch.float64), []
    for start in range(0, len(order), cut):
        rows = order[start : start + cut]
        take = [(i, j) for i in rows for j in range(lengths[i])]
        turn, time = torch.tensor([i for i, _ in take]), torch.tensor([j for _, j in take])
        loss, stat = clipped_loss(
            new[turn, time], old[turn, time], advantages[turn], denominator=denominator, level=level, turn=turn,
            clip_high=0.28, dual_clip=dual, normalization_mode=mode, words=words[turn], weights=weights[turn],
        )  # fmt: skip
        loss.backward()
        got, stats = got + loss.detach(), [*stats, stat]
    assert got.item() == pytest.approx(want.item(), abs=1e-10)
    torch.testing.assert_close(new.grad, want_grad, atol=1e-10, rtol=1e-10)
    assert mean_stats(stats)["count"] == denominator
    whole = clipped_loss(new[mask], old[mask], torch.ones(int(mask.sum())), denominator=1)[1]
    if level == "token":
        assert mean_stats(stats)["ratio_max"] == pytest.approx(float(whole["ratio_max"]))
    assert torch.all(new.grad[~mask] == 0)


@pytest.mark.parametrize("level", ["token", "action"])
def test_happo_with_m_1_is_mappo_bit_for_bit(level):
    rng = torch.Generator().manual_seed(0)
    old, advantages = torch.randn(12, generator=rng), torch.randn(4, generator=rng).repeat_interleave(3)
    segment = torch.arange(4).repeat_interleave(3)
    grads = []
    for weights in (None, torch.ones(12)):
        new = (old + 0.3 * torch.randn(12, generator=torch.Generator().manual_seed(1))).requires_grad_()
        loss, _ = clipped_loss(new, old, advantages, denominator=7, level=level, turn=segment, weights=weights)
        loss.backward()
        grads.append((loss.detach(), new.grad))
    assert torch.equal(grads[0][0], grads[1][0]) and torch.equal(grads[0][1], grads[1][1])


def test_weights_carry_no_gradient():
    weights = t(2.0, grad=True)
    loss, _ = clipped_loss(t(0.0, grad=True), t(0.0), t(1.0), denominator=1, weights=weights)
    loss.backward()
    assert loss.item() == -2.0 and weights.grad is None


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", ["new", "old", "advantage", "weight"])
@pytest.mark.parametrize("level", ["token", "action"])
def test_what_is_not_finite_never_reaches_a_gradient(bad, where, level):
    parts = {name: [0.1, 0.1, 0.1, 0.1] for name in ("new", "old", "advantage", "weight")}
    parts[where][1] = bad
    new = t(*parts["new"], grad=True)
    segment = torch.tensor([0, 0, 1, 1])
    loss, stats = clipped_loss(
        new, t(*parts["old"]), t(*parts["advantage"]), denominator=4, level=level, turn=segment,
        normalization_mode="sum" if level == "action" else None, weights=t(*parts["weight"]),
    )  # fmt: skip
    loss.backward()
    # -.1 * .1 / 4 = -.0025 a token. At action level the sick token's turn goes as a whole.
    whole = level == "action"
    assert new.grad.tolist() == pytest.approx([0.0 if whole else -0.0025, 0.0, -0.0025, -0.0025])
    assert loss.item() == pytest.approx(-0.0025 if whole else -0.0075)
    assert int(stats["nonfinite"]) == 1 and int(stats["count"]) == (1 if whole else 3)
    assert all(math.isfinite(value) for value in mean_stats([stats]).values())


def test_a_ratio_that_would_overflow_stays_finite():
    new = t(900.0, 900.0, grad=True)
    loss, stats = clipped_loss(new, t(0, 0), t(1, -1), denominator=1)
    loss.backward()
    assert torch.isfinite(loss) and torch.isfinite(new.grad).all()
    assert math.isfinite(mean_stats([stats])["approx_kl"])


@pytest.mark.parametrize(
    "kwargs",
    [
        {"level": "turn"},
        {"level": "action", "normalization_mode": "length"},
        {"level": "token", "normalization_mode": "word"},
        {"dual_clip": 1.0},
        {"denominator": 0.0},
    ],
)
def test_calls_that_cannot_work_raise(kwargs):
    with pytest.raises(ValueError, match=r"expected|choose|set level"):
        clipped_loss(t(0.0), t(0.0), t(1.0), **{"denominator": 1.0, **kwargs})


def test_no_tokens_are_no_error():
    empty = torch.zeros(0, requires_grad=True)
    for level in ("token", "action"):
        loss, stats = clipped_loss(empty, empty, empty, denominator=5, level=level, turn=torch.zeros(0).long())
        loss.backward()
        assert loss.item() == 0.0 and mean_stats([stats])["approx_kl"] == 0.0


# -- value loss ----------------------------------------------------------------------------------------------------


def test_value_loss_by_hand():
    # e = 1, -3: (.5 + 4.5) / 2 = 2.5 ; Huber with delta 2: .5 and 2*(3 - 1) = 4 -> 2.25
    values = t(2.0, 1.0, grad=True)
    loss, stats = value_loss(values, t(0, 0), t(1, 4), denominator=2)
    loss.backward()
    assert loss.item() == 2.5 and values.grad.tolist() == [0.5, -1.5]
    assert mean_stats([stats])["error"] == 5.0
    assert value_loss(values, t(0, 0), t(1, 4), denominator=2, huber_delta=2.0)[0].item() == 2.25


def test_clipped_value_loss_by_hand():
    # old 0, clip .5. v=2, R=1: plain .5, clipped (.5-1)^2/2 = .125: max is plain, gradient 1.
    # v=1, R=4: plain 4.5, clipped (.5-4)^2/2 = 6.125: max is clipped, gradient 0.
    values = t(2.0, 1.0, grad=True)
    loss, stats = value_loss(values, t(0, 0), t(1, 4), denominator=1, clip=0.5)
    loss.backward()
    assert loss.item() == 6.625 and values.grad.tolist() == [1.0, 0.0]
    assert int(stats["clipped"]) == 1


@pytest.mark.parametrize("where", [0, 1, 2])
def test_value_loss_masks_what_is_not_finite(where):
    parts = [[1.0, 1.0], [0.0, 0.0], [2.0, 2.0]]
    parts[where][0] = math.nan
    values = t(*parts[0], grad=True)
    loss, stats = value_loss(values, t(*parts[1]), t(*parts[2]), denominator=2, clip=5.0, huber_delta=10.0)
    loss.backward()
    assert loss.item() == 0.25 and values.grad.tolist() == [0.0, -0.5] and int(stats["nonfinite"]) == 1


# -- KL, entropy, importance weights -------------------------------------------------------------------------------


def test_kl_by_hand():
    # log pi = -1, log pi_ref = -1.5: k1 = .5 ; d = -.5: e^-.5 + .5 - 1 = .1065307
    assert kl_k1(t(-1.0), t(-1.5)).item() == 0.5
    assert kl_k3(t(-1.0), t(-1.5)).item() == pytest.approx(0.1065307)
    loss, stats = kl_loss(t(-1.0, -1.0, grad=True), t(-1.5, -math.inf), coef=0.1, denominator=2, kind="k3")
    loss.backward()
    assert loss.item() == pytest.approx(0.1 * 0.1065307 / 2)
    assert mean_stats([stats])["kl"] == pytest.approx(0.1065307) and int(stats["nonfinite"]) == 1


def test_both_estimators_have_the_mean_of_the_kl():
    # pi = (.5, .5), ref = (.25, .75): KL = .5 log 2 + .5 log(2/3) = .1438410
    pi, ref = logs(0.5, 0.5), logs(0.25, 0.75)
    for estimate in (kl_k1, kl_k3):
        assert (pi.exp() * estimate(pi, ref)).sum().item() == pytest.approx(0.1438410)


def test_entropy_is_pushed_up():
    entropy = t(1.0, 2.0, math.nan, grad=True)
    loss, stats = entropy_loss(entropy, coef=0.1, denominator=4)
    loss.backward()
    assert loss.item() == pytest.approx(-0.075)
    assert entropy.grad.tolist() == pytest.approx([-0.025, -0.025, 0.0])
    assert mean_stats([stats])["entropy"] == 1.5


def test_adaptive_kl_by_hand():
    # target 6, horizon 10000. kl 9: error .5 -> .2, factor 1 + .2 * 256/10000 = 1.00512
    control = AdaptiveKL(0.1, 6.0, 10000.0)
    assert control.update(9.0, 256) == pytest.approx(0.100512)
    # kl 6.6: error .1: factor 1.00256
    assert control.update(6.6, 256) == pytest.approx(0.100512 * 1.00256)
    assert control.update(6.0, 256) == pytest.approx(0.100512 * 1.00256)
    before = control.coef
    assert control.update(math.nan, 256) == before and control.update(math.inf, 256) == before
    assert control.update(0.0, 256) == pytest.approx(before * 0.99488)
    other = AdaptiveKL(1.0, 6.0, 10000.0)
    other.load_state_dict(control.state_dict())
    assert other.coef == control.coef


def test_truncated_importance_weights_by_hand():
    # log-ratios log 1.5, log .5, log 3: token level min(., 2) = 1.5, .5, 2
    old, engine = logs(1.5, 0.5, 3.0), t(0, 0, 0)
    weights, stats = truncated_importance_weights(old, engine)
    assert weights.tolist() == pytest.approx([1.5, 0.5, 2.0])
    assert (int(stats["count"]), float(stats["weight"]), int(stats["capped"])) == (3, pytest.approx(4.0), 1)
    # turns {0, 2} and {1}: 4.5 -> 2 and .5
    weights, stats = truncated_importance_weights(old, engine, turn=torch.tensor([7, 3, 7]))
    assert weights.tolist() == pytest.approx([2.0, 0.5, 2.0]) and int(stats["capped"]) == 2
    sick, stats = truncated_importance_weights(old, t(0, -math.inf, 0))
    assert sick[1].isnan() and not sick[[0, 2]].isnan().any()
    assert (int(stats["count"]), int(stats["nonfinite"]), float(stats["weight"])) == (2, 1, pytest.approx(3.5))
