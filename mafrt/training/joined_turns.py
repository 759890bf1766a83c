"""Turns that one row of a pass computes together: an agent's turns of which each continues the one before.

A chat that only grows gives its agent one prompt after another, each with the agent's last answer in it. A causal
model's states at a turn's tokens do not depend on what follows, so the last row has the states of them all: T turns
cost their last row and not the sum of all rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mafrt.core.types import Turn


def join(turns: Sequence[Turn], owners: Sequence[Any]) -> list[list[int]]:
    """Which turns share a row: indices into `turns`, the shortest first; the last one has the row's tokens.

    `owners`: of each turn what those of one row have in common, such as the adapter; comparable with `<`.
    """
    tokens = [(*turn.prompt_ids, *turn.action_ids) for turn in turns]
    joined: list[list[int]] = []
    after: int | None = None
    # In lexical order a sequence is followed by those that begin with it.
    for n in sorted(range(len(turns)), key=lambda n: (owners[n], tokens[n], n), reverse=True):
        begins = after is not None and owners[after] == owners[n] and tokens[after][: len(tokens[n])] == tokens[n]
        if begins:
            joined[-1].append(n)
        else:
            joined.append([n])
        after = n
    return sorted((row[::-1] for row in joined), key=lambda row: row[-1])
