"""Who speaks next and what it sees. A workflow is a small class of pure functions on an immutable state.

`chain` is MARFT's: the agents speak in team order, each sees the problem and everything said before; after the last
one the answers are judged, and a round that failed is followed by another until the horizon.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

from mafrt.config import unknown
from mafrt.errors import ConfigError
from mafrt.team import Team
from mafrt.types import Observation

JUDGE = "judge"
INCORRECT = "The answer is incorrect."


@dataclass(frozen=True)
class MathState:
    """Everything an episode has come to; never changed, only replaced."""

    problem: str
    said: tuple[tuple[str, str], ...] = ()
    """(role, text) in speaking order; the judge's lines are among them."""
    round: int = 0
    """Rounds that are complete."""
    position: int = 0
    """Index of the agent who speaks next within the round."""
    over: bool = False


class Workflow(Protocol):
    """What a workflow has to offer. All methods are pure."""

    max_steps: int
    """Most steps that an episode can take."""

    def observations(self, state: MathState) -> dict[str, Observation]:
        """What those who act next see."""
        ...

    def advance(self, state: MathState, actions: dict[str, str]) -> MathState:
        """The state after `actions` were said."""
        ...

    def answers(self, state: MathState) -> dict[str, str] | None:
        """The texts to be verified now (agent -> text), or None if it is not time to."""
        ...

    def judged(self, state: MathState, score: float) -> MathState:
        """The state after the verdict on `answers`: over, or at the start of the next round."""
        ...


class Chain:
    """The agents speak one after the other, each seeing all that was said; `horizon` rounds at most."""

    def __init__(self, team: Team, horizon: int, judge_lines: bool) -> None:
        self.names = team.names
        self.answering = tuple(a.name for a in team.agents if a.with_answer)
        self.horizon, self.judge_lines = horizon, judge_lines
        self.max_steps = horizon * len(self.names)

    def observations(self, state: MathState) -> dict[str, Observation]:
        return {} if state.over else {self.names[state.position]: transcript(state)}

    def advance(self, state: MathState, actions: dict[str, str]) -> MathState:
        name = self.names[state.position]
        return replace(state, said=(*state.said, (name, actions[name])), position=state.position + 1)

    def answers(self, state: MathState) -> dict[str, str] | None:
        if state.position < len(self.names):
            return None
        latest = dict(state.said)
        return {name: latest[name] for name in self.answering}

    def judged(self, state: MathState, score: float) -> MathState:
        played = state.round + 1
        if score > 0 or played >= self.horizon:
            return replace(state, round=played, over=True)
        said = (*state.said, (JUDGE, INCORRECT)) if self.judge_lines else state.said
        return replace(state, said=said, round=played, position=0)


def transcript(state: MathState) -> str:
    """`Problem: ...`, then a line `role: text` for each utterance."""
    return f"Problem: {state.problem}" + "".join(f"\n{role}: {text}" for role, text in state.said)


WORKFLOWS: dict[str, Callable[[Team, int, bool], Workflow]] = {"chain": Chain}
"""By name; a workflow is added here."""


def make_workflow(name: str, team: Team, horizon: int, judge_lines: bool) -> Workflow:
    """The workflow called `name`, checked against the team."""
    if name not in WORKFLOWS:
        raise ConfigError(unknown("workflow", str(name), WORKFLOWS))
    if isinstance(horizon, bool) or not isinstance(horizon, int) or horizon < 1:
        raise ConfigError(f"horizon must be a whole number of rounds, at least 1, found {horizon!r}")
    if JUDGE in team.names:
        raise ConfigError(f"no agent may be called {JUDGE!r}: the environment speaks under that name")
    if not any(a.with_answer for a in team.agents):
        raise ConfigError(
            f"no agent of the team ({', '.join(team.names)}) has with_answer: true; "
            "set it for the one whose \\boxed{} answer counts"
        )
    return WORKFLOWS[name](team, horizon, judge_lines)
