"""Update phase of an iteration: value, credit, update, and metrics."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from mafrt import algorithms, engines
from mafrt.algorithms import CreditContext
from mafrt.algorithms.audit import audit_metrics
from mafrt.algorithms.happo import CompoundRatio
from mafrt.config.team import Team
from mafrt.config.train_config import TrainConfig
from mafrt.core.types import Episode, SamplingParams, Turn
from mafrt.engines import Engine
from mafrt.engines.logprob_gap import engine_gap
from mafrt.rollout.influence import fill_influence
from mafrt.rollout.player import PlayStats
from mafrt.rollout.tree_player import show_advantages, to_learn
from mafrt.runners.algorithm import Rule
from mafrt.runners.async_rollout import staleness
from mafrt.runners.build import make_critic, make_kl_control, make_learner
from mafrt.runners.evaluation import measures_of, score
from mafrt.runners.judge import Judge
from mafrt.runners.schedules import IterationPlan
from mafrt.training.reference import FrozenAdapters
from mafrt.training.update_metrics import COUNTS

if TYPE_CHECKING:
    from mafrt.models.several_bases import Bases


@dataclass(eq=False, repr=False)
class Updater:
    """Updates the scheduled adapters from a batch."""

    base: Bases
    """has the adapters of the team"""
    team: Team
    config: TrainConfig
    rule: Rule
    sampling: Mapping[str, SamplingParams]
    """by agent"""
    engine: Engine
    """sampled the batch; if it is not the base itself, log-probs are recomputed"""
    context: CreditContext
    """the constant part of the context of `algorithms.assign`"""
    judge: Judge | None
    """judged the batch; None without a coach"""

    def __post_init__(self) -> None:
        self.critic = make_critic(self.base, self.team, self.config, self.rule)
        self.learner = make_learner(self.base, self.team, self.config, self.rule, self.sampling)
        self.kl = make_kl_control(self.rule.settings)
        self.reference: FrozenAdapters | None = None
        """copies of the adapters that the run starts from; None: the reference is the base, or there is none"""
        if self.rule.reference and self.rule.settings.reference == "initial":
            adapter_of = {agent.name: agent.adapter for agent in self.team.agents}
            self.reference = FrozenAdapters(self.base, self.team.adapters, adapter_of)

    @property
    def kl_coef(self) -> float | None:
        """Weight of the KL penalty that a target has steered to; None where it is fixed."""
        return None if self.kl is None else self.kl.coef

    @kl_coef.setter
    def kl_coef(self, coef: float | None) -> None:
        if self.kl is not None and coef is not None:
            self.kl.coef = coef

    def learn(self, episodes: list[Episode], stats: PlayStats, iteration: int) -> dict[str, float]:
        """Fill the turns' values and advantages, update the scheduled adapters, and return the metrics.

        Args:
            episodes: a whole batch, judged if there is a coach.
            stats: of its play.
            iteration: iterations completed before it.
        """
        rule, settings = self.rule, self.rule.settings
        plan = rule.schedule.plan(iteration)
        trained = to_learn(episodes)
        turns = [turn for episode in trained for turn in episode.turns]
        temperatures = {name: how.temperature for name, how in self.sampling.items()}
        features: Any = self.critic.annotate(
            trained,
            temperatures,
            values=rule.critic is not None,
            # Only the base's own log-probs come with the critic's pass.
            reference=rule.reference and self.reference is None,
        )
        if self.reference is not None:
            for turn, values in zip(turns, self.reference.logprobs(self.learner, turns, plan.adapters), strict=True):
                turn.ref_logprobs = values
        # Then the log-probs of the sampler are not exactly those of the trainer, which computes its own.
        # A sampler of another implementation, precision or age has other log-probs than the trainer.
        foreign = engines.is_foreign(self.engine) or self.base.quantised or self.config.play.async_steps > 0
        if foreign or any(how.truncated for how in self.sampling.values()):
            self.learner.recompute_logprobs(turns, plan.adapters)
        if settings.needs_influence:
            self._fill_influence(trained, plan)
        stale = staleness(turns, self.base.versions, plan.adapters) if self.config.play.async_steps else {}
        kl_coef = settings.kl_coef if self.kl is None else self.kl.coef
        context = replace(self.context, kl_coef=kl_coef, **features.credit)
        metrics = algorithms.assign(trained, settings, context)
        metrics |= stale | stats.replayed
        show_advantages(episodes)
        metrics |= audit_metrics(episodes)
        if foreign:
            metrics |= engine_gap(turns, self.sampling)
        if self.judge is not None:
            metrics |= self.judge.metrics(episodes)
        if self.judge is None or not self.judge.too_few(episodes):
            if rule.critic is not None:
                metrics |= self.critic.update(features, iteration)
            metrics |= self._update(trained, plan, iteration, kl_coef)
        if self.kl is not None:
            metrics["kl_coef"] = kl_coef
            # After the update, so that the whole batch was learnt with one coefficient.
            self.kl.update(mean_of(metrics, "ref_kl"), len(turns))
        metrics |= batch_metrics(rule, self.team, episodes, turns, stats)
        metrics |= {f"lr/{name}": self.learner.rate(plan.adapters[name], iteration) for name in plan.agents}
        metrics |= {f"trained/{name}": float(name in plan.agents) for name in self.team.names}
        metrics |= {f"adapter_version/{name}": float(self.base.versions[name]) for name in self.team.adapters}
        # Sorted, so that files of two runs can be compared line by line.
        return dict(sorted(metrics.items()))

    def _fill_influence(self, episodes: Sequence[Episode], plan: IterationPlan) -> None:
        """Fill `influence` of the turns under the current adapters."""
        tokenizers = {name: self.base.of_agent(name).tokenizer for name in self.team.names}
        fill_influence(episodes, self.team, tokenizers, lambda turns: self.learner.logprobs(turns, plan.adapters))

    def _update(self, episodes: list[Episode], plan: IterationPlan, iteration: int, kl_coef: float) -> dict[str, float]:
        """Move the learning adapters: all at once, or group after group with HAPPO's compound ratio."""
        turns = [turn for episode in episodes for turn in episode.turns]
        cast: Any = {"adapter_of": plan.adapters, "kl_coef": kl_coef}
        if not plan.compound:
            return self.learner.update(turns, plan.agents, iteration, **cast)
        ratio = CompoundRatio(episodes)
        metrics: dict[str, float] = {}
        for group in plan.learners:
            for agent in group:
                metrics |= ratio.spread(agent)
            group_metrics = self.learner.update(turns, group, iteration, ratio.weights(), **cast)
            metrics |= {name: metrics.get(name, 0.0) + v if name in COUNTS else v for name, v in group_metrics.items()}
            own = [position for position, turn in enumerate(turns) if turn.agent in group and turn.action_ids]
            new_logprobs = self.learner.logprobs([turns[position] for position in own], plan.adapters)
            # Log-probs after this group's update weight the groups that follow.
            ratio.update(zip(own, new_logprobs, strict=True))
        return metrics | ratio.metrics()


