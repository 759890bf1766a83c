"""The league of self-play: copies of the learning adapter's earlier weights, which play and never learn."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mafrt.core.atomic_files import load_tensors
from mafrt.core.errors import CheckpointError, MafrtError

if TYPE_CHECKING:
    from mafrt.models.several_bases import Bases
    from mafrt.runners.schedules import SelfPlay

STATE = "league.pt"
"""the members' weights in a checkpoint"""


class League:
    """Puts the members on the base and renews them as the schedule says.

    Members begin as the base without training. A member is renewed before the iteration that it belongs to is played,
    so weights, seed and iteration determine the league, and a resumed run has the same one.
    """

    def __init__(self, base: Bases, schedule: SelfPlay) -> None:
        self.base, self.schedule = base, schedule
        self.adapter = schedule.assigned.adapters[schedule.assigned.agents[0]]
        for name in schedule.members:
            # Placed before the run's checkpoint is loaded, which fills them.
            if name not in base.adapters:
                base.copy_adapter(self.adapter, name)

    def renew(self, iteration: int) -> None:
        """Copy the present weights to the member that is due before `iteration`, if one is."""
        member = self.schedule.member_at(iteration)
        if member is not None:
            self.base.load_adapter_state(member, self.base.adapter_state(self.adapter))

    def state(self) -> dict[str, Any]:
        """The members' tensors, for a checkpoint."""
        return {name: self.base.adapter_state(name) for name in self.schedule.members}

    def load(self, path: Path) -> None:
        """The inverse of `state`. Raises CheckpointError for a file of another league, or none."""
        if not path.is_file():
            raise CheckpointError(f"{path} is missing, so this run had no league; leave --league out.")
        saved: Mapping[str, Any] = load_tensors(path)
        if saved.keys() != set(self.schedule.members):
            raise CheckpointError(
                f"{path} holds a league of {len(saved)}, and --league asks for {len(self.schedule.members)}; give the "
                "run's own size."
            )
        try:
            for name, state in saved.items():
                self.base.load_adapter_state(name, state)
        except (AttributeError, TypeError, KeyError) as error:
            raise CheckpointError(f"{path} does not hold adapters ({error}).") from error
        except MafrtError as error:
            raise CheckpointError(f"{path} does not fit: {error}") from error
