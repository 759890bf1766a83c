"""Builds the parts of a run from its settings. Imports torch: call it after the arguments are parsed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from mafrt import credit
from mafrt.config import TrainConfig
from mafrt.learner import Learner, Objective
from mafrt.mixing import Mixing
from mafrt.policy import SharedBase
from mafrt.runners.rule import Rule
from mafrt.seeding import seed_of
from mafrt.team import LoraSpec, Team
from mafrt.types import SamplingParams
from mafrt.valuation import Valuation

if TYPE_CHECKING:
    from mafrt.engine.local import LocalEngine


def place_adapters(base: SharedBase, team: Team, default: LoraSpec, seed: int) -> None:
    """Add an adapter to `base` for every adapter of the team that is not there yet."""
    for name in team.adapters:
        if name not in base.adapters:
            base.add_adapter(name, team.lora_for(name, default), seed=seed_of(seed, "adapter", name))


def make_valuation(base: SharedBase, team: Team, config: TrainConfig, rule: Rule) -> Valuation | Mixing:
    """The critic, or the mixer that takes its place."""
    seed = seed_of(config.run.seed, "critic")
    if rule.mixer:
        gamma = rule.credit.get("gamma", credit.settings_of(rule.name)["gamma"])
        return Mixing(base, config.learn, team.names, rule.mixer, gamma, seed)
    return Valuation(base, config.learn, rule.level, seed, central=rule.critic == "transcript")


def make_learner(
    base: SharedBase, team: Team, config: TrainConfig, rule: Rule, sampling: Mapping[str, SamplingParams]
) -> Learner:
    """The learner, with each adapter's own learning rate (of the first agent that sets one)."""
    rates = dict.fromkeys(team.adapters, config.learn.lr)
    for agent in reversed(team.agents):
        if agent.lr is not None:
            rates[agent.adapter] = agent.lr
    base.gradient_checkpointing(config.learn.gradient_checkpointing)
    return Learner(
        base,
        {agent.name: agent.adapter for agent in team.agents},
        {name: how.temperature for name, how in sampling.items()},
        rates,
        config.learn,
        Objective(
            level=rule.level,
            clip_low=rule.clip_low,
            clip_high=rule.clip_high,
            normalize=rule.normalize,
            turn_tokens={name: how.max_new_tokens for name, how in sampling.items()} if rule.constant_length else None,
        ),
        seed_of(config.run.seed, "learner"),
    )


def make_local_engine(base: SharedBase, config: TrainConfig) -> LocalEngine:
    """The engine that samples on the shared base itself."""
    from mafrt.engine.local import LocalEngine

    return LocalEngine(base, max_batch_rows=config.play.max_batch_rows)
