"""The loss of one micro-batch, computed from the log-probabilities of the learner's forward pass, and its statistics.

`PolicyLoss` serves all on-policy algorithms. Offline training (`mafrt.runners.offline.sft`) provides its own `Loss` and
shares the learner's optimizers, micro-batches, skips and rollbacks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from mafrt.algorithms import Algorithm
from mafrt.algorithms.losses import (
    PolicyTerms,
    Stats,
    entropy_loss,
    kl_loss,
    mean_stats,
    sum_stats,
    truncated_importance_weights,
)
from mafrt.core.distributed import Processes
from mafrt.core.flat_tensors import on_cpu
from mafrt.core.types import Turn
from mafrt.models.tensors import integers, moved
from mafrt.training.batch import Batch

_NAMES = {
    ("policy", "clipped"): "clip_fraction",
    ("policy", "approx_kl"): "kl",
    ("policy", "ratio"): "ratio_mean",
    ("reference", "kl"): "ref_kl",
    ("importance", "weight"): "importance_weight_mean",
    ("importance", "capped"): "importance_weight_clipped",
    ("entropy", "entropy"): "entropy",
    ("step", "norm"): "grad_norm",
}
"""(term of the loss, statistic) -> name of the metric"""


COUNTS = frozenset({"skipped_updates", "rollbacks", "nonfinite_terms"})
"""metrics that add up over several updates"""


@dataclass
class UpdateMetrics:
    """Accumulates the losses' statistics. Values stay on their device until they are asked for."""

    adapters: Sequence[str]
    skipped: int = 0
    """optimizer steps skipped because of a gradient that is not finite"""
    rollbacks: int = 0
    """adapters rolled back to their last finite weights"""
    steps: int = 0
    _parts: dict[tuple[str, str], list[Stats]] = field(default_factory=dict)
    """(adapter, term) -> statistics of each micro-batch; the term `loss` is the loss itself, `step` is of the steps"""

    def add(self, adapter: str, term: str, stats: Stats) -> None:
        """Add the statistics of one loss term of one micro-batch, or of one step."""
        self._parts.setdefault((adapter, term), []).append(stats)

    def merge(self, other: UpdateMetrics) -> None:
        """Add everything from `other`."""
        self.skipped, self.rollbacks = self.skipped + other.skipped, self.rollbacks + other.rollbacks
        self.steps += other.steps
        for key, parts in other._parts.items():
            self._parts.setdefault(key, []).extend(parts)

    def _read(self) -> None:
        """Bring all values to the host, in one transfer for each type of number."""
        # Statistics of a loss of one's own may be plain numbers, which stay.
        every = [part for parts in self._parts.values() for part in parts]
        at = [(part, name) for part in every for name, value in part.items() if isinstance(value, Tensor)]
        for (part, name), value in zip(at, on_cpu([part[name] for part, name in at]), strict=True):
            part[name] = value

    def gather(self, processes: Processes) -> None:
        """Merge the losses' statistics of all processes; norms, steps and skips are already equal in all of them."""
        self._read()
        sums = [(*key, sum_stats(parts)) for key, parts in self._parts.items() if key[1] != "step"]
        self._parts = {key: parts for key, parts in self._parts.items() if key[1] == "step"}
        for adapter, term, stats in (entry for part in processes.gather(sums) for entry in part):
            exact = {name: torch.tensor(value, dtype=torch.float64) for name, value in stats.items()}
            self.add(adapter, term, exact)

    def mean_kl(self) -> float:
        """Mean KL estimate from the sampling policy, over the terms of all adapters; 0 if there were none."""
        self._read()
        parts = [part for (_, term), some in self._parts.items() if term == "policy" for part in some]
        return mean_stats(parts).get("approx_kl", 0.0)

    def by_name(self) -> dict[str, float]:
        """Metrics by name: per adapter `STATISTIC/ADAPTER`, and the counters."""
        self._read()
        metrics = {"skipped_updates": float(self.skipped), "rollbacks": float(self.rollbacks), "nonfinite_terms": 0.0}
        for (adapter, term), parts in self._parts.items():
            means = mean_stats(parts)
            if term == "policy":
                metrics["nonfinite_terms"] += means.get("nonfinite", 0.0)
            if term == "loss":
                metrics[f"policy_loss/{adapter}"] = means["loss"] / max(self.steps, 1)
            for (of, statistic), name in _NAMES.items():
                if of == term and statistic in means:  # a user-defined loss may report other statistics
                    metrics[f"{name}/{adapter}"] = means[statistic]
        return metrics


