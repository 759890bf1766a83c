"""Direct preference optimisation: every agent's adapter learns from pairs of a better and a worse answer."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Literal

from mafrt.config.schema import Checked, NotNegative, Positive
from mafrt.scripts.cli.command import Command, Settings
from mafrt.scripts.cli.offline import OFFLINE, OfflineTask, study
from mafrt.scripts.cli.run_main import run_main

if TYPE_CHECKING:
    from mafrt.runners.offline.dataset import Record
    from mafrt.runners.offline.replay import RecordedTurn
    from mafrt.runners.offline.sft import RecordRule


@dataclass(frozen=True)
class DpoSettings(Checked):
    """Settings of the DPO loss."""

    beta: Positive = 0.1
    """weight of the log-ratios; larger values keep the adapters closer to the reference"""
    reference: Literal["base", "initial"] = "base"
    """reference policy: the base without adapter, or the adapters before the first step"""
    min_gap: NotNegative = 0.0
    """two recorded turns make a pair if their returns differ by more than this"""


COMMAND = Command(
    "train_dpo",
    "Tune each agent's adapter to preferences: pairs from files, or from recorded episodes that ended differently.",
    (DpoSettings, *OFFLINE),
    defaults={"lr": 5e-5},
    refused={"online": "pairs from the team's own play are those of mafrt train --algorithm spin."},
    epilog="The adapters end up in RUN_DIR/adapters, which --load_path of any training script takes.",
)


def prepare(settings: Settings) -> OfflineTask:
    """Records, rule and team of a DPO run."""
    dpo = settings.make(DpoSettings)

    def rule() -> RecordRule:
        from mafrt.runners.offline.dpo import Dpo

        return Dpo(dpo.beta, dpo.reference)

    def choose(turns: Sequence[RecordedTurn]) -> list[Record]:
        from mafrt.runners.offline.dpo import pairs_of

        return pairs_of(turns, dpo.min_gap)

    none = (
        f"no two recorded turns of one agent to one prompt differ in return by more than min_gap ({dpo.min_gap:g}); "
        f"record more samples of each task (--n_samples of training){', or lower --min_gap' if dpo.min_gap > 0 else ''}"
    )
    return OfflineTask(rule, ("chosen", "rejected"), choose, none)


main = partial(run_main, lambda words: study(COMMAND, words, prepare))

if __name__ == "__main__":
    sys.exit(main())
