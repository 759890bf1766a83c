"""State of a math episode, and the interface of workflows. Everything here is pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from mafrt.core.types import Observation

JUDGE = "judge"
TOOL = "tool"
SPEAKS_AS = (JUDGE, TOOL)
"""Names under which the environment itself speaks."""
INCORRECT = "The answer is incorrect."

Right = Callable[[str], bool]
"""Whether the answer that a text gives is the right one."""
Sees = Literal["all", "previous", "problem"]
SEES: tuple[Sees, ...] = ("all", "previous", "problem")


@dataclass(frozen=True)
class MathState:
    """Everything an episode has come to; never changed, only replaced."""

    problem: str
    said: tuple[tuple[str, str], ...] = ()
    """(role, text) in speaking order; the judge's and the tool's lines are among them."""
    round: int = 0
    """Rounds that are complete."""
    position: int = 0
    """Index of the agent who speaks next within the round."""
    over: bool = False
    turns: int = 0
    """Turns the next speaker has just had: it continues after its tool's answer."""
    pending: str | None = None
    """A program to run before the next turn."""


class Workflow(Protocol):
    """Interface of a workflow. All methods are pure.

    Two more are looked for. `evidence(before, after, ran, right)` gives the evidence about the turns between two
    states (agent -> `Evidence`), for `--coach rules`. A workflow whose `advance` leaves a `pending` program has
    `answered(state, output)`, the state after the program has run, and says `uses_tools = True`.
    """

    max_steps: int
    """Most steps that an episode can take."""

    def observations(self, state: MathState) -> dict[str, Observation]:
        """Observations of the next agents."""
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


def transcript(state: MathState) -> str:
    """`Problem: ...`, then a line `role: text` for each utterance."""
    return written(state.problem, state.said)


def written(problem: str, said: Sequence[tuple[str, str]]) -> str:
    """A transcript of `said` alone."""
    return f"Problem: {problem}" + "".join(f"\n{role}: {text}" for role, text in said)


def part_seen(said: Sequence[tuple[str, str]], sees: Sees) -> Sequence[tuple[str, str]]:
    """The part of `said` visible to the next agent: all, the previous agent's turns with tool answers, or none."""
    if sees == "all":
        return said
    start = len(said)
    previous = next((role for role, _ in reversed(said) if role not in SPEAKS_AS), None)
    if sees == "previous":
        while start and said[start - 1][0] in (previous, *SPEAKS_AS):
            start -= 1
        while start < len(said) and said[start][0] in SPEAKS_AS:
            start += 1
    return said[start:]
