"""Metrics of audited turns: does the credit that was paid agree with what the turns were worth?

fidelity: Spearman's correlation of a turn's mean advantage with the gain that replays found (C3, 2603.06859): 1 for
credit that ranks turns as the replays do, about 0 for credit that knows nothing of them. Few turns and few replays make
it noisy: its deviation is about 1 / sqrt(turns - 1), and noise in the gain pulls it towards 0.
"""

from __future__ import annotations

from collections.abc import Sequence

from mafrt.algorithms.stats import mean, rank_correlation, std
from mafrt.core.types import Episode

LEAST = 3
"""Audited turns of an agent below which nothing is said of them."""


def audit_metrics(episodes: Sequence[Episode]) -> dict[str, float]:
    """Of each agent with enough audited turns: `audit_fidelity/AGENT` (left out where advantages or gains do not vary),
    `audit_variance/AGENT` of the advantages, `audit_noise/AGENT` and `audit_influence/AGENT`."""
    metrics: dict[str, float] = {}
    turns = [turn for episode in episodes for turn in episode.turns if turn.audit is not None and turn.advantages]
    for agent in sorted({turn.agent for turn in turns}):
        audited = [(mean(turn.advantages or [0.0]), turn.audit) for turn in turns if turn.agent == agent and turn.audit]
        if len(audited) < LEAST:
            continue
        fidelity = rank_correlation([(advantage, audit.gain) for advantage, audit in audited])
        if fidelity is not None:
            metrics[f"audit_fidelity/{agent}"] = fidelity
        metrics[f"audit_variance/{agent}"] = std([advantage for advantage, _ in audited], unbiased=True) ** 2
        metrics[f"audit_noise/{agent}"] = mean([audit.noise for _, audit in audited])
        influences = [audit.influence for _, audit in audited if audit.influence is not None]
        if influences:
            metrics[f"audit_influence/{agent}"] = mean(influences)
    return metrics
