"""Does a sampler draw from a distribution? A chi-square test over all tokens of its samples, of any vocabulary.

For each sampled token the expected distribution is transformers' own, given the tokens before it. Its vocabulary is
laid end to end on [0, 1), likely tokens first, each as wide as its probability. The sampled token's place is a uniform
point of its stretch. If the token was drawn from that distribution, places are independent and uniform, however
different the distributions of the positions are, and equal bins are equally full. A wrong temperature fills the first
bins too much or too little, and a token that was cut off lies beyond all others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from bench._measure import Disagreement
from mafrt.core.types import Request, SamplingParams
from mafrt.engines.local.engine import LocalEngine

LEAST_P = 1e-3
"""p-value below which a sampler counts as wrong: a right one fails once in a thousand seeds."""
BINS = 32
SETTINGS = (
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.5, top_k=50, top_p=0.9),
)
"""of the samples, in turn"""


def check_distribution(
    name: str,
    engine: LocalEngine,
    requests: Sequence[Request],
    logits_of: Callable[[Request, list[int]], Tensor],
    draws: int,
) -> float:
    """The p-value of the engine's samples; raises Disagreement below `LEAST_P`.

    Args:
        name: of the samples, for the error.
        requests: prompts, adapters and numbers of tokens; sampling parameters are those of `SETTINGS`.
        logits_of: transformers' logits `[tokens, V]` where the given tokens were sampled.
        draws: tokens to look at, about.
    """
    tokens = requests[0].sampling.max_new_tokens
    wanted = max(len(SETTINGS), -(-draws // tokens))
    asked = [
        replace(
            requests[row % len(requests)],
            sampling=replace(SETTINGS[row % len(SETTINGS)], max_new_tokens=tokens),
            seed=10_000 + row,
        )
        for row in range(wanted)
    ]
    # A generator of its own: the sampler's uniforms would only show that they are uniform.
    generator = torch.Generator().manual_seed(7)
    spots = [
        places(logits_of(request, said.ids), torch.tensor(said.ids), request.sampling, generator)
        for request, said in zip(asked, engine.generate(asked), strict=True)
    ]
    p = p_value(torch.cat(spots), BINS)
    if not p >= LEAST_P:
        raise Disagreement(
            f"{name}: found p={p:.1e} in a chi-square test against transformers' distribution, expected at least "
            f"{LEAST_P:g}; not timed"
        )
    return p


def places(logits: Tensor, tokens: Tensor, sampling: SamplingParams, generator: torch.Generator) -> Tensor:
    """`[N]` float64 in [0, 1): the place of each token `[N]` in the distribution of its logits `[N, V]`."""
    from transformers.generation import logits_process as of

    scores = logits.detach().float().cpu()
    warpers: list[Any] = [of.TemperatureLogitsWarper(sampling.temperature)] if sampling.temperature != 1.0 else []
    if sampling.top_k:
        warpers.append(of.TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1.0:
        warpers.append(of.TopPLogitsWarper(sampling.top_p))
    for warper in warpers:
        scores = warper(tokens.unsqueeze(1), scores)
    p = scores.double().softmax(1)
    own = p.gather(1, tokens.unsqueeze(1))
    # Equal probabilities lie in the order of their tokens.
    before = (p > own) | ((p == own) & (torch.arange(p.shape[1]) < tokens.unsqueeze(1)))
    within = torch.rand(len(tokens), generator=generator, dtype=torch.float64)
    return ((p * before).sum(1) + within * own.squeeze(1)).clamp_(max=1 - 1e-12)


def p_value(spots: Tensor, bins: int) -> float:
    """Probability that uniform `spots` `[N]` in [0, 1) fill equal bins at least as unequally (Pearson 1900)."""
    counts = torch.bincount((spots * bins).long(), minlength=bins).double()
    expected = len(spots) / bins
    statistic = ((counts - expected) ** 2 / expected).sum()
    return float(torch.special.gammaincc(torch.tensor((bins - 1) / 2, dtype=torch.float64), statistic / 2))
