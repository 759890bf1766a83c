"""Rule-based process rewards of the search agents, backed by the golden answers: scores in 0..10 with reasons.

    a decision   10 to answer when the passages hold a golden answer, or to search when not; 1 the reverse; 0 none
    a search     10 its passages hold a golden answer that was not known; 4 they are new to the team; 1 neither
    an answer    10 times its F1

An answer such as `yes` stands in no passage: decisions and searches are then scored by the team's result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mafrt.core.types import Scored
from mafrt.environment.python_tool import Ran
from mafrt.envs.math import process_rewards
from mafrt.envs.search.answers import WHOLE, exact_match, f1, given_answer, mentions, normalize
from mafrt.envs.workflows.state import GradedRules


@dataclass(frozen=True)
class SearchRules(GradedRules):
    """Scores for one question (`mafrt.envs.workflows.state.TurnRules`)."""

    golden: Sequence[str]

    @property
    def findable(self) -> bool:
        """Whether a passage can hold the answer as its words."""
        return not all(normalize(answer) in WHOLE for answer in self.golden)

    def decision(self, decided: bool | None, known: str) -> Scored | None:
        """Score of the Verifier's decision, given the passages that are known."""
        if decided is None:
            return Scored(0.0, "There is no decision.")
        if not self.findable:
            return None
        suffices = mentions(known, self.golden)
        what = "hold the answer" if suffices else "do not hold the answer"
        return Scored(10.0 if decided == suffices else 1.0, f"The known passages {what}: {'yes' if decided else 'no'}.")

    def search(self, output: str, known: str) -> Scored | None:
        """Score of a query by the passages found."""
        if not self.findable:
            return None
        if mentions(output, self.golden) and not mentions(known, self.golden):
            return Scored(10.0, "The search found the answer.")
        new = set(output.splitlines()) - set(known.splitlines())
        return Scored(4.0, "The search found other passages.") if new else Scored(1.0, "The search found nothing new.")

    def right(self, text: str) -> bool:
        given = given_answer(text)
        return given is not None and exact_match(given, self.golden) > 0

    def answer(self, text: str, plan: str | None = None) -> Scored:
        given = given_answer(text)
        if given is None:
            return Scored(0.0, "No answer is marked.")
        agreement = f1(given, self.golden)
        return Scored(10.0 * agreement, f"The answer has F1 {agreement:.2f}.")

    def program(self, ran: Ran) -> Scored:
        return process_rewards.program(ran, self.right)

    def prints_right(self, ran: Ran) -> bool:
        return process_rewards.prints_right(ran, self.right)

    def shows_right(self, output: str) -> bool:
        return process_rewards.gives(output, self.right) or bool(self.findable and mentions(output, self.golden))
