"""Numbers that users' functions return: Python's, NumPy's and torch's alike."""

from __future__ import annotations

import math
import numbers
from decimal import Decimal
from typing import Any


def real_number(value: Any) -> float | None:
    """`value` as a finite float; None if it is not one real number that a float can hold.

    Taken are bool, int, float, Fraction, Decimal, scalars of NumPy and torch, and their arrays of one number. Texts,
    complex numbers, NaN, infinities and integers beyond the range of floats are not.
    """
    shape = getattr(value, "shape", ())
    if callable(getattr(value, "item", None)):
        try:
            value = value.item() if all(size == 1 for size in shape) else None
        except (TypeError, ValueError, RuntimeError):
            return None
    if not isinstance(value, (numbers.Real, Decimal)):
        return None
    try:
        number = float(value)
    except (OverflowError, ValueError):
        return None
    return number if math.isfinite(number) else None
