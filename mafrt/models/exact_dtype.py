"""The number format of sums and exponentials that half precision would spoil."""

from __future__ import annotations

import torch
from torch import Tensor


def exact_dtype(tensor: Tensor) -> torch.dtype:
    """The precision of scores and sums."""
    return torch.float32 if tensor.dtype in (torch.bfloat16, torch.float16) else tensor.dtype
