"""Intervals of means: over tasks, and over seeds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

T_975 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228,
    2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086,
)  # fmt: skip
"""Student's t, 97.5%, for 1, 2, ... degrees of freedom; beyond, the last is a little wide"""


def seed_interval(values: Sequence[float]) -> tuple[float, float] | None:
    """95% interval of the mean over seeds, by Student's t; None for a single seed."""
    if len(values) < 2:
        return None
    freedom = len(values) - 1
    half = T_975[min(freedom, len(T_975)) - 1] * statistics.stdev(values) / math.sqrt(len(values))
    return statistics.fmean(values) - half, statistics.fmean(values) + half


def interval(means: Sequence[float]) -> tuple[float, float] | None:
    """95% interval of the mean over tasks; None for fewer than two tasks.

    Wilson's interval (JASA 22, 1927) where every task is solved or not, so that 20 of 20 is not certainty; 1.96
    standard errors to both sides otherwise.
    """
    n = len(means)
    if n < 2:
        return None
    center, z = sum(means) / n, 1.96
    if all(mean in (0.0, 1.0) for mean in means):
        middle = (center + z * z / (2 * n)) / (1 + z * z / n)
        half = z / (1 + z * z / n) * math.sqrt(center * (1 - center) / n + z * z / (4 * n * n))
        return max(0.0, middle - half), min(1.0, middle + half)
    deviation = math.sqrt(sum((mean - center) ** 2 for mean in means) / (n - 1))
    half = z * deviation / math.sqrt(n)
    return center - half, center + half
