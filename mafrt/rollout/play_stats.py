"""Counts of a stretch of play, lost episodes above all, and the share of them at which play ends."""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass, field

from mafrt.core.errors import EnvError

log = logging.getLogger(__name__)

MAX_LOST = 0.25
"""Default of `env_max_lost`."""
_ALWAYS = 2
"""Lost episodes that end no play, however few were finished."""
_SHOWN = 3
"""Different reasons for lost episodes that are logged as soon as they come; the rest is logged with its counts."""


@dataclass
class PlayStats:
    """Counts of a stretch of play."""

    tokens: int = 0
    """tokens sampled"""
    prompt_tokens: int = 0
    env_errors: int = 0
    """episodes lost because their environment raised, hung or crashed"""
    prompt_too_long: int = 0
    """episodes cut because a prompt left no room in the context window"""
    last_error: EnvError | None = None
    sampling_rounds: int = 0
    """rounds of dynamic sampling"""
    groups_replaced: int = 0
    """groups that dynamic sampling has replaced"""
    tree_turns: int = 0
    """turns whose alternatives were tried (`mafrt.rollout.tree_player`)"""
    tree_unscored: int = 0
    """of these, turns of whose alternatives nothing was found out"""
    tree_errors: int = 0
    """alternatives lost because the environment raised"""
    replayed: dict[str, float] = field(default_factory=dict)
    """metrics of episodes that were played again (`mafrt.rollout.replay`)"""
    reasons: Counter[str] = field(default_factory=Counter)
    """error sentence -> episodes that it cost"""

    def add(self, other: PlayStats) -> None:
        """Add the counts of another stretch of play."""
        self.tokens += other.tokens
        self.prompt_tokens += other.prompt_tokens
        self.env_errors += other.env_errors
        self.prompt_too_long += other.prompt_too_long
        self.tree_turns += other.tree_turns
        self.tree_unscored += other.tree_unscored
        self.tree_errors += other.tree_errors
        self.last_error = other.last_error or self.last_error
        self.reasons += other.reasons

    def lost(self, error: EnvError) -> None:
        """Count an episode that its environment lost. An equal reason is logged once; `report` tells how often."""
        self.env_errors += 1
        self.last_error = error
        self.reasons[str(error)] += 1
        if self.reasons[str(error)] == 1 and len(self.reasons) <= _SHOWN:
            log.warning("An episode is lost: %s", error)

    def lost_share(self, finished: int) -> float:
        """Share of the episodes that were lost, where `finished` were not."""
        return self.env_errors / max(self.env_errors + finished, 1)

    def give_up(self, slots: int, finished: int, max_lost: float) -> None:
        """End play in which too many episodes are lost: an environment that mostly raises will not get better.

        The share is taken of the episodes so far, and of one per slot at least; two lost episodes are always allowed.

        Raises:
            EnvError: the share of lost episodes is above `max_lost`.
        """
        if self.env_errors > max(_ALWAYS, max_lost * max(slots, self.env_errors + finished)):
            raise EnvError(
                f"{self.env_errors} episodes were lost, {finished} finished, which is more than env_max_lost "
                f"({max_lost:g}) allows; the last because: {self.last_error}"
            )

    def report(self) -> None:
        """Log how many episodes were lost, by reason, if any reason came more than once or was not logged yet."""
        if self.env_errors > min(len(self.reasons), _SHOWN):
            told = "; ".join(f"{count} times because {reason}" for reason, count in self.reasons.most_common(_SHOWN))
            others = len(self.reasons) - _SHOWN
            rest = f"; and for {others} other reasons" if others > 0 else ""
            log.warning("%d episodes were lost: %s%s", self.env_errors, told, rest)
