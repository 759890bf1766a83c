"""`chain`, MARFT's: the agents speak in team order, each sees the problem and the earlier turns."""

from __future__ import annotations

from dataclasses import replace

from mafrt.config.team import Team
from mafrt.core.types import Evidence, Observation
from mafrt.environment.python_tool import Ran
from mafrt.envs.math import process_rewards
from mafrt.envs.math.workflows.base import INCORRECT, JUDGE, MathState, Right, Sees, part_seen, written


class Chain:
    """The agents speak one after the other, each seeing all that was said; `horizon` rounds at most.

    After the last one the answers are judged, and a round that failed is followed by another. `sees="previous"` shows
    only the previous agent's turns, `"problem"` only the problem.
    """

    def __init__(self, team: Team, horizon: int, judge_lines: bool, sees: Sees = "all") -> None:
        self.names = team.names
        self.answering = tuple(a.name for a in team.agents if a.with_answer)
        self.horizon, self.judge_lines, self.sees = horizon, judge_lines, sees
        self.max_steps = horizon * len(self.names)

    def observations(self, state: MathState) -> dict[str, Observation]:
        seen = part_seen(state.said, self.sees)
        return {} if state.over else {self.names[state.position]: written(state.problem, seen)}

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

    def evidence(self, before: MathState, after: MathState, ran: Ran | None, right: Right) -> dict[str, Evidence]:
        """Evidence about the latest turn: an answer, or a plan."""
        name, text = after.said[len(before.said)]
        if name in self.answering:
            return {name: Evidence(rules=process_rewards.answer(text, right, before.problem))}
        return {name: Evidence(rules=process_rewards.plan(text, right))}
