"""Math environments under names of their own: a debate of PRO and CON, and agents with tools."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mafrt.config.team import Team
from mafrt.envs.math.env import MathEnv

CLAIMS = "arithmetic:train:claims=1"


class DebateEnv(MathEnv):
    """`pro_con` on claims of arithmetic: two debaters with sides, and rules that say which side wins."""

    def __init__(self, dataset_path: str | Path | None = CLAIMS, team: Team | None = None, **options: Any) -> None:
        """As `MathEnv`; without a team the debaters are `ann` and `bob`."""
        options = {"workflow": "pro_con", "verdict": "rules", **options}
        super().__init__(dataset_path, team if team is not None else Team.of(("ann", "bob")), **options)
        if dataset_path == CLAIMS:
            self.held_out = {"dataset_path": CLAIMS.replace("train", "test")}
            self.validation = {"dataset_path": CLAIMS.replace("train", "validation")}


class ToolEnv(MathEnv):
    """The workflow `tools`: agents that call a calculator, or the tools that `tools` names."""

    def __init__(self, dataset_path: str | Path | None = None, team: Team | None = None, **options: Any) -> None:
        """As `MathEnv`; without a team there is one agent, `solver`."""
        options = {"workflow": "tools", **options}
        super().__init__(dataset_path, team if team is not None else Team.of(("solver",)), **options)
