"""Agreement with TRL's GRPO and RLOO losses, value and gradient, to 1e-5.

Skipped where TRL is not installed.

TRL computes its loss in a method of its trainer. The method is called here unbound, with a stand-in that holds the
few fields it reads and returns given log-probs, so the formula under comparison is TRL's own code.
"""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch
from helpers_extras import need
from helpers_losses import clipped_loss

from mafrt.algorithms import algorithm
from mafrt.algorithms.losses import PolicyTerms, entropy_loss, kl_loss

need("trl")
pytestmark = pytest.mark.slow

ROWS, TIME, LONGEST = 5, 7, 32
LENGTHS = torch.tensor([7, 3, 5, 1, 6])
MASK = torch.arange(TIME)[None] < LENGTHS[:, None]
TOKENS = float(MASK.sum())


def batch(seed: int) -> SimpleNamespace:
    rng = torch.Generator().manual_seed(seed)

    def draw(*size, scale=0.4):
        return scale * torch.randn(*size, generator=rng, dtype=torch.float64)

    return SimpleNamespace(
        new=(draw(ROWS, TIME) - 1).requires_grad_(),
        old=draw(ROWS, TIME) - 1,
        ref=draw(ROWS, TIME) - 1,
        entropy=draw(ROWS, TIME).abs(),
        advantages=draw(ROWS, scale=1.0),
    )


class Accelerator:
    num_processes, sync_gradients = 1, True

    def reduce(self, x, reduction="sum"):
        return x

    def gather(self, x):
        return x

    gather_for_metrics = gather


def trainer(data: SimpleNamespace, **fields) -> SimpleNamespace:
    args = SimpleNamespace(delta=None, use_bias_correction_kl=False, entropy_target=None, steps_per_generation=1)
    stand_in = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (data.new, data.entropy, None),
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        importance_sampling_level="token",
        beta=0.0,
        loss_type="dapo",
        epsilon_low=0.2,
        epsilon_high=0.28,
        use_vllm=False,
        model=SimpleNamespace(training=True),
        current_gradient_accumulation_steps=1,
        max_completion_length=LONGEST,
        accelerator=Accelerator(),
        _entropy_bonus_enabled=False,
        use_adaptive_entropy=False,
        entropy_coef=0.0,
        _metrics={"train": defaultdict(list)},
        args=args,
    )
    args.delta = fields.pop("delta", None)
    stand_in.__dict__.update(fields)
    return stand_in


def inputs(data: SimpleNamespace) -> dict[str, torch.Tensor]:
    ids = torch.zeros(ROWS, TIME, dtype=torch.long)
    return {
        "prompt_ids": ids[:, :1],
        "prompt_mask": ids[:, :1] + 1,
        "completion_ids": ids,
        "completion_mask": MASK.to(torch.float64),
        "advantages": data.advantages,
        "old_per_token_logps": data.old,
        "old_logps": (data.old * MASK).sum(1),
        "ref_per_token_logps": data.ref,
        "num_items_in_batch": torch.tensor(TOKENS),
    }


def both(data, cls, fields, ours) -> None:
    """Compare loss and gradient of TRL's `_compute_loss` with ours."""
    stand_in = trainer(data, **fields)
    want = cls._compute_loss(stand_in, None, inputs(data))
    (want_grad,) = torch.autograd.grad(want, data.new, retain_graph=True)
    got = ours()
    (got_grad,) = torch.autograd.grad(got, data.new)
    assert got_grad.abs().max() > 1e-3
    torch.testing.assert_close(got, want, atol=1e-10, rtol=1e-8)
    torch.testing.assert_close(got_grad, want_grad, atol=1e-10, rtol=1e-8)


def flat(data: SimpleNamespace, **kwargs) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    turn = torch.arange(ROWS).repeat_interleave(LENGTHS)
    kwargs = {"clip_high": 0.28, **kwargs}
    return clipped_loss(data.new[MASK], data.old[MASK], data.advantages[turn], turn=turn, **kwargs)


def rule_loss(name: str, data: SimpleNamespace, denominator: float, **settings) -> torch.Tensor:
    turn = torch.arange(ROWS).repeat_interleave(LENGTHS)
    flat_turns = (data.new[MASK], data.old[MASK], data.advantages[turn], denominator)
    return algorithm(name, **settings).policy_loss(PolicyTerms(*flat_turns, turn=turn, words=turn))[0]


@pytest.fixture(scope="module")
def grpo():
    from trl import GRPOTrainer

    return GRPOTrainer


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("fields", "kwargs"),
    [
        ({"loss_type": "dapo"}, {"denominator": TOKENS}),
        ({"loss_type": "dr_grpo"}, {"denominator": ROWS * LONGEST}),
        ({"loss_type": "bnpo", "delta": 1.5}, {"denominator": TOKENS, "dual_clip": 1.5}),
        (
            {"loss_type": "grpo", "importance_sampling_level": "sequence"},
            {"denominator": ROWS, "level": "action", "normalization_mode": "token"},
        ),
    ],
)
def test_policy_loss_is_trl_s(grpo, seed, fields, kwargs):
    data = batch(seed)
    both(data, grpo, fields, lambda: flat(data, **kwargs)[0])


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("bound", [5.0, 1.1])
def test_cispo_is_trl_s(grpo, seed, bound):
    data = batch(seed)
    fields = {"loss_type": "cispo", "epsilon_high": bound}
    both(data, grpo, fields, lambda: rule_loss("cispo", data, TOKENS, clip_high=bound - 1.0))


@pytest.mark.parametrize("seed", range(3))
def test_gspo_is_trl_s_with_the_paper_s_settings(grpo, seed):
    data = batch(seed)
    data.new = (data.old + 1e-3 * data.new).detach().requires_grad_()  # on both sides of a clip of .0003
    fields = {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon_low": 3e-4, "epsilon_high": 4e-4}
    both(data, grpo, fields, lambda: rule_loss("gspo", data, ROWS))


def test_kl_in_the_loss_is_trl_s(grpo):
    data = batch(3)

    def ours():
        return (
            flat(data, denominator=TOKENS)[0]
            + (kl_loss(data.new[MASK], data.ref[MASK], coef=0.3, denominator=TOKENS, kind="k3")[0])
        )

    both(data, grpo, {"beta": 0.3}, ours)


def test_entropy_bonus_is_trl_s(grpo):
    data = batch(4)
    data.entropy = data.new.exp() * 0.7

    def ours():
        return flat(data, denominator=TOKENS)[0] + (entropy_loss(data.entropy[MASK], coef=0.2, denominator=TOKENS)[0])

    both(data, grpo, {"_entropy_bonus_enabled": True, "entropy_coef": 0.2}, ours)


def test_clip_fraction_is_trl_s(grpo):
    data = batch(5)
    stand_in = trainer(data)
    grpo._compute_loss(stand_in, None, inputs(data))
    _, stats = flat(data, denominator=TOKENS)
    assert float(stats["clipped"]) / TOKENS == pytest.approx(stand_in._metrics["train"]["clip_ratio/region_mean"][0])
    assert float(stats["clipped"]) > 0


def test_rloo_is_trl_s():
    from trl import RLOOTrainer

    data = batch(6)
    both(data, RLOOTrainer, {}, lambda: flat(data, denominator=ROWS, level="action", normalization_mode="sum")[0])
