"""Play in several processes: each plays its own tasks, groups whole, and all have the whole batch afterwards.

Seeds are pure functions of the place of an episode, so it does not matter who plays it: one process and many play the
same episodes. With one process this is `Player.play` and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from mafrt.core import records
from mafrt.core.distributed import Processes, packed_error, unpacked_error
from mafrt.core.errors import EnvError, MafrtError
from mafrt.core.progress import stage
from mafrt.core.signals import StopRequest
from mafrt.core.types import Episode
from mafrt.environment.base import Env
from mafrt.rollout.player import Player, PlayStats, Start
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


def own_slots(processes: Processes, slots: int, n_samples: int) -> list[int]:
    """The slots that this process plays: every `size`-th block of `n_samples`, so that no group is torn apart."""
    blocks = processes.share(range(slots // n_samples))
    return [block * n_samples + sample for block in blocks for sample in range(n_samples)]


def stopping(stop: StopRequest, processes: Processes) -> bool:
    """Whether any process was asked to stop; all of them are, then. A collective step: all look at the same time."""
    reasons = [reason for reason in processes.gather(stop.reason) if reason is not None]
    if reasons and not stop.requested:
        stop.request(reasons[0])
    return bool(reasons)


def play_together(
    processes: Processes, player: Player, envs: Sequence[Env], starts: TaskStream, interrupted: Callable[[], bool]
) -> tuple[list[Episode], PlayStats]:
    """Play a stream of tasks; `starts.drawn` and `starts.rounds` are those of all processes afterwards.

    Raises:
        MafrtError: the error that ended play in one of the processes, in all of them.
    """
    slots = own_slots(processes, starts.slots, starts.n_samples)

    def play() -> tuple[list[Episode], PlayStats]:
        with stage("playing", len(slots)) as advance:

            def next_start(slot: int, finished: Episode | None) -> Start | None:
                start = starts.next_start(slots[slot], finished)
                if start is None:
                    advance(1)
                return start

            return player.play(envs[: len(slots)], next_start, interrupted)

    if processes.size == 1:
        return play()
    own: dict[str, Any] = {}
    try:
        episodes, stats = play()
        own["episodes"] = [records.pack_episode(episode) for episode in episodes]
        own["stats"] = {name: getattr(stats, name) for name in _COUNTS}
        own["last_error"] = None if stats.last_error is None else str(stats.last_error)
    except MafrtError as error:
        # The other processes wait in `gather`, so the error has to travel through it.
        own["error"] = packed_error(error)
    parts = processes.gather({**own, "drawn": starts.drawn, "rounds": starts.rounds})
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
