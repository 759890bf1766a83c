"""Dynamic sampling: tasks whose samples are all worth the same teach a group rule nothing, so others are played.

Source: DAPO (2503.14476), section 3.2. Each round replaces every such group (at most as many as are played side by
side) by one fresh task with all its samples; groups still without spread after the last round stay in the batch with
advantage 0 and are counted (`groups_no_spread`). Deviation: DAPO goes on until the batch is full.

The fresh tasks come next in the run's own stream and are counted in its position, so an iteration stays a pure
function of weights, seed and position, and a resumed run repeats it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mafrt.core.types import Episode
from mafrt.rollout.player import PlayStats
from mafrt.rollout.task_stream import TaskStream


@dataclass(frozen=True)
class SampledBatch:
    """The batch after all rounds."""

    episodes: list[Episode]
    """sorted by id"""
    drawn: int
    """position in the data"""
    rounds: int
    """rounds that were played"""
    replaced: int
    """groups that were replaced"""


def resample(
    episodes: Sequence[Episode],
    stats: PlayStats,
    *,
    rounds: int,
    flat: Callable[[Sequence[Episode]], Sequence[str]],
    stream: Callable[[int, int, int], TaskStream],
    play: Callable[[TaskStream], tuple[list[Episode], PlayStats]],
    blocks: int,
    drawn: int,
    dealt: int,
) -> SampledBatch:
    """Replace groups without spread, for at most `rounds` rounds.

    Args:
        episodes: those of the first stream.
        stats: their counts; those of the rounds are added.
        flat: the groups of some episodes that teach nothing.
        stream: a stream of (tasks, position in the data, rounds dealt) that deals each task once.
        play: plays a stream; no episodes end the search.
        blocks: tasks that can be played side by side.
        drawn: the position in the data.
        dealt: rounds that the iteration's first stream has dealt.
    """
    sampled, done, replaced = list(episodes), 0, 0
    while done < rounds:
        empty = flat(sampled)[:blocks]
        if not empty:
            break
        fresh = stream(len(empty), drawn, dealt)
        fresh_episodes, more = play(fresh)
        stats.add(more)
        drawn, dealt = fresh.drawn, fresh.rounds
        # An interrupted round has no episodes; the groups already played stay as they are.
        if not fresh_episodes:
            break
        sampled = [episode for episode in sampled if episode.group not in empty] + fresh_episodes
        done, replaced = done + 1, replaced + len(empty)
    return SampledBatch(sorted(sampled, key=lambda episode: episode.id), drawn, done, replaced)
