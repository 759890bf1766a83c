"""Exact sums and the few statistics that credit rules need.

Every sum is `math.fsum`, which is rounded once: the result depends on the numbers and not on their order, so that
permuting the episodes of a batch cannot change an advantage by even one bit.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

ROUNDING = 1e-12
"""Differences below this share of the numbers are rounding: thousands of times that of one float64 operation."""


def total(numbers: Iterable[float]) -> float:
    """Exactly rounded sum; NaN where the sum has no value in float64 (overflow, or inf - inf)."""
    try:
        return math.fsum(numbers)
    except (OverflowError, ValueError):
        return math.nan


def mean(numbers: Sequence[float]) -> float:
    """Arithmetic mean of at least one number."""
    return total(numbers) / len(numbers)


def no_spread(numbers: Sequence[float], size: float = 0.0) -> bool:
    """Whether all numbers are equal up to rounding, which is in proportion to the largest one.

    `size`: the largest that they were computed from, if it is larger. A division would scale a rounding up to 1.
    """
    least, most = min(numbers), max(numbers)
    return least == most or most - least <= ROUNDING * max(abs(least), abs(most), size)


def std(numbers: Sequence[float], *, unbiased: bool) -> float:
    """Standard deviation, divided by n - 1 (`unbiased`, at least two numbers) or by n."""
    centre = mean(numbers)
    squares = total((x - centre) * (x - centre) for x in numbers)
    return math.sqrt(squares / (len(numbers) - 1 if unbiased else len(numbers)))


def standardise(numbers: Sequence[float], *, eps: float, floor: float = 0.0) -> list[float]:
    """(x - mean) / (max(std, floor) + eps) with the population's deviation (divided by n); zeros without spread.

    The form of OpenRLHF's and verl's masked whitening, where the batch *is* the population.
    """
    if not numbers or no_spread(numbers):
        return [0.0] * len(numbers)
    centre, scale = mean(numbers), max(std(numbers, unbiased=False), floor) + eps
    return [(x - centre) / scale if scale else 0.0 for x in numbers]


def explained_variance(predicted: Sequence[float], actual: Sequence[float]) -> float | None:
    """1 - Var(actual - predicted) / Var(actual): 1 is perfect, 0 no better than a constant, negative is worse.

    None if it is undefined: fewer than two numbers, or `actual` without spread.
    """
    if len(actual) < 2 or no_spread(actual):
        return None
    spread = std(actual, unbiased=False)
    residual = std([a - p for a, p in zip(actual, predicted, strict=True)], unbiased=False)
    if not spread > 0.0 or not math.isfinite(residual):
        return None
    ratio = residual / spread
    value = 1.0 - ratio * ratio
    return value if math.isfinite(value) else None


def correlation(pairs: Sequence[tuple[float, float]]) -> float | None:
    """Pearson's r; None where one side does not vary."""
    if len(pairs) < 2:
        return None
    mean_x, mean_y = (math.fsum(side) / len(pairs) for side in zip(*pairs, strict=True))
    xx = math.fsum((x - mean_x) ** 2 for x, _ in pairs)
    yy = math.fsum((y - mean_y) ** 2 for _, y in pairs)
    xy = math.fsum((x - mean_x) * (y - mean_y) for x, y in pairs)
    return xy / math.sqrt(xx * yy) if xx > 1e-12 and yy > 1e-12 else None


def ranks(numbers: Sequence[float]) -> list[float]:
    """Rank of every number, from 1 on; equal numbers share their mean rank."""
    order = sorted(numbers)
    first = {number: place for place, number in reversed(list(enumerate(order, 1)))}
    count = {number: order.count(number) for number in first}
    return [first[number] + (count[number] - 1) / 2 for number in numbers]


def rank_correlation(pairs: Sequence[tuple[float, float]]) -> float | None:
    """Spearman's correlation; None where one side does not vary."""
    if len(pairs) < 2:
        return None
    left, right = (ranks(side) for side in zip(*pairs, strict=True))
    return correlation(list(zip(left, right, strict=True)))
