"""Sampling on a GPU: sums of blocks of the vocabulary first, since one row is too little for a GPU's running sum.

A token is drawn as in `mafrt.models.compute`: the first at which the running sum of the probabilities exceeds the row's
uniform number. Here the running sum of blocks finds the block, and that of its tokens the token; both differ from the
sum over the whole row by rounding.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

BLOCK = 128
"""tokens"""
BELOW_ONE = 1 - 2**-23
"""times which every float32 number is smaller"""


def sample(logits: Tensor, temperatures: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """As `Compute.sample`."""
    if (missing := -logits.shape[1] % BLOCK) != 0:
        logits = F.pad(logits, (0, missing), value=-torch.inf)
    greedy = temperatures == 0
    top, likeliest = logits.max(1)
    scale = torch.where(greedy, 1.0, temperatures).unsqueeze(1)
    # Float32 from the first operation on, whatever the logits are.
    weights = torch.sub(logits, top.float().unsqueeze(1)).div_(scale).exp_().unflatten(1, (-1, BLOCK))
    running = weights.sum(2).cumsum(1)
    total = running[:, -1:]
    # Rounded, it stays below the total, beyond which there is no token.
    target = uniforms.clamp(max=BELOW_ONE).unsqueeze(1) * total
    block = torch.searchsorted(running, target, right=True).clamp_(max=running.shape[1] - 1)
    before = F.pad(running, (1, 0)).gather(1, block)
    inside = weights.gather(1, block.unsqueeze(2).expand(-1, -1, BLOCK)).squeeze(1)
    upto = inside.cumsum(1)
    rest = torch.minimum(target - before, upto[:, -1:] * BELOW_ONE)
    token = torch.searchsorted(upto, rest, right=True).clamp_(max=BLOCK - 1)
    logprobs = (inside.gather(1, token) / total).log_().squeeze(1)
    ids = (block * BLOCK + token).squeeze(1)
    return torch.where(greedy, likeliest, ids), logprobs.masked_fill_(greedy, 0.0), total.squeeze(1)
