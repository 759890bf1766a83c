"""Agents one after the other: `chain` (MARFT's), and `single` and `multi_turn` for one agent."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mafrt.config.team import Team
from mafrt.core.errors import ConfigError
from mafrt.core.types import Evidence, Message, Observation
from mafrt.envs.workflows.state import INCORRECT, JUDGE, VIEWS, Lines, TaskState, TurnRules, Workflow, views_of, written


class Chain(Workflow):
    """The agents speak in team order, each seeing what its view shows; `horizon` rounds at most.

    After the last one the answers are graded, and a round that failed is followed by another.
    """

    plans = True

    def __init__(self, team: Team, horizon: int, judge_lines: bool, sees: str | None = None) -> None:
        super().__init__(team, horizon, judge_lines)
        self.views = views_of(team, sees)
        # A view of the user's own may hang, and then the environment needs a deadline.
        self.bounded = all(view in VIEWS.values() for view in self.views.values())

    def seen(self, transcript: Lines, agent: str) -> Lines:
        """The part of a transcript that an agent sees."""
        return self.views[agent](transcript, agent, self.names)

    def observe(self, state: TaskState) -> dict[str, Observation]:
        if state.over:
            return {}
        name = self.names[state.position]
        return {name: written(state.problem, self.seen(state.said, name), self.names)}

    def transition(self, state: TaskState, actions: Mapping[str, str]) -> TaskState:
        name = self.names[state.position]
        return replace(state, said=(*state.said, (name, actions[name])), position=state.position + 1)

    def judged(self, state: TaskState, score: float) -> TaskState:
        played = state.round + 1
        if score > 0 or played >= self.horizon:
            return replace(state, round=played, over=True)
        # Said only if asked for: the line tells the team that its answer was wrong, which a user's data may not allow.
        transcript = (*state.said, (JUDGE, INCORRECT)) if self.judge_lines else state.said
        return replace(state, said=transcript, round=played, position=0)

    def evidence(self, before: TaskState, after: TaskState, ran: Any, rules: TurnRules) -> dict[str, Evidence]:
        """Evidence about the latest turn: an answer, or a plan."""
        name, text = after.said[len(before.said)]
        return self.answer_or_plan(name, text, self.seen(before.said, name), rules)


class Single(Chain):
    """One agent, one turn. In a larger team only the first agent with `with_answer` plays."""

    def __init__(self, team: Team, horizon: int = 1, judge_lines: bool = True) -> None:
        if horizon != 1:
            raise ConfigError(f"workflow 'single' has one turn, found horizon {horizon}; take 'multi_turn'")
        super().__init__(team, 1, judge_lines)
        # The first that answers, so that a team of several plays the baseline of one without another profile.
        first = tuple(agent.name for agent in team.agents if agent.with_answer)[:1]
        self.names, self.answering = first, first
        self.max_steps = 1


class MultiTurn(Single):
    """One agent that is told of a wrong answer and tries again, `horizon` times at most, in one conversation."""

    def __init__(self, team: Team, horizon: int, judge_lines: bool) -> None:
        super().__init__(team, 1, judge_lines)
        self.horizon = self.max_steps = horizon

    def observe(self, state: TaskState) -> dict[str, Observation]:
        if state.over or not state.round:
            return super().observe(state)
        chat: list[Message] = [{"role": "user", "content": written(state.problem, (), self.names)}]
        for role, text in state.said:
            chat.append({"role": "user" if role == JUDGE else "assistant", "content": text})
        # Chat templates want a user's message last.
        if chat[-1]["role"] == "assistant":
            chat.append({"role": "user", "content": "Try again."})
        return {self.names[0]: chat}
