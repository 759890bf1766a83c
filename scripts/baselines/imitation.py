"""Rejection-sampling imitation: play the training tasks, and imitate the episodes that solved theirs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from mafrt.config.team import Team
from mafrt.config.train_config import TrainConfig
from mafrt.core.types import Episode
from mafrt.runners.offline.dataset import RecordPasses
from mafrt.runners.offline.replay import RecordedTurn

if TYPE_CHECKING:
    from mafrt.models.several_bases import Bases
    from mafrt.runners.offline.dataset import Record

SAMPLES = 8
"""episodes of a training task, as many as one group of a training run"""
BATCH = 64


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


def imitate(records: Sequence[Record], team: Team, base: Bases, lr: float, seed: int) -> None:
    """One pass over the records; the adapters of `team`, which are on `base`, learn."""
    from mafrt.runners.offline.runner import Offline
    from mafrt.runners.offline.sft import Sft

    config = TrainConfig.of(lr=lr, seed=seed, save_interval=0)
    Offline(RecordPasses(records, batch_size=BATCH), Sft(), team, base.main, config).run()
