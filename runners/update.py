"""The stages of an iteration that learn: value, credit, update."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from mafrt import algorithms, engines
from mafrt.algorithms import CreditContext
from mafrt.algorithms.happo import CompoundRatio
from mafrt.config.team import Team
from mafrt.config.train_config import TrainConfig
from mafrt.core.types import Episode, SamplingParams
from mafrt.engines import Engine
from mafrt.engines.logprob_gap import engine_gap
from mafrt.rollout.influence import fill_influence
from mafrt.runners.algorithm import RunAlgorithm
from mafrt.runners.async_rollout import staleness
from mafrt.runners.build import make_critic, make_kl_control, make_learner
from mafrt.runners.schedules import IterationPlan
from mafrt.training.policy_objective import COUNTS
from mafrt.training.reference import FrozenAdapters

if TYPE_CHECKING:
    from mafrt.models.several_bases import Bases
    from mafrt.rollout.teacher import Teacher


@dataclass(eq=False, repr=False)
class Updater:
    """Values, credits and learns from a batch; what a rule declares as its updater has these three methods."""

    base: Bases
    """has the adapters of the team"""
    team: Team
    config: TrainConfig
    rule: RunAlgorithm
    sampling: Mapping[str, SamplingParams]
    """by agent"""
    engine: Engine
    """sampled the batch; if it is not the base itself, log-probs are recomputed"""
    context: CreditContext
    """the constant part of the context of `algorithms.assign`"""

    def __post_init__(self) -> None:
        self.critic = make_critic(self.base, self.team, self.config, self.rule)
        self.learner = make_learner(self.base, self.team, self.config, self.rule, self.sampling)
        self.kl = make_kl_control(self.rule.settings)
        self.reference: FrozenAdapters | None = None
        """copies of the adapters that the run starts from; None: the reference is the base, or there is none"""
        if self.rule.reference and self.rule.settings.reference == "initial":
            adapter_of = {agent.name: agent.adapter for agent in self.team.agents}
            self.reference = FrozenAdapters(self.base, self.team.adapters, adapter_of)
        self.teacher: Teacher | None = None
        if self.rule.settings.needs_teacher:
            from mafrt.rollout.teacher import Teacher

            rule: Any = self.rule.settings
            path = getattr(rule, "teacher_path", None)
            self.teacher = Teacher(
                self.base, self.team, rule.teacher_prompt, path, themselves=not hasattr(rule, "teacher_path")
            )

    def value(self, episodes: Sequence[Episode], plan: IterationPlan, iteration: int) -> Any:
        """Fill the values, the reference's log-probabilities and, where the sampler's are others, the trainer's own.

        Returns features of the batch, which the rule's critic takes back in `update`; None where it reads nothing.
        """
        rule, turns = self.rule, [turn for episode in episodes for turn in episode.turns]
        features: Any = None
        # Only the base's own log-probs come with the critic's pass.
        base_reference = rule.reference and self.reference is None
        if rule.critic is not None or base_reference:
            temperatures = {name: how.temperature for name, how in self.sampling.items()}
            features = self.critic.annotate(
                episodes, temperatures, values=rule.critic is not None, reference=base_reference
            )
        if self.reference is not None:
            for turn, values in zip(turns, self.reference.logprobs(self.learner, turns, plan.adapters), strict=True):
                turn.ref_logprobs = values
        if self.foreign or any(how.truncated for how in self.sampling.values()):
            for turn, values in zip(turns, self.learner.logprobs(turns, plan.adapters), strict=True):
                turn.old_logprobs = values
        if self.teacher is not None:
            self.teacher.fill(episodes, self.learner, plan.adapters)
        if rule.influence:
            tokenizers = {name: self.base.of_agent(name).tokenizer for name in self.team.names}
            fill_influence(episodes, self.team, tokenizers, lambda turns: self.learner.logprobs(turns, plan.adapters))
        return features

    def credit(self, episodes: Sequence[Episode], features: Any, plan: IterationPlan) -> dict[str, float]:
        """Fill advantages and returns; metrics of them, and of how the samples differ from the trainer's weights."""
        turns = [turn for episode in episodes for turn in episode.turns]
        context = replace(self.context, kl_coef=self.kl_coef, **getattr(features, "credit", {}))  # of a mixer
        metrics = algorithms.assign(episodes, self.rule.settings, context)
        if self.config.play.async_steps:
            metrics |= staleness(turns, self.base.versions, plan.adapters)
        if self.foreign:
            metrics |= engine_gap(turns, self.sampling)
        return metrics

    def update(
        self, episodes: Sequence[Episode], features: Any, plan: IterationPlan, iteration: int
    ) -> dict[str, float]:
        """Move critic and learning adapters: these at once, or group after group with HAPPO's compound ratio."""
        metrics = self.critic.update(features, iteration) if self.rule.critic is not None else {}
        if plan.compound:
            return metrics | self._update_groups(episodes, plan, iteration)
        turns = [turn for episode in episodes for turn in episode.turns]
        how: Any = {"adapter_of": plan.adapters, "kl_coef": self.kl_coef}
        return metrics | self.learner.update(turns, plan.agents, iteration, **how)

    def _update_groups(self, episodes: Sequence[Episode], plan: IterationPlan, iteration: int) -> dict[str, float]:
        """Group after group of agents, each weighted by the ratio of those before it (HAPPO)."""
        metrics: dict[str, float] = {}
        turns = [turn for episode in episodes for turn in episode.turns]
        how: Any = {"adapter_of": plan.adapters, "kl_coef": self.kl_coef}
        ratio = CompoundRatio(episodes)
        for group in plan.learners:
            for agent in group:
                metrics |= ratio.spread(agent)
            group_metrics = self.learner.update(turns, group, iteration, ratio.weights(), **how)
            metrics |= {name: metrics.get(name, 0.0) + v if name in COUNTS else v for name, v in group_metrics.items()}
            positions = [position for position, turn in enumerate(turns) if turn.agent in group and turn.action_ids]
            new_logprobs = self.learner.logprobs([turns[position] for position in positions], plan.adapters)
            # Log-probs after this group's update weight the groups that follow.
            ratio.update(zip(positions, new_logprobs, strict=True))
        return metrics | ratio.metrics()

    @property
    def foreign(self) -> bool:
        """Whether the sampler has other log-probs than the trainer: by implementation, precision or age."""
        return engines.is_foreign(self.engine) or self.base.quantised or self.config.play.async_steps > 0

    @property
    def kl_coef(self) -> float:
        """Weight of the KL penalty, as it is steered or set."""
        return self.rule.settings.kl_coef if self.kl is None else self.kl.coef
