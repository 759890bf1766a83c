"""Scores of turns that do not depend on the task source."""

from __future__ import annotations

from mafrt.core.types import Scored
from mafrt.environment.python_tool import Ran


class GradedRules:
    """Part of `TurnRules`: verdicts by the answer they judge, programs by whether they end; plans have no score."""

    def plan(self, text: str) -> Scored | None:
        return None

    def verdict(self, said: str | None, proposed_right: bool) -> Scored:
        """A verdict (`approve`, `reject` or None) on an answer that is right or not."""
        if said is None:
            return Scored(0.0, "There is no verdict.")
        good = (said == "approve") == proposed_right
        return Scored(10.0 if good else 1.0, f"The answer is {'right' if proposed_right else 'wrong'}: {said}.")

    def program(self, ran: Ran) -> Scored:
        ended = ran.status == "ok"
        return Scored(5.0 if ended else 1.0, "The program ran." if ended else f"The program failed ({ran.status}).")

    def bad_call(self, why: str) -> Scored:
        """A tool call that could not be made."""
        return Scored(1.0, why)

    def report(self, text: str, printed: str | None) -> Scored | None:
        return None

    def followed(self, right: bool, what: str) -> Scored:
        """Score of a turn that can only be judged by its consequences."""
        return Scored(7.0 if right else 2.0, f"What followed from it, {what}, was {'right' if right else 'wrong'}.")