@dataclass
class LossDenominators:
    """Denominators of an adapter's loss, counted over the whole mini-batch."""

    tokens: int = 0
    turns: int = 0
    policy: int = 0
    """denominator of the policy loss: tokens, turns, or a constant number of tokens per turn (Dr. GRPO)"""

    def add(self, turn: Turn, objective: Objective) -> None:
        """Count a turn."""
        tokens, fixed = len(turn.action_ids) - len(turn.forced), objective.turn_tokens
        self.tokens, self.turns = self.tokens + tokens, self.turns + 1
        self.policy += 1 if objective.settings.level == "action" else fixed[turn.agent] if fixed else tokens


@dataclass(frozen=True)
class Objective:
    """The policy loss of an algorithm in a run.

    >>> mafrt.Objective(mafrt.make_algorithm("grpo", {"clip_high": 0.28})).of("any adapter").clip_high
    0.28
    """

    settings: Algorithm = field(default_factory=Algorithm)
    """level, clips, KL, entropy, and the loss itself (`Algorithm.policy_loss`)"""
    own: Mapping[str, Algorithm] = field(default_factory=dict)
    """adapter -> settings in place of `settings`, where its agents have clips, KL or entropy weights of their own"""
    turn_tokens: Mapping[str, int] | None = None
    """per agent: constant number of tokens per turn in the denominator (Dr. GRPO); None: the actual number"""
    cut: frozenset[str] = frozenset()
    """agents that sample from a truncated support (top-p, top-k). Their sampler's log-probs differ from `old_logprobs`
    by design, so they get no importance weights"""

    def of(self, adapter: str) -> Algorithm:
        """The settings of an adapter."""
        return self.own.get(adapter, self.settings)

    def kl_coef(self, adapter: str, steered: float) -> float:
        """Weight of an adapter's KL in the loss; `steered` is that of the adapters without one of their own."""
        agent_settings = self.own.get(adapter)
        if self.settings.kl_in != "loss" or agent_settings is None or agent_settings.kl_coef == self.settings.kl_coef:
            return steered
        return agent_settings.kl_coef

    @property
    def uses_entropy(self) -> bool:
        """Whether any adapter's loss has an entropy bonus."""
        return any(settings.entropy_coef for settings in (self.settings, *self.own.values()))


@dataclass(frozen=True)
class LossBatch:
    """One micro-batch as input of a loss. N action tokens in all its rows."""

    turns: list[Turn]
    """turns of the mini-batch in this micro-batch"""
    index: list[int]
    """position of each of them among the turns given to `Learner.update`"""
    batch: Batch
    """the rows of the forward pass (`Loss.forward_turns`)"""
    owners: list[str]
    """adapter of each row"""
    logprobs: Tensor
    """[N], differentiable"""
    entropy: Tensor
    """[N]"""
    denominators: Mapping[str, LossDenominators]
    """adapter -> denominators over the whole mini-batch"""
    metrics: UpdateMetrics
    """collects statistics"""
    weights: list[float] | None
    """per turn: factor on its policy terms (HAPPO's compound ratio)"""
    kl_coef: float
    """weight of the KL to the reference"""
    entropy_share: float = 1.0
    """factor on the weight of the entropy bonus (`--entropy_schedule`)"""


class Loss(Protocol):
    """The loss of a micro-batch: a sum over its terms, divided by denominators of the whole mini-batch."""

    def forward_turns(self, turns: list[Turn], index: list[int]) -> list[Turn]:
        """Rows of the forward pass for these turns, which stand at `index` in the batch; a pair's are two."""
        ...

    def of(self, part: LossBatch) -> Tensor:
        """The loss, 0-d and differentiable."""
        ...


