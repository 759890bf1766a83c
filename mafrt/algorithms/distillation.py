"""On-policy distillation: the student speaks, and every token is paid by how much likelier the teacher finds it.

    r_t = log p_teacher(token | its prompt) - log p_student(token | the student's prompt)
    A_t = sum_{s >= t} gamma^(s - t) r_s        within the turn

The expected gradient at gamma 0 is that of KL(student, teacher) of each next token, at the places that the student
itself reaches; at gamma 1 that of the KL of whole turns. Nothing of the environment's rewards is read, so neither an
outcome nor groups are needed: a reward for every token in place of one for an episode.

The teacher sits on the students' base, and its log-probabilities come from the learner's mixed batches
(`mafrt.rollout.teacher`):

| rule | teacher |
|---|---|
| `opd` | the adapters of `teacher_path`, one for each of the team's, or the base without adapter |
| `self_distill` | the student itself, as it is in this iteration |

Both may see more than the student: `teacher_prompt` is put behind the observation, with facts of the episode such as
`{answer}` in it. Without such a prompt a student has nothing to learn from itself.

Source: GKD (2306.13649) and MiniLLM (2306.08543); the form with the sampled token as the reward and gamma 0 is that of
"On-Policy Distillation" (Thinking Machines, 2025); a teacher that is the student with the solution in its prompt, OPSD
(2601.18734). Deviations: OPSD and GKD compare whole distributions of the next token; here the sampled token estimates
the same gradient, with more variance and without the teacher's logits.
"""

from __future__ import annotations

import math
import string
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from mafrt.algorithms.base import Algorithm, Trajectories
from mafrt.algorithms.rewards import CreditContext, Row
from mafrt.algorithms.stats import mean, total
from mafrt.config.schema import Share
from mafrt.core.errors import ConfigError

_NO_REWARDS = frozenset(
    {"reward_weight", "outcome_weight", "process_weight", "outcome_veto", "outcome_to", "share"}
    | {"overlong_buffer", "overlong_penalty", "level", "normalization_mode"}
)

ROUNDING = 1e-5
"""nats by which two passes may differ on one distribution; Adam would make a whole step of so small a gradient"""


@dataclass(frozen=True)
class Distillation(Algorithm):
    """Every token is paid by the teacher's log-probability less the student's own."""

    reward_weight: float = 0.0
    outcome_weight: float = 0.0
    process_weight: float = 0.0
    teacher_prompt: str | None = None
    """text behind the teacher's observation, with facts of the episode in it: `The answer is {answer}.`"""
    gamma: Share = 0.0
    """discount of later tokens of the turn: 0 pays each token for itself, 1 for all that follows"""

    needs_teacher: ClassVar[bool] = True
    one_base: ClassVar[str] = "has its teacher on the students' base"
    unused: ClassVar[frozenset[str]] = _NO_REWARDS
    metrics: ClassVar[Mapping[str, tuple[str, str]]] = {
        "teacher_kl/AGENT": ("estimated KL(student, teacher) of the sampled tokens", "nats per token"),
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        try:
            names = [part[1:] for part in string.Formatter().parse(self.teacher_prompt or "") if part[1] is not None]
        except ValueError:
            names = [("", "", "")]
        if any(not name or spec or conversion for name, spec, conversion in names):
            raise ConfigError(
                f"teacher_prompt is {self.teacher_prompt!r}; expected a text in which braces hold the name of a fact, "
                "such as {answer}. Write a brace itself as two."
            )

    def credit(self, trajectories: Trajectories, context: CreditContext) -> dict[str, float]:
        gaps: dict[str, list[float]] = {}
        for row in (row for rows in trajectories for row in rows if row.dropped is None):
            rewards = _rewards(row)
            if rewards is None:
                row.drop("unjudged")
                continue
            returns, later = [], 0.0
            for reward in reversed(rewards):
                later = reward + self.gamma * later
                returns.append(later)
            returns.reverse()
            row.reward = total(rewards)
            row.fill(returns, list(returns))
            gaps.setdefault(row.turn.agent, []).extend(-reward for reward in rewards)
        return {f"teacher_kl/{agent}": mean(some) for agent, some in sorted(gaps.items()) if some}


def _rewards(row: Row) -> list[float] | None:
    """The teacher's log-probability less the student's of each token; None if the teacher's are not known."""
    turn = row.turn
    logprobs = turn.logprobs if turn.old_logprobs is None else turn.old_logprobs
    if turn.teacher_logprobs is None or not all(map(math.isfinite, (*logprobs, *turn.teacher_logprobs))):
        return None
    gaps = (theirs - ours for theirs, ours in zip(turn.teacher_logprobs, logprobs, strict=True))
    return [gap if abs(gap) > ROUNDING else 0.0 for gap in gaps]


@dataclass(frozen=True)
class OnPolicyDistillation(Distillation):
    """The student speaks, and a teacher on the same base pays every token by how much likelier it finds it."""

    teacher_path: str | None = None
    """a run or a folder of adapters, one for each of the team's, that teach; default: the base without adapter"""

    paper: ClassVar[str] = "GKD (2306.13649), Thinking Machines 2025"


@dataclass(frozen=True)
class SelfDistillation(Distillation):
    """The student is its own teacher, which sees more: by default the answer."""

    teacher_prompt: str | None = "The answer is {answer}."

    paper: ClassVar[str] = "OPSD (2601.18734)"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.teacher_prompt:
            raise ConfigError(
                f"teacher_prompt is {self.teacher_prompt!r}, and a student that sees no more than itself has nothing "
                "to teach; give what the teacher sees besides, such as 'The answer is {answer}.'."
            )
