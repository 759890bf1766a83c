"""Rejection-sampling imitation: play the training tasks, and imitate the episodes that solved theirs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from mafrt.config.team import Team
from mafrt.config.train_config import TrainConfig
from mafrt.core.types import Episode
from mafrt.runners.offline.dataset import RecordPasses
from mafrt.runners.offline.replay import RecordedTurn

if TYPE_CHECKING:
    from torch import Tensor

    from mafrt.models.several_bases import Bases
    from mafrt.runners.loop import Progress
    from mafrt.runners.offline.dataset import Record

SAMPLES = 8
"""episodes of a training task, as many as one group of a training run"""
BATCH = 64
RATES = (1 / 3, 1.0, 3.0)
"""tried, as factors of `--baseline_lr`"""
PASSES = 4
"""most passes over the records; after each one the adapters are scored"""


def solved_turns(episodes: Sequence[Episode], at_least: float) -> list[Record]:
    """The turns of episodes that score at least `at_least`, equal ones (agent, prompt, answer) once."""
    from mafrt.runners.offline.sft import examples_of

    turns = [
        RecordedTurn(turn, "", episode.score, episode.id)
        for episode in episodes
        for turn in episode.turns
        if turn.action_ids
    ]
    return examples_of(turns, at_least)


def imitate(
    records: Sequence[Record], team: Team, base: Bases, lr: float, seed: int, score: Callable[[], float]
) -> tuple[float, int]:
    """Imitate the records at several rates, with several passes, and leave the best weights.

    Args:
        records: what is imitated.
        team: its adapters, which are on `base`, learn; each rate begins with their weights.
        base: the base.
        lr: the middle one of the rates.
        seed: of the order of the records.
        score: of the team as it is, on tasks that are not held out; the highest one chooses.

    Returns:
        The rate and the number of passes that were chosen; 0 passes where the start itself is best.
    """
    from mafrt.runners.offline.runner import Offline
    from mafrt.runners.offline.sft import Sft

    def weights() -> dict[str, dict[str, Tensor]]:
        return {name: base.adapter_state(name) for name in team.adapters}

    def restore(states: dict[str, dict[str, Tensor]]) -> None:
        for name, state in states.items():
            base.load_adapter_state(name, state)

    start = weights()
    best, chosen, most = start, (lr, 0), score()
    for factor in RATES:
        restore(start)
        config = TrainConfig.of(lr=factor * lr, seed=seed, save_interval=0)
        runner = Offline(RecordPasses(records, epochs=PASSES, batch_size=BATCH), Sft(), team, base.main, config)

        def look(done: Progress, rate: float = factor * lr) -> None:
            nonlocal best, chosen, most
            if done.iteration * PASSES % done.iterations == 0 and (found := score()) > most:
                best, most = weights(), found
                chosen = rate, done.iteration * PASSES // done.iterations

        if runner.run(look).stopped_by is not None:
            raise KeyboardInterrupt
    restore(best)
    return chosen
