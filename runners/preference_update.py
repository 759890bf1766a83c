"""Update phase of `spin`: pairs of the batch's answers, and DPO steps against the adapters' own past.

The reference is a copy of every adapter on the same base, renewed every `ref_update_freq` iterations. It is a part of
the checkpoint, so a resumed run repeats an uninterrupted one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from mafrt import algorithms
from mafrt.algorithms import CreditContext
from mafrt.algorithms.spin import Spin
from mafrt.config.team import Team
from mafrt.config.train_config import TrainConfig
from mafrt.core.errors import ConfigError
from mafrt.core.seeding import permutation, seed_of
from mafrt.core.types import Episode, SamplingParams
from mafrt.engines import Engine
from mafrt.runners.algorithm import RunAlgorithm
from mafrt.runners.build import make_critic
from mafrt.runners.offline.dataset import Record, turn_of
from mafrt.runners.offline.dpo import Dpo, pairs_of
from mafrt.runners.offline.replay import RecordedTurn
from mafrt.runners.offline.sft import RecordLearner
from mafrt.runners.schedules import IterationPlan
from mafrt.training.learner import Learner
from mafrt.training.lr_schedule import make_lr_schedule
from mafrt.training.policy_objective import COUNTS
from mafrt.training.reference import FrozenAdapters

if TYPE_CHECKING:
    from mafrt.models.several_bases import Bases

_REFERENCE = "@reference"
"""Name of the reference's weights among the learner's state; no adapter may be called so."""


class ReferenceLearner:
    """A learner, and copies of its adapters as they were when `renew` was last called.

    Args:
        learner: has the optimizers.
        adapters: adapters with a reference.
    """

    def __init__(self, learner: Learner, adapters: Sequence[str]) -> None:
        self.learner = learner
        self.reference = FrozenAdapters(learner.base, adapters, learner.adapter_of)
        self.renew = self.reference.renew

    def refer(self, records: Sequence[Record]) -> None:
        """Fill `reference` of every record with the log-probabilities of its answers under the copies."""
        logprobs = self.reference.logprobs(self.learner, [turn for record in records for turn in record.turns])
        sums = iter([float(torch.tensor(values, dtype=torch.float64).sum()) for values in logprobs])
        for record in records:
            record.reference = tuple(next(sums) for _ in record.turns)

    @property
    def slowdown(self) -> float:
        """Factor on all learning rates."""
        return self.learner.slowdown

    @slowdown.setter
    def slowdown(self, factor: float) -> None:
        self.learner.slowdown = factor

    def rate(self, adapter: str, iteration: int) -> float:
        """Learning rate of an adapter in an iteration."""
        return self.learner.rate(adapter, iteration)

    def forget(self, adapter: str) -> None:
        """Reset the moments of an adapter's optimizer."""
        self.learner.forget(adapter)

    def state(self) -> dict[str, Any]:
        """Optimizer state by adapter, and the reference's weights."""
        return {**self.learner.state(), _REFERENCE: self.reference.state()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.learner.load_state(state)
        self.reference.load_state(state[_REFERENCE])


@dataclass(eq=False, repr=False)
class PreferenceUpdater:
    """Learns pairs of a batch; has the interface of `mafrt.runners.update.Updater`."""

    base: Bases
    team: Team
    config: TrainConfig
    rule: RunAlgorithm
    sampling: Mapping[str, SamplingParams]
    engine: Engine
    context: CreditContext
    reference: None = None
    """its own reference is in the learner"""
    kl: None = None
    """no penalty to steer: the reference is in the loss"""

    def __post_init__(self) -> None:
        if len(self.base.parts) > 1 or self.base.processes.size > 1 or self.config.play.async_steps:
            raise ConfigError("spin learns on one base, in one process and without async_steps; leave the others out.")
        assert isinstance(self.rule.settings, Spin)
        self.settings = self.rule.settings
        self.critic = make_critic(self.base, self.team, self.config, self.rule)
        self.records = RecordLearner(
            self.base.main,
            self.team,
            self.config.learn,
            Dpo(self.settings.beta),
            seed_of(self.config.run.seed, "learner"),
            make_lr_schedule(self.config.learn, self.config.run.iterations),
        )
        self.learner = ReferenceLearner(self.records.learner, self.team.adapters)
        self.pairs: list[Record] = []
        """of the present batch"""

    def value(self, episodes: Sequence[Episode], plan: IterationPlan, iteration: int) -> None:
        """Renew the reference where it is due."""
        if iteration % self.settings.ref_update_freq == 0:
            self.learner.renew()

    def credit(self, episodes: Sequence[Episode], features: None, plan: IterationPlan) -> dict[str, float]:
        """Pair the answers of the scheduled agents by their rewards."""
        metrics = algorithms.assign(episodes, self.settings, self.context)
        self.pairs = self._pairs(episodes, plan.agents)
        counts = {agent: sum(pair.agent == agent for pair in self.pairs) for agent in plan.agents}
        return metrics | {f"pairs/{agent}": float(count) for agent, count in counts.items()}

    def update(
        self, episodes: Sequence[Episode], features: None, plan: IterationPlan, iteration: int
    ) -> dict[str, float]:
        """Take the DPO steps."""
        return self._steps(self.pairs, iteration)

    def _pairs(self, episodes: Sequence[Episode], agents: Sequence[str]) -> list[Record]:
        """Pairs of answers with their reference; the tokens are copies, so the episodes' turns stay as they are."""
        rewards = algorithms.turn_rewards(episodes, self.settings, self.context)
        turns = [
            RecordedTurn(
                turn_of(turn.agent, turn.prompt_ids, turn.action_ids, turn.stop, turn.text),
                episode.group,
                reward,
                episode.id,
            )
            for episode, rewards_of_turns in zip(episodes, rewards, strict=True)
            for turn, reward in zip(episode.turns, rewards_of_turns, strict=True)
            if reward is not None and turn.action_ids and turn.agent in agents
        ]
        pairs = pairs_of(turns, self.settings.min_gap)
        self.learner.refer(pairs)
        return pairs

    def _steps(self, pairs: Sequence[Record], iteration: int) -> dict[str, float]:
        """All passes over the pairs. Returns the means of the first pass before each step, and sums of counts."""
        learn, first = self.config.learn, list[dict[str, float]]()
        counts = dict.fromkeys(COUNTS, 0.0)
        for epoch in range(learn.ppo_epoch if pairs else 0):
            order = permutation(len(pairs), self.config.run.seed, "pairs", iteration, epoch)
            size = -(-len(order) // learn.num_mini_batch)
            for start in range(0, len(order), size):
                step_metrics = self.records.step([pairs[place] for place in order[start : start + size]], iteration)
                for name in COUNTS:
                    counts[name] += step_metrics.pop(name, 0.0)
                if epoch == 0:
                    first.append(step_metrics)
        names = sorted({name for step_metrics in first for name in step_metrics})
        values = {name: [step_metrics[name] for step_metrics in first if name in step_metrics] for name in names}
        return counts | {name: sum(some) / len(some) for name, some in values.items()}
