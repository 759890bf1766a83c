"""Forward passes of the base without adapter: a critic's features and reference log-probabilities."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from mafrt.core.distributed import Processes
from mafrt.core.types import Turn
from mafrt.training.batch import Batch, collate, micro_batches
from mafrt.training.token_scores import token_scores

if TYPE_CHECKING:
    from mafrt.models.shared_base import SharedBase


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


def exchange(processes: Processes, own: Sequence[int], rows: Sequence[Turn], fields: Sequence[str]) -> None:
    """Send the fields of this process's rows to the others, and set those of their rows. Collective."""
    if processes.size == 1 or not fields:
        return
    computed = [[row, [getattr(rows[row], name) for name in fields]] for row in own]
    for row, values in (item for part in processes.gather(computed) for item in part):
        for name, value in zip(fields, values, strict=True):
            setattr(rows[row], name, value)
