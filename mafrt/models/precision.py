"""The number format of the base on a CPU: bfloat16 where this machine is faster with it, measured at the start.

Processors with AMX or AVX512-BF16 multiply bfloat16 matrices 2 to 7 times faster than float32 ones; others emulate it
and are up to 200 times slower. Neither the processor's name nor its flags tell reliably, so the products are timed.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

NO_FLOAT16 = (
    "in float16 the gradients of long batches are rounded to 0; load the base in bfloat16, whose range is float32's "
    "(--dtype bfloat16), or in float32."
)
"""why nothing is learnt on such a base"""
GAIN = 1.5
"""bfloat16 is chosen if its products are faster than float32's by this factor."""
ROUNDS = 6
ROUND_S = 0.006
SMALL_BYTES = 128 * 2**20
"""Weights on disk below which the choice is float32: there the products are not what takes the time."""


@dataclass(frozen=True)
class DtypeChoice:
    """The number format, and the reason for the log."""

    dtype: str
    reason: str


def choose_dtype(asked: str | None, recorded: str | None, folder: Path | None) -> DtypeChoice:
    """The number format of a base on a CPU.

    Args:
        asked: by the user; it wins, also where it is slow.
        recorded: by the run that goes on, so that it stays repeatable.
        folder: of the base; None for one on a model hub, which counts as large.
    """
    if asked is not None:
        return DtypeChoice(asked, "as asked" + _warning(asked))
    if recorded is not None:
        return DtypeChoice(recorded, "as before" + _warning(recorded))
    if folder is not None and sum(file.stat().st_size for file in folder.glob("*.safetensors")) < SMALL_BYTES:
        return DtypeChoice("float32", "a small base")
    gain = bfloat16_gain()
    return DtypeChoice(
        "bfloat16" if gain >= GAIN else "float32", f"bfloat16 products: {gain:.2g} times float32's speed"
    )


def _warning(dtype: str) -> str:
    """The end of the sentence where the format is slow on this machine."""
    if dtype == "float32" or (gain := bfloat16_gain(dtype)) >= 0.8:
        return ""
    return f"; slow here: its products run at {gain:.2g} times float32's speed"


def bfloat16_gain(dtype: str = "bfloat16") -> float:
    """Speed of matrix products in `dtype` relative to float32, on the present number of torch threads."""
    import torch

    from mafrt.models.compute import compute_for
    from mafrt.models.logprobs import PLAIN

    kinds = (torch.float32, getattr(torch, dtype))
    best = dict.fromkeys(kinds, float("inf"))
    with torch.inference_mode():
        operands = {kind: (torch.ones(32, 512, dtype=kind), torch.ones(1536, 512, dtype=kind)) for kind in kinds}
        # Alternating rounds, and the fastest single pass: on a busy machine means measure the other programs.
        for kind in kinds * ROUNDS:
            rows, weight = operands[kind]
            product = compute_for("cpu").frozen_head(weight, None, PLAIN, None).products
            product(rows)  # the first call prepares kernels
            ends = time.perf_counter() + ROUND_S
            while True:
                started = time.perf_counter()
                product(rows)
                ended = time.perf_counter()
                best[kind] = min(best[kind], ended - started)
                if ended >= ends:
                    break
    return best[kinds[0]] / best[kinds[1]]
