"""Problems that training and evaluation share: a score on them says nothing about learning."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass

from mafrt.envs.math.tasks import Task

_NOT_WORD = re.compile(r"[^\w+\-*/^=<>.]+")
_LATEX_SPACE = re.compile(r"\\(?:,|;|:|!|quad|qquad|left|right|displaystyle|text|mathrm|dfrac|tfrac)\b|\\[,;:! ]")


@dataclass(frozen=True)
class LeakReport:
    """Which evaluation tasks also stand in the training set, by normalised text."""

    train: int
    """Training tasks looked at."""
    evaluation: int
    """Evaluation tasks looked at."""
    shared: tuple[tuple[str, str], ...]
    """(evaluation id, training id) of each evaluation task that training has too."""
    contradicting: tuple[tuple[str, str], ...]
    """Those of them whose reference answers differ."""
    repeated_train: int
    """Training tasks beyond the first with the same text."""
    repeated_evaluation: int

    def __str__(self) -> str:
        share = len(self.shared) / self.evaluation if self.evaluation else 0.0
        text = f"{len(self.shared)} of {self.evaluation} evaluation problems ({share:.1%}) are also among the "
        text += f"{self.train} training problems"
        if self.contradicting:
            text += f", {len(self.contradicting)} of them with another answer"
        return text


def normalise(problem: str) -> str:
    """Text that is equal for problems that differ in case, spacing, punctuation or LaTeX spacing only."""
    # Copies of a problem differ in typography more often than in words.
    text = unicodedata.normalize("NFKC", problem).casefold()
    text = _LATEX_SPACE.sub(" ", text)
    return " ".join(word for word in (w.strip(".") for w in _NOT_WORD.sub(" ", text).split()) if word)


def find_leaks(train: Iterable[Task], evaluation: Iterable[Task]) -> LeakReport:
    """Compare two sets of tasks by the normalised text of their problems."""
    train, evaluation = list(train), list(evaluation)
    by_text: dict[str, Task] = {}
    for task in train:
        by_text.setdefault(normalise(task.problem), task)
    eval_texts = [normalise(task.problem) for task in evaluation]
    pairs = [(task, by_text[text]) for task, text in zip(evaluation, eval_texts, strict=True) if text in by_text]
    return LeakReport(
        train=len(train),
        evaluation=len(evaluation),
        shared=tuple((e.id, t.id) for e, t in pairs),
        # Worth a line of their own: one of the two data sets has a wrong answer there.
        contradicting=tuple((e.id, t.id) for e, t in pairs if e.answer != t.answer),
        repeated_train=len(train) - len(by_text),
        repeated_evaluation=len(evaluation) - len(set(eval_texts)),
    )
