"""Supervised fine-tuning: every agent's adapter imitates answers from files, or from a team's own best episodes."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Literal

from mafrt.scripts.cli.command import Command, Settings
from mafrt.scripts.cli.offline import OFFLINE, OfflineTask, study
from mafrt.scripts.cli.run_main import run_main

if TYPE_CHECKING:
    from mafrt.runners.offline.dataset import Record
    from mafrt.runners.offline.replay import RecordedTurn
    from mafrt.runners.offline.sft import RecordRule


@dataclass(frozen=True)
class SftSettings:
    """Selection of recorded turns."""

    min_return: float = 1.0
    """smallest return of a recorded turn that is imitated"""
    predict: Literal["turns", "observations", "both"] = "turns"
    """learnt from recorded episodes: the agents' turns, the observations that follow them (a world model), or both"""


COMMAND = Command(
    "train_sft",
    "Fine-tune each agent's adapter on answers to imitate: from files, or from recorded episodes of a high return.",
    (SftSettings, *OFFLINE),
    epilog="The adapters end up in RUN_DIR/adapters, which --load_path of any training script takes.",
)


def prepare(settings: Settings) -> OfflineTask:
    """Records, rule and team of an SFT run."""
    sft = settings.make(SftSettings)

    def rule() -> RecordRule:
        from mafrt.runners.offline.sft import Sft

        return Sft()

    def choose(turns: Sequence[RecordedTurn]) -> list[Record]:
        from mafrt.runners.offline.sft import examples_of

        return examples_of(turns, sft.min_return)

    none = f"no recorded turn has a return of at least min_return ({sft.min_return:g}); lower --min_return"
    return OfflineTask(rule, ("response",), choose, none, sft.predict != "observations", sft.predict != "turns")


main = partial(run_main, lambda words: study(COMMAND, words, prepare))

if __name__ == "__main__":
    sys.exit(main())
