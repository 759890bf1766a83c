"""The KL penalty in the loss: expected gradients over a small vocabulary, where both divergences have closed forms."""

from __future__ import annotations

import pytest
import torch

from mafrt.algorithms.losses import kl_loss


def setting():
    torch.manual_seed(4)
    logits = torch.randn(6, dtype=torch.float64, requires_grad=True)
    reference = torch.randn(6, dtype=torch.float64).log_softmax(-1)
    return logits, reference


def expected(kind: str, shift: float = 0.0) -> torch.Tensor:
    """Gradient of the loss in expectation over samples of the old policy, which is the policy itself less `shift`."""
    logits, reference = setting()
    moved = torch.linspace(-shift, shift, 6, dtype=torch.float64)
    old = (logits.detach() + moved).log_softmax(-1)
    own = logits.log_softmax(-1)
    parts = [
        old[token].exp()
        * kl_loss(own[token : token + 1], reference[token : token + 1], coef=1.0, denominator=1.0, kind=kind,
                  old_logprobs=old[token : token + 1])[0]
        for token in range(6)
    ]  # fmt: skip
    return torch.autograd.grad(sum(parts), logits)[0]


def closed(direction: str) -> torch.Tensor:
    logits, reference = setting()
    own = logits.log_softmax(-1)
    first, second = (own, reference) if direction == "forward" else (reference, own)
    return torch.autograd.grad((first.exp() * (first - second)).sum(), logits)[0]


@pytest.mark.parametrize("shift", [0.0, 0.7])
@pytest.mark.parametrize("kind", ["k2", "k3_corrected"])
def test_k2_and_corrected_k3_have_the_gradient_of_kl_from_the_policy(kind, shift):
    torch.testing.assert_close(expected(kind, shift), closed("forward"))


def test_k3_has_that_of_the_other_direction_and_k1_none():
    torch.testing.assert_close(expected("k3"), closed("reverse"))
    assert expected("k1").abs().max() < 1e-12
    assert not torch.allclose(closed("forward"), closed("reverse"), atol=1e-2)


def test_the_metric_is_an_estimate_of_kl_from_the_policy_whatever_the_loss():
    logits, reference = setting()
    own = logits.detach().log_softmax(-1)
    kl = (own.exp() * (own - reference)).sum()
    for kind in ("k1", "k2", "k3", "k3_corrected"):
        weighed = 0.0
        for t in range(6):
            _, stats = kl_loss(own[t : t + 1], reference[t : t + 1], coef=1.0, denominator=1.0, kind=kind)
            weighed += float(own[t].exp() * stats["kl"])
        assert weighed == pytest.approx(float(kl))
