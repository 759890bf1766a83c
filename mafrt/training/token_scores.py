"""Log-probabilities and entropies of a batch's action tokens, from the hidden states of its rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mafrt.training.batch import Batch

if TYPE_CHECKING:
    from mafrt.models.shared_base import SharedBase


def token_scores(
    base: SharedBase, batch: Batch, states: Tensor, temperatures: Mapping[str, float], *, entropy_grad: bool = True
) -> tuple[Tensor, Tensor]:
    """Log-probability and entropy of every action token of a batch, `[N]` float32 each, from `states` `[B*T, d]`.

    `temperatures` by agent; `entropy_grad` as of `mafrt.models.logprobs.token_logprobs`.
    """
    of_turn = torch.tensor([temperatures[turn.agent] for turn in batch.turns], dtype=torch.float32)
    temperature = of_turn.to(states.device)[batch.turn]
    at, targets, again = batch.predict, batch.targets, None
    # Equal answers are one row, and each of its tokens goes through the head once.
    if len(batch.input_ids) < len(batch.turns):
        kinds, kind = of_turn.unique(return_inverse=True)
        each, found = (at * len(kinds) + kind.to(at.device)[batch.turn]).unique(return_inverse=True)
        if len(each) < len(at):
            # Any of those at one place: the row has one token behind it.
            first = at.new_empty(len(each)).scatter_(0, found, torch.arange(len(at), device=at.device))
            at, targets, temperature, again = at[first], targets[first], temperature[first], found
    scores = base.token_logprobs(states[at], targets, temperature=temperature, entropy_grad=entropy_grad)
    scores = scores if again is None else (scores[0][again], scores[1][again])
    return _without_forced(scores, batch) if any(turn.forced for turn in batch.turns) else scores


def _without_forced(scores: tuple[Tensor, Tensor], batch: Batch) -> tuple[Tensor, Tensor]:
    """0 for tokens that were put in: they are certain under every policy."""
    chosen = [place not in turn.forced for turn in batch.turns for place in range(len(turn.action_ids))]
    sampled = torch.tensor(chosen, device=scores[0].device)
    return torch.where(sampled, scores[0], 0.0), torch.where(sampled, scores[1], 0.0)
