"""Statistics of one update, per adapter, merged over micro-batches and steps."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from mafrt.algorithms.losses import Stats, mean_stats
from mafrt.core.distributed import Processes

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


class UpdateMetrics:
    """Accumulates the losses' statistics. Values stay tensors until `by_name`, to avoid device synchronisation."""

    def __init__(self, adapters: Iterable[str]) -> None:
        self.adapters = tuple(adapters)
        self.skipped = 0
        """optimizer steps skipped because of a gradient that is not finite"""
        self.rollbacks = 0
        """adapters rolled back to their last finite weights"""
        self.steps = 0
        self._parts: dict[str, dict[str, list[Stats]]] = {}
        self._losses: dict[str, list[Tensor]] = {}
        self._norms: dict[str, list[Tensor]] = {}

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

    def gathered(self, processes: Processes) -> None:
        """Merge the losses' statistics of all processes; norms, steps and skips are already equal in all of them."""
        if processes.size == 1:
            return
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
        parts = [part for terms in self._parts.values() for part in terms.get("policy", ())]
        return mean_stats(parts).get("approx_kl", 0.0)

    def by_name(self) -> dict[str, float]:
        """Metrics by name: per adapter `STATISTIC/ADAPTER`, and the counters."""
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
