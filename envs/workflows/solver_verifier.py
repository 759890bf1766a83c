"""`solver_verifier`: agents propose an answer until the last agent, the verifier, approves it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from mafrt.config.team import Team
from mafrt.core.errors import ConfigError
from mafrt.core.types import Evidence
from mafrt.environment.python_tool import Ran
from mafrt.envs.workflows.chain import Chain
from mafrt.envs.workflows.state import TaskState, TurnRules

# `Verdict: approve`, and Dr. MAS's `<verify>approve</verify>`.
_VERDICT = re.compile(r"(?:\bverdict\W{0,5}|<verify>\s*)(approve|reject)", re.IGNORECASE)


def verdict_of(text: str) -> str | None:
    """`approve` or `reject`, by the last verdict that the text gives; None if it gives none."""
    verdicts = _VERDICT.findall(text)
    return verdicts[-1].lower() if verdicts else None


class SolverVerifier(Chain):
    """The Solver (or several agents) answers, the Verifier judges, and a rejected answer is followed by another.

    `horizon` rounds at most. Only the answer that stands at the end is verified, and no agent is told whether an answer
    that was rejected was right. A text without a verdict approves nothing.
    """

    plans = False
    profile = "profiles/solver_verifier.json"

    def __init__(self, team: Team, horizon: int, judge_lines: bool, sees: str | None = None) -> None:
        super().__init__(team, horizon, judge_lines, sees)
        if len(self.names) < 2 or self.names[-1] in self.answering:
            raise ConfigError(
                "workflow 'solver_verifier' needs an agent that answers (with_answer) and, last in the team, one that "
                f"judges without answering itself, found {', '.join(self.names)}; take profiles/solver_verifier.json"
            )

    def transition(self, state: TaskState, actions: Mapping[str, str]) -> TaskState:
        after = super().transition(state, actions)
        if after.position < len(self.names):
            return after
        approved = verdict_of(actions[self.names[-1]]) == "approve"
        if approved or state.round + 1 >= self.horizon:
            return after
        return replace(after, round=state.round + 1, position=0)

    def judged(self, state: TaskState, score: float) -> TaskState:
        return replace(state, round=state.round + 1, over=True)

    def evidence(self, before: TaskState, after: TaskState, ran: Ran | None, rules: TurnRules) -> dict[str, Evidence]:
        name, text = after.said[len(before.said)]
        if name != self.names[-1]:
            return super().evidence(before, after, ran, rules)
        latest = dict(before.said)
        proposed = any(rules.right(latest[n]) for n in self.answering)
        return {name: Evidence(rules=rules.verdict(verdict_of(text), proposed))}
