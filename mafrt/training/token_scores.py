"""Log-probabilities and entropies of a batch's action tokens, and what the base without adapter says of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mafrt.core.distributed import Processes
from mafrt.core.types import Turn
from mafrt.training.batch import Batch, collate, micro_batches

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


def base_pass(
    base: SharedBase, rows: Sequence[Turn], max_tokens: int, temperatures: Mapping[str, float] | None
) -> Iterator[tuple[list[int], Batch, Tensor]]:
    """Run the base over this process's share of `rows`.

    Args:
        base: called without adapter.
        rows: all rows, the same in every process.
        max_tokens: padded tokens of a micro-batch.
        temperatures: by agent, to fill `ref_logprobs`; None: not computed.

    Yields:
        Indices of a micro-batch's rows, its batch, and the hidden states `[B*T, d]`.
    """
    for part in micro_batches(rows, max_tokens, base):
        batch = collate([rows[row] for row in part.rows], lambda _: -1, base.pad_id, base.device)
        # A mask changes nothing that is read; a base that packs leaves the padding out.
        states = base.forward(batch.input_ids, batch.attention_mask if base.shares else None, batch.adapter_index)
        states = states.reshape(-1, states.shape[-1])
        if temperatures is not None:  # also for a dummy: the head may be sharded, which makes this call collective
            logprobs, _ = token_scores(base, batch, states, temperatures)
            for row, ref_logprobs in zip(part.rows, batch.scatter(logprobs), strict=True):
                rows[row].ref_logprobs = ref_logprobs
        if not part.dummy:
            yield part.rows, batch, states


def exchange(processes: Processes, done_here: Sequence[int], rows: Sequence[Turn], fields: Sequence[str]) -> None:
    """Send the fields of this process's rows to the others, and set those of their rows. Collective."""
    if processes.size == 1 or not fields:
        return
    computed = [[row, [getattr(rows[row], name) for name in fields]] for row in done_here]
    for row, values in (item for part in processes.gather(computed) for item in part):
        for name, value in zip(fields, values, strict=True):
            setattr(rows[row], name, value)
