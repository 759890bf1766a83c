"""64 adapters of mixed ranks in one pass: every gradient is that of a pass of the adapter alone."""

from __future__ import annotations

import pytest
import torch
from helpers_models import ALL, ATTENTION, add_random_adapter, random_ids, tiny_base

COUNT = 64


@pytest.mark.nightly
@pytest.mark.slow
def test_one_pass_of_64_adapters_of_mixed_ranks_equals_a_pass_of_each():
    bases = tiny_base(), tiny_base()
    for base in bases:
        for number in range(COUNT):
            rank, targets = (1, 2, 5, 8)[number % 4], (ALL, ATTENTION, ("down_proj", "q_proj"))[number % 3]
            add_random_adapter(base, f"agent{number}", rank, 2.0 * rank, targets, seed=number)
    ids = random_ids(2 * COUNT, 6)
    owner = torch.randperm(2 * COUNT, generator=torch.Generator().manual_seed(1)) % COUNT
    together, alone = bases
    loss(together, ids, owner).backward()
    for number, name in enumerate(alone.adapters):
        loss(alone, ids[owner == number], owner[owner == number]).backward()
        for ours, theirs in zip(together.adapter_parameters(name), alone.adapter_parameters(name), strict=True):
            assert ours.grad is not None and theirs.grad is not None
            scale = max(1.0, float(theirs.grad.abs().max()))
            assert float(theirs.grad.abs().max()) > 0 and float((ours.grad - theirs.grad).abs().max()) <= 1e-5 * scale


def loss(base, ids, owner):
    hidden = base.forward(ids, None, owner)
    return -base.token_logprobs(hidden[:, :-1].flatten(0, 1), ids[:, 1:].flatten())[0].sum()
