"""The loss of one micro-batch, computed from the log-probabilities of the learner's forward pass, and its statistics.

`PolicyLoss` serves all on-policy algorithms. Offline training (`mafrt.runners.offline.sft`) provides its own `Loss` and
shares the learner's optimizers, micro-batches, skips and rollbacks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
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
    _parts: dict[str, dict[str, list[Stats]]] = field(default_factory=dict)
    _losses: dict[str, list[Tensor]] = field(default_factory=dict)
    _norms: dict[str, list[Tensor]] = field(default_factory=dict)

    def add(self, adapter: str, term: str, stats: Stats) -> None:
        """Add the statistics of one loss term of one micro-batch."""
        self._parts.setdefault(adapter, {}).setdefault(term, []).append(stats)

    def add_loss(self, adapter: str, loss: Tensor) -> None:
        """Add a micro-batch's share of a step's loss."""
        self._losses.setdefault(adapter, []).append(loss.detach())

    def add_norm(self, adapter: str, norm: Tensor) -> None:
        """Add the gradient norm of a completed step."""
        self._norms.setdefault(adapter, []).append(norm.detach())

    def merge(self, other: UpdateMetrics) -> None:
        """Add everything from `other`."""
        self.skipped, self.rollbacks = self.skipped + other.skipped, self.rollbacks + other.rollbacks
        self.steps += other.steps
        for adapter, terms in other._parts.items():
            for term, parts in terms.items():
                self._parts.setdefault(adapter, {}).setdefault(term, []).extend(parts)
        for own, added in ((self._losses, other._losses), (self._norms, other._norms)):
            for adapter, values in added.items():
                own.setdefault(adapter, []).extend(values)

    def _read(self) -> None:
        """Bring all values to the host, in one transfer for each type of number."""
        stats = [part for terms in self._parts.values() for parts in terms.values() for part in parts]
        lists = [*self._losses.values(), *self._norms.values()]
        # Statistics of a loss of one's own may be plain numbers, which stay.
        at = [(part, name) for part in stats for name, value in part.items() if isinstance(value, Tensor)]
        values = iter(on_cpu([*(part[name] for part, name in at), *(value for own in lists for value in own)]))
        for part, name in at:
            part[name] = next(values)
        for own in lists:
            own[:] = [next(values) for _ in own]

    def gather(self, processes: Processes) -> None:
        """Merge the losses' statistics of all processes; norms, steps and skips are already equal in all of them."""
        self._read()
        parts = {name: {term: _total(some) for term, some in terms.items()} for name, terms in self._parts.items()}
        losses = {name: sum(map(float, values)) for name, values in self._losses.items()}
        self._parts, self._losses = {}, {}
        for part in processes.gather({"parts": parts, "losses": losses}):
            for name, terms in part["parts"].items():
                for term, stats in terms.items():
                    self.add(name, term, {key: torch.tensor(value) for key, value in stats.items()})
            for name, loss in part["losses"].items():
                self.add_loss(name, torch.tensor(loss, dtype=torch.float64))

    def mean_kl(self) -> float:
        """Mean KL estimate from the sampling policy, over the terms of all adapters; 0 if there were none."""
        self._read()
        parts = [part for terms in self._parts.values() for part in terms.get("policy", ())]
        return mean_stats(parts).get("approx_kl", 0.0)

    def by_name(self) -> dict[str, float]:
        """Metrics by name: per adapter `STATISTIC/ADAPTER`, and the counters."""
        self._read()
        metrics: dict[str, float] = {}
        bad = 0.0
        for adapter in self.adapters:
            for term, parts in self._parts.get(adapter, {}).items():
                means = mean_stats(parts)
                bad += means.get("nonfinite", 0.0) if term == "policy" else 0.0
                for (of, statistic), name in _NAMES.items():
                    if of == term and statistic in means:  # a user-defined loss may report other statistics
                        metrics[f"{name}/{adapter}"] = means[statistic]
            if adapter in self._losses:
                metrics[f"policy_loss/{adapter}"] = sum(float(v) for v in self._losses[adapter]) / max(self.steps, 1)
            if adapter in self._norms:
                metrics[f"grad_norm/{adapter}"] = sum(map(float, self._norms[adapter])) / len(self._norms[adapter])
        metrics |= {
            "skipped_updates": float(self.skipped),
            "rollbacks": float(self.rollbacks),
            "nonfinite_terms": bad,
        }
        return metrics


def _total(parts: Iterable[Stats]) -> dict[str, float]:
    """Statistics of several micro-batches as those of one."""
    totals: dict[str, float] = {}
    for part in parts:
        for name, value in part.items():
            known = totals.get(name)
            number = float(value)
            if known is not None:
                number = max(known, number) if name.endswith("_max") else known + number
            totals[name] = number
    return totals


@dataclass
class LossDenominators:
    """Denominators of an adapter's loss, counted over the whole mini-batch."""

    tokens: int = 0
    turns: int = 0
    policy: int = 0
    """denominator of the policy loss: tokens, turns, or a constant number of tokens per turn (Dr. GRPO)"""


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
        own = self.own.get(adapter)
        if self.settings.kl_in != "loss" or own is None or own.kl_coef == self.settings.kl_coef:
            return steered
        return own.kl_coef

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
        by_name = dict(zip(values, batch.gather_all(list(values.values())), strict=True))
        old, advantages = by_name["old"], by_name["advantages"]
        reference, weights, engine = (by_name.get(name) for name in ("reference", "weights", "engine"))
        # The places of each adapter's tokens, found on the host: a device would be waited for to count them.
        places: dict[str, list[int]] = {name: [] for name in adapters}
        first = 0
        for turn, owner in zip(turns, part.owners, strict=True):
            places[owner] += range(first, first + len(turn.action_ids))
            first += len(turn.action_ids)
        words_of = integers([max(len(turn.text.split()), 1) for turn in turns])
        words, *own = moved([words_of, *(integers(places[name]) for name in adapters)], old.device)
        words, at_of = words[batch.turn], dict(zip(adapters, own, strict=True))
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
            part.metrics.add_loss(name, loss)
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
    """Whether a turn with advantages of 0 has a gradient of 0, so that its forward and backward pass can be left out.

    True for the clipped policy loss without entropy bonus and without KL in the loss. A policy loss of one's own may
    have other terms.
    """
    rules = (objective.settings, *objective.own.values())
    stock = all(type(rule).policy_loss is Algorithm.policy_loss for rule in rules)
    return type(loss) is PolicyLoss and stock and not objective.uses_entropy and not any(kl_coefs)
