"""How far an engine's log-probabilities are from the trainer's own, as metrics."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from mafrt.core.types import SamplingParams, Turn


def engine_gap(turns: Sequence[Turn], sampling: Mapping[str, SamplingParams]) -> dict[str, float]:
    """Compare `logprobs` (the engine's) with `old_logprobs` (the trainer's) of every agent's turns.

    With d = trainer - engine per token: `engine_gap/AGENT`, mean |d|; `engine_gap_max/AGENT`, the largest |d|; and
    `engine_kl/AGENT`, the mean of exp(d) - 1 - d, which estimates KL(engine || trainer) from the engine's samples
    without a sign that could hide it (Schulman, "Approximating KL divergence", 2020). Agents whose support is cut
    (top-p, top-k) are left out: there the two differ by design, since the engine's add up to 1 over the rest.
    """
    metrics: dict[str, float] = {}
    for name in dict.fromkeys(turn.agent for turn in turns):
        if name not in sampling or sampling[name].truncated:
            continue
        gaps = [
            trainer - engine
            for turn in turns
            if turn.agent == name and turn.old_logprobs is not None
            for trainer, engine in zip(turn.old_logprobs, turn.logprobs, strict=True)
        ]
        gaps = [gap for gap in gaps if math.isfinite(gap)]
        if gaps:
            metrics[f"engine_gap/{name}"] = sum(abs(gap) for gap in gaps) / len(gaps)
            metrics[f"engine_gap_max/{name}"] = max(abs(gap) for gap in gaps)
            metrics[f"engine_kl/{name}"] = sum(math.exp(min(gap, 20.0)) - 1.0 - gap for gap in gaps) / len(gaps)
    return metrics
