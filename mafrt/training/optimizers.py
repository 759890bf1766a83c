"""Optimizer construction and state restore. Steps are in `mafrt.training.optimizer_steps`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from mafrt.config.agent import OPTIMIZER_SETTINGS
from mafrt.config.team import Team
from mafrt.config.train_config import LearnConfig
from mafrt.core.extras import package


def learn_settings(team: Team, default: LearnConfig) -> dict[str, LearnConfig]:
    """Optimizer settings of each adapter: those of its agents, else `default`."""
    return {name: replace(default, **team.settings_for(name, OPTIMIZER_SETTINGS)) for name in team.adapters}


def make_optimizer(
    parameters: Iterable[nn.Parameter], learn: LearnConfig, *, fused: bool = False
) -> torch.optim.Optimizer:
    """The optimizer selected by `--optimizer`, for one adapter. Raises MissingExtraError without bitsandbytes.

    `fused`: use torch's kernel of a whole AdamW step, a third of the time for the hundreds of small tensors of an
    adapter.
    """
    settings: dict[str, Any] = {"lr": learn.lr, "eps": learn.opti_eps, "weight_decay": learn.weight_decay}
    if learn.optimizer == "adamw":
        return torch.optim.AdamW(parameters, **settings, fused=fused)
    bitsandbytes = package(f"optimizer {learn.optimizer!r}", "quant", "bitsandbytes")
    optimizer: torch.optim.Optimizer = bitsandbytes.optim.PagedAdamW8bit(parameters, **settings)
    return optimizer


def critic_optimizer(parameters: Iterable[nn.Parameter], lr: float, learn: LearnConfig) -> torch.optim.Optimizer:
    """AdamW for a critic, or for the Q heads and mixer of VDN and QMIX."""
    # No decay: it would pull the values to 0, while returns have any scale.
    return torch.optim.AdamW(parameters, lr=lr, eps=learn.opti_eps, weight_decay=0.0)


def load_moments(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Restore the moments from `state` but keep the current hyperparameters, which a resumed run may change."""
    groups = [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
    optimizer.load_state_dict(dict(state))
    for group, settings in zip(optimizer.param_groups, groups, strict=True):
        group.update(settings)
