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

    start = _weights(base, team)
    best, chosen, most = start, (lr, 0), score()
    for factor in RATES:
        _restore(base, start)
        config = TrainConfig.of(lr=factor * lr, seed=seed, save_interval=0)
        runner = Offline(RecordPasses(records, epochs=PASSES, batch_size=BATCH), Sft(), team, base.main, config)

        def look(done: Progress, rate: float = factor * lr) -> None:
            nonlocal best, chosen, most
            if done.iteration * PASSES % done.iterations == 0 and (found := score()) > most:
                best, most = _weights(base, team), found
                chosen = rate, done.iteration * PASSES // done.iterations

        runner.run(look)
    _restore(base, best)
    return chosen


def _weights(base: Bases, team: Team) -> dict[str, list[Tensor]]:
    return {name: [each.detach().clone() for each in base.adapter_parameters(name)] for name in team.adapters}


def _restore(base: Bases, weights: dict[str, list[Tensor]]) -> None:
    for name, tensors in weights.items():
        for own, tensor in zip(base.adapter_parameters(name), tensors, strict=True):
            own.data.copy_(tensor)
        base.bump(name)
