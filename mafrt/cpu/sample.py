"""Drawing one token a row from logits on a CPU (`source/sample.c`): no copy of them is made.

Probabilities are summed in blocks of 128 tokens in float32 and the blocks in float64, so a row's token depends neither
on the other rows nor on the number of threads.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import torch
from torch import Tensor

from mafrt.cpu.library import library


def serves(logits: Tensor) -> bool:
    """Whether this machine has the kernel for such logits."""
    return logits.device.type == "cpu" and logits.dtype in (torch.float32, torch.bfloat16) and _function() is not None


def sample(logits: Tensor, temperatures: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The first token of each row at which the running sum of its probabilities exceeds the row's uniform number.

    Arguments and result as of `mafrt.models.compute.Compute.sample`.

    Raises:
        ValueError: other sizes or types, a temperature below 0, or a number outside [0, 1).
    """
    rows, words = logits.shape
    # Raised and not asserted, since the kernel would read past the arrays, also under `python -O`.
    sized = len(temperatures) == len(uniforms) == rows and temperatures.dtype == uniforms.dtype == torch.float32
    if not sized or words < 1:
        raise ValueError(f"found {len(temperatures)} temperatures and {len(uniforms)} numbers, expected {rows} float32")
    if not bool((temperatures >= 0).all()) or not bool(((uniforms >= 0) & (uniforms < 1)).all()):
        raise ValueError("found a temperature below 0 or a number outside [0, 1), expected neither")
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    temperatures, uniforms = temperatures.contiguous(), uniforms.contiguous()
    ids = torch.empty(rows, dtype=torch.long)
    logprobs, totals = torch.empty(rows), torch.empty(rows)
    function = _function()
    assert function is not None
    function(
        logits.data_ptr(),
        logits.stride(0),
        rows,
        words,
        temperatures.data_ptr(),
        uniforms.data_ptr(),
        ids.data_ptr(),
        logprobs.data_ptr(),
        totals.data_ptr(),
        int(logits.dtype == torch.bfloat16),
        torch.get_num_threads(),
    )
    return ids, logprobs, totals


@cache
def _function() -> Any:
    lib = library()
    function = None if lib is None else getattr(lib, "sample", None)
    if function is not None:
        pointer, number = ctypes.c_void_p, ctypes.c_long
        function.argtypes = [pointer, *[number] * 3, *[pointer] * 5, ctypes.c_int, ctypes.c_int]
        function.restype = None
    return function
