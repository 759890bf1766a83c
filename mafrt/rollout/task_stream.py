"""Which task is played next: a shuffled pass over all tasks, then another, as a pure function of a counter."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from mafrt.core.distributed import Processes
from mafrt.core.seeding import permutation, seed_of
from mafrt.core.types import Episode, Start


@lru_cache(maxsize=4)
def _order(num_tasks: int, seed: int, epoch: int) -> list[int]:
    return permutation(num_tasks, seed, "tasks", epoch)


def task_at(draw: int, num_tasks: int, seed: int) -> int:
    """The task of the `draw`-th draw: every task once per pass, in an order of its own for each pass."""
    return _order(num_tasks, seed, draw // num_tasks)[draw % num_tasks]


Order = Callable[[int], int]
"""Number of a draw -> its task."""


def shuffled_passes(num_tasks: int, seed: int) -> Order:
    """Every task once per pass."""
    return lambda draw: task_at(draw, num_tasks, seed)


@dataclass(kw_only=True)
class TaskStream:
    """Hands out the starts of one iteration's episodes.

    Slots are dealt in blocks of `n_samples`; the slots of a block play the same tasks. A slot takes another task
    until it has collected `turns` turns.
    """

    slots: int
    n_samples: int
    turns: int
    order: Order | None
    """task of each draw; None: the environment chooses its own"""
    seed: int
    iteration: int
    drawn: int
    """tasks drawn before this iteration; read it afterwards and keep it, it is the position in the data"""
    rounds: int = 0
    """rounds that other streams of this iteration have dealt before, so that no two episodes share an id; read it
    afterwards"""

    def __post_init__(self) -> None:
        self.blocks = self.slots // self.n_samples
        self._collected, self._round = [0] * self.slots, [0] * self.slots
        self._first, self._before = self.drawn, self.rounds
        self.drawn, self.rounds = self.drawn + self.blocks, self.rounds + 1

    def next_start(
        self, slot: int, finished: Episode | None, advance: Callable[[int], None] | None = None
    ) -> Start | None:
        """The next episode of `slot` after `finished`; None if it has enough, which is told to `advance`."""
        if finished is not None:
            self._collected[slot] += len(finished.turns)
            # A cut episode ends the slot as well: were all prompts too long, it would never collect anything.
            if self._collected[slot] >= self.turns or finished.info.get("ended") == "prompt_too_long":
                if advance is not None:
                    advance(1)
                return None
        turn_round = self._round[slot]
        self._round[slot] += 1
        self.rounds = max(self.rounds, self._before + turn_round + 1)
        block, sample = divmod(slot, self.n_samples)
        # Draws are numbered by round and block, not by who asks first, so that the order of play changes nothing.
        draw = self._first + turn_round * self.blocks + block
        self.drawn = max(self.drawn, self._first + (turn_round + 1) * self.blocks)
        return Start(
            id=f"{self.iteration:06d}-{self._before + turn_round:03d}-{slot:05d}",
            group=f"{self.iteration:06d}-{draw:09d}",
            # Samples of a group share the environment's seed and differ in the sampler's, as GRPO's groups require.
            reset_seed=seed_of(self.seed, "draw", draw),
            seed=seed_of(self.seed, "episode", draw, sample),
            task=None if self.order is None else self.order(draw),
        )


def own_slots(processes: Processes, slots: int, n_samples: int) -> list[int]:
    """The slots that this process plays: every `size`-th block of `n_samples`, so that no group is torn apart."""
    blocks = processes.share(range(slots // n_samples))
    return [block * n_samples + sample for block in blocks for sample in range(n_samples)]
