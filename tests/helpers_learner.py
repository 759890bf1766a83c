"""A tiny base with the adapters of two agents, turns of theirs, and a learner."""

from __future__ import annotations

import torch
from helpers_models import tiny_base

from mafrt.algorithms import Algorithm
from mafrt.config.agent import LoraSpec
from mafrt.config.team import Team
from mafrt.config.train_config import LearnConfig
from mafrt.core.types import Turn
from mafrt.training.learner import Learner
from mafrt.training.policy_objective import Objective

AGENTS = ("ann", "bob")


CONFIG = LearnConfig(lr=1e-2, ppo_epoch=1, max_grad_norm=1e9)


def make_base():
    base = tiny_base()
    for index, name in enumerate((*AGENTS, "cat")):
        base.add_adapter(name, LoraSpec(rank=2 + index, alpha=4.0), seed=5)
        torch.manual_seed(index)
        with torch.no_grad():
            for parameter in base.adapter_parameters(name):
                parameter.add_(0.05 * torch.randn_like(parameter))
        base.bump(name)
    return base


def make_turns(count=9, seed=0):
    generator = torch.Generator().manual_seed(seed)
    turns = []
    for index in range(count):
        prompt, action = (torch.randint(3, 15, (1,), generator=generator).item() for _ in range(2))
        ids = torch.randint(5, 90, (prompt + action,), generator=generator).tolist()
        turns.append(
            Turn(
                agent=AGENTS[index % 3 == 0],
                prompt_ids=ids[:prompt],
                action_ids=ids[prompt:],
                logprobs=(-4 + torch.randn(action, generator=generator)).tolist(),
                stop="eos",
                text="one two",
                turn=0,
                env_step=0,
                adapter_version=0,
                advantages=[torch.randn(1, generator=generator).item()] * action,
            )
        )
    return turns


def make_learner(base, config=CONFIG, level="token", temperatures=(1.0, 0.7), **settings):
    return Learner(
        base,
        Team.of(AGENTS),
        config,
        Objective(Algorithm(level=level, **{"importance_cap": None, **settings})),
        seed=3,
        temperatures=dict(zip(AGENTS, temperatures, strict=True)),
    )


def weights(base, name):
    return [p.detach().clone() for p in base.adapter_parameters(name)]


def close(a, b):
    return all(torch.allclose(x, y, rtol=1e-4, atol=1e-6) for name in a for x, y in zip(a[name], b[name], strict=True))
