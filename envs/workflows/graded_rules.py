"""Scores of turns that do not depend on the task source, for sources whose answers are only graded."""

from __future__ import annotations

from mafrt.core.types import Scored
from mafrt.environment.python_tool import Ran
from mafrt.envs.math import process_rewards


class GradedRules:
    """Part of `TurnRules`: verdicts by the answer they judge, programs by whether they end; plans have no score."""

    def plan(self, text: str) -> None:
        return None

    def verdict(self, said: str | None, proposed_right: bool) -> Scored:
        return process_rewards.verdict(said, proposed_right)

    def program(self, ran: Ran) -> Scored:
        ended = ran.status == "ok"
        return Scored(5.0 if ended else 1.0, "The program ran." if ended else f"The program failed ({ran.status}).")

    def bad_call(self, why: str) -> Scored:
        return process_rewards.bad_call(why)

    def report(self, text: str, printed: str | None) -> None:
        return None
