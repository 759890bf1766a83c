"""The bars that figures are held to, for the benchmarks' verdicts and the chart's marks."""

from __future__ import annotations

BARE_SHARE = {"float32": {4: 0.85, 16: 0.8}, "bfloat16": {4: 0.85, 16: 0.75}}
"""of the bare base that decoding with K adapters keeps at least, by number format and K"""
ADAPTER_NAMES = {4: 2.0, 16: 3.0}
"""times PEFT's `adapter_names` at least, by K"""
NO_GRAD = 2.1
"""an update takes at most so many times a forward that records nothing"""


def over_trl(model: str, dtype: str) -> float:
    """TRL's time per agent over ours, at least."""
    if model.startswith("random:"):  # its recurrences are no products
        return 3.0
    return 4.0 if model == "teaching-base" else 2.5 if dtype == "float32" else 5.0