def batch_metrics(
    rule: Rule, team: Team, episodes: Sequence[Episode], turns: Sequence[Turn], stats: PlayStats
) -> dict[str, float]:
    """Metrics of the batch: scores, lengths, the environment's own measures, and lost episodes."""
    scores = [score(episode) for episode in episodes]
    metrics = {
        "score": sum(scores) / len(scores),
        "episodes": float(len(episodes)),
        "turns": float(len(turns)),
        "tokens": float(stats.tokens),
        "env_errors": float(stats.env_errors),
        "env_lost_share": stats.lost_share(len(episodes)),
        "prompt_too_long": float(stats.prompt_too_long),
    }
    if rule.tree_samples > 1:
        metrics["tree_unscored"] = stats.tree_unscored / max(stats.tree_turns, 1)
        metrics["tree_errors"] = float(stats.tree_errors)
    if rule.sampling_rounds:
        metrics["sampling_rounds"] = float(stats.sampling_rounds)
        metrics["groups_replaced"] = float(stats.groups_replaced)
    measured = measures_of([episode.info.get("measures", {}) for episode in episodes])
    metrics |= {f"measure/{name}": value for name, value in measured.items()}
    for name in team.names:
        own = [turn for turn in turns if turn.agent == name]
        if own:
            metrics[f"tokens/{name}"] = sum(len(turn.action_ids) for turn in own) / len(own)
            # An answer that may have one token only has no rest that could be missing.
            cut = sum(turn.stop == "length" and len(turn.action_ids) > 1 for turn in own)
            metrics[f"truncated_share/{name}"] = cut / len(own)
    return metrics


def mean_of(metrics: Mapping[str, float], name: str) -> float:
    """Mean of a metric over agents; NaN if it was not measured."""
    values = [value for key, value in metrics.items() if key.startswith(f"{name}/")]
    return sum(values) / len(values) if values else math.nan
