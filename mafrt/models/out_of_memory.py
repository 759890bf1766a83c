"""Memory that ran out: how it shows, and how what was computed with it is let go, so that less can be tried."""

from __future__ import annotations

import traceback

import torch


def out_of_memory(error: Exception) -> bool:
    """Whether memory ran out. Torch's allocator on CUDA has a class of its own; CUDA, its libraries and the CPU's
    allocator have only messages."""
    text = str(error)
    messages = ("out of memory", "_STATUS_ALLOC_FAILED", "can't allocate memory")
    return isinstance(error, torch.cuda.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and any(message in text for message in messages)
    )


def let_go(error: Exception) -> None:
    """Free what the calls that raised the error have computed, on a GPU for others too."""
    traceback.clear_frames(error.__traceback__)
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()  # what ran out may be memory that torch's own allocator keeps
