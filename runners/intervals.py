"""Intervals of means over tasks."""

from __future__ import annotations

import math
from collections.abc import Sequence


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
