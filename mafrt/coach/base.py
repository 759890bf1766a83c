"""Base class of coaches, and the case that a coach judges."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mafrt.core.types import Evidence, Scored, Unscored, Verdict

if TYPE_CHECKING:
    from mafrt.engines import Engine
    from mafrt.models.shared_base import SharedBase


@dataclass(frozen=True)
class Case:
    """One turn to be judged, as text.

    >>> mafrt.Case(agent="solver", said="so 7", role="You solve it.", saw="3 + 4?").said
    'so 7'
    """

    agent: str
    said: str
    role: str = ""
    """the agent's role prompt"""
    saw: str = ""
    """the agent's prompt, its role prompt included"""
    evidence: Evidence | None = None
    """findings of the environment: tool output, facts, the rules' own judgement"""
    truth: str | None = None
    """the reference answer; None if there is none, or if the judge must not know it"""
    spans: bool = False
    """whether quotations with scores of their own are wanted (`--level token`)"""


class Coach:
    """Base class of coaches. A subclass defines `judge`.

    A verdict is `Scored`, with a score in 0..10, or `Unscored`, with the reason why there is none. There is no number
    for a judgement that failed. A fault that no later case would escape raises a `CoachError`, and the run pauses.

    >>> class Brief(mafrt.Coach):
    ...     name = "brief"
    ...     def judge(self, cases):
    ...         return [mafrt.Scored(10 if len(case.said) < 80 else 3, "length") for case in cases]
    >>> Brief().judge([mafrt.Case("solver", "so 7")])
    [Scored(score=10, reason='length', spans=())]
    """

    name: str = ""
    """its name in the run's log and coach.json"""
    reads: bool = True
    """whether it reads `Case.saw`; a coach that does not is spared the decoding of every prompt"""
    bounded: bool = False
    """whether `judge` keeps deadlines of its own and raises nothing but CoachError"""
    interrupted: Callable[[], bool] = staticmethod(lambda: False)
    """whether to give up at once, by CoachInterruptedError; `begin` sets it"""

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name}>"

    def load(self, base: SharedBase) -> None:
        """Called once, before an engine is made: load onto the base an adapter that judging needs."""

    def begin(self, base: SharedBase, engine: Engine, interrupted: Callable[[], bool]) -> None:
        """Called once before the first case; calls `bind`."""
        self.interrupted = interrupted
        self.bind(base, engine)

    def bind(self, base: SharedBase, engine: Engine) -> None:
        """Take the model that is trained, and the engine that samples on it, if judging needs them."""

    def judge(self, cases: Sequence[Case]) -> list[Verdict]:
        """One verdict per case, in the order of the cases. May be called often, with any number of cases."""
        raise NotImplementedError(f"{type(self).__name__} lacks judge(self, cases); define it")

    def counts(self) -> Mapping[str, float]:
        """Cost of judging so far: any of calls, cached, retries, tokens_in, tokens_out, cost."""
        return {}

    def restore(self, counts: Mapping[str, float]) -> None:
        """Go on from the counts of an earlier part of the run."""

    def close(self) -> None:
        """Release resources. May be called more than once."""


class RulesCoach(Coach):
    """Reads the judgement that the environment's own verifier made. No network, no model."""

    bounded = True

    name = "rules"
    reads = False

    def judge(self, cases: Sequence[Case]) -> list[Verdict]:
        return [self._one(case) for case in cases]

    @staticmethod
    def _one(case: Case) -> Scored | Unscored:
        rules = case.evidence.rules if case.evidence is not None else None
        return rules or Unscored("the environment gave no rules judgement about this turn")