class PolicyLoss:
    """Clipped policy gradient, entropy bonus and KL to the reference, with a denominator per adapter."""

    def __init__(self, objective: Objective) -> None:
        self.objective = objective

    def forward_turns(self, turns: list[Turn], index: list[int]) -> list[Turn]:
        return turns

    def of(self, part: LossBatch) -> Tensor:
        turns, batch, logprobs = part.turns, part.batch, part.logprobs
        adapters = tuple(dict.fromkeys(part.owners))
        kl_coefs = {name: self.objective.kl_coef(name, part.kl_coef) for name in adapters}
        values: dict[str, list[Sequence[float] | None]] = {
            "old": [turn.logprobs if turn.old_logprobs is None else turn.old_logprobs for turn in turns],
            "advantages": [turn.advantages for turn in turns],
        }
        if any(kl_coefs.values()):
            values["reference"] = [turn.ref_logprobs for turn in turns]
        if part.weights is not None:
            values["weights"] = [[w] * len(t.action_ids) for w, t in zip(part.weights, turns, strict=True)]
        # The sampler's log-probabilities, where they can differ from the trainer's.
        weighed = self.objective.settings.importance_cap is not None and any(t.old_logprobs is not None for t in turns)
        if weighed and (sampled := self._engine(turns)) is not None:
            values["engine"] = sampled
        given = batch.gather_all(values)
        old, advantages = given["old"], given["advantages"]
        reference, weights, engine = (given.get(name) for name in ("reference", "weights", "engine"))
        # The places of each adapter's tokens, found on the host: a device would be waited for to count them.
        places: dict[str, list[int]] = {name: [] for name in adapters}
        first = 0
        for turn, owner in zip(turns, part.owners, strict=True):
            places[owner] += range(first, first + len(turn.action_ids))
            first += len(turn.action_ids)
        words_of = integers([max(len(turn.text.split()), 1) for turn in turns])
        words, *places_of = moved([words_of, *(integers(places[name]) for name in adapters)], old.device)
        words, at_of = words[batch.turn], dict(zip(adapters, places_of, strict=True))
        total = logprobs.new_zeros(())
        # One term per adapter with its own denominator, so one agent's length does not scale another's loss.
        for name in adapters:
            settings = self.objective.of(name)
            at, count = at_of[name], part.denominators[name]
            factors = None if weights is None else weights[at]
            if engine is not None and settings.importance_cap is not None:
                trust, stats = truncated_importance_weights(
                    old[at],
                    engine[at],
                    cap=settings.importance_cap,
                    turn=batch.turn[at] if settings.level == "action" else None,
                )
                part.metrics.add(name, "importance", stats)
                factors = trust if factors is None else trust * factors
            loss, stats = settings.policy_loss(
                PolicyTerms(
                    logprobs[at],
                    old[at],
                    advantages[at],
                    denominator=count.policy,
                    turn=batch.turn[at],
                    words=words[at],
                    weights=factors,
                    ref_logprobs=None if reference is None else reference[at],
                )
            )
            part.metrics.add(name, "policy", stats)
            # Entropy and KL are terms of tokens, at action level too, so their mean is over tokens.
            bonus = settings.entropy_coef * part.entropy_share
            extra, stats = entropy_loss(part.entropy[at], coef=bonus, denominator=count.tokens)
            part.metrics.add(name, "entropy", stats)
            loss = loss + extra
            if reference is not None and kl_coefs[name]:
                extra, stats = kl_loss(
                    logprobs[at],
                    reference[at],
                    coef=kl_coefs[name],
                    denominator=count.tokens,
                    kind=settings.kl_estimator,
                    old_logprobs=old[at],
                )
                part.metrics.add(name, "reference", stats)
                loss = loss + extra
            part.metrics.add(name, "loss", {"loss": loss.detach()})
            total = total + loss
        return total

    def _engine(self, turns: Sequence[Turn]) -> list[Sequence[float] | None] | None:
        """The sampler's log-probabilities of each turn's tokens; None if they cannot differ from the trainer's.

        Agents that sample from a truncated support get the trainer's log-probabilities, so their weights are 1.
        """
        cut = self.objective.cut
        if not any(turn.old_logprobs is not None and turn.agent not in cut for turn in turns):
            return None
        return [
            turn.old_logprobs if turn.agent in cut and turn.old_logprobs is not None else turn.logprobs
            for turn in turns
        ]


def zero_means_no_gradient(loss: Loss, objective: Objective, kl_coefs: Sequence[float]) -> bool:
    """Whether turns with advantages of 0 need no pass: with the clipped loss, without entropy bonus and KL in it."""
    rules = (objective.settings, *objective.own.values())
    stock = all(type(rule).policy_loss is Algorithm.policy_loss for rule in rules)
    return type(loss) is PolicyLoss and stock and not objective.uses_entropy and not any(kl_coefs)
