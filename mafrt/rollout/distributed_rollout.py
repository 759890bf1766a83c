"""Play in several processes: each plays its own tasks, groups whole, and all have the whole batch afterwards.

Seeds are pure functions of the place of an episode, so it does not matter who plays it: one process and many play the
same episodes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from mafrt.core import records
from mafrt.core.distributed import Processes, packed_error, unpacked_error
from mafrt.core.errors import EnvError, MafrtError
from mafrt.core.signals import StopRequest
from mafrt.core.types import Episode
from mafrt.rollout.player import PlayStats
from mafrt.rollout.task_stream import TaskStream

_COUNTS = (
    "tokens",
    "prompt_tokens",
    "env_errors",
    "prompt_too_long",
    "tree_turns",
    "tree_unscored",
    "tree_errors",
)


def stopping(stop: StopRequest, processes: Processes) -> bool:
    """Whether any process was asked to stop; all of them are, then. A collective step: all look at the same time."""
    reasons = [reason for reason in processes.gather(stop.reason) if reason is not None]
    if reasons and not stop.requested:
        stop.request(reasons[0])
    return bool(reasons)


def gathered(
    processes: Processes, play: Callable[[], tuple[list[Episode], PlayStats]], starts: TaskStream
) -> tuple[list[Episode], PlayStats]:
    """The whole batch, of which `play` gives this process's part.

    `starts.drawn` and `starts.rounds` are those of all processes afterwards.

    Raises:
        MafrtError: the error that ended play in one of the processes, in all of them.
    """
    packed: dict[str, Any] = {}
    try:
        episodes, stats = play()
        packed["episodes"] = [records.pack_episode(episode) for episode in episodes]
        packed["stats"] = {name: getattr(stats, name) for name in _COUNTS}
        packed["last_error"] = None if stats.last_error is None else str(stats.last_error)
    except MafrtError as error:
        # The other processes wait in `gather`, so the error has to travel through it.
        packed["error"] = packed_error(error)
    parts = processes.gather({**packed, "drawn": starts.drawn, "rounds": starts.rounds})
    for part in parts:
        if "error" in part:
            raise unpacked_error(part["error"])
    # A process whose slots had enough earlier has drawn fewer tasks than another.
    starts.drawn = max(part["drawn"] for part in parts)
    starts.rounds = max(part["rounds"] for part in parts)
    together = PlayStats()
    for part in parts:
        last = None if part["last_error"] is None else EnvError(part["last_error"])
        together.add(PlayStats(**part["stats"], last_error=last))
    whole = [records.unpack_episode(record) for part in parts for record in part["episodes"]]
    return sorted(whole, key=lambda episode: episode.id), together


def judged_by_first(processes: Processes, judge: Callable[[Sequence[Episode]], None], episodes: list[Episode]) -> None:
    """Judge the batch in the first process, for all."""

    def verdicts() -> list[Any]:
        judge(episodes)
        return records.pack_verdicts(episodes)

    given = processes.lead(verdicts)
    if not processes.main:
        records.unpack_verdicts(episodes, given)
