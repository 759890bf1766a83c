"""Optimizers of adapters against torch's plain AdamW."""

from __future__ import annotations

import torch

from mafrt.config.train_config import LearnConfig
from mafrt.training.optimizers import load_moments, make_optimizer


def test_the_fused_steps_are_adamws_and_either_goes_on_from_the_others_moments():
    learn = LearnConfig(lr=0.05, weight_decay=0.1)
    generator = torch.Generator().manual_seed(1)
    weights = [torch.nn.Parameter(torch.randn(3, 4, generator=generator)) for _ in range(3)]
    twins = [torch.nn.Parameter(weight.detach().clone()) for weight in weights]
    optimizers = [make_optimizer(weights, learn, fused=True), make_optimizer(twins, learn)]
    for step in range(6):
        for weight, twin in zip(weights, twins, strict=True):
            weight.grad = torch.randn(3, 4, generator=generator)
            twin.grad = weight.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
        torch.testing.assert_close(weights, twins, atol=1e-6, rtol=1e-6)
        if step == 2:
            states = [optimizer.state_dict() for optimizer in optimizers]
            for optimizer, state in zip(optimizers, reversed(states), strict=True):
                load_moments(optimizer, state)
            assert optimizers[0].param_groups[0]["fused"] and not optimizers[1].param_groups[0]["fused"]
