"""Problems that training and evaluation share: a score on them says nothing about learning."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass

from mafrt.envs.math.tasks import Task

_NOT_WORD = re.compile(r"[^\w+\-*/^=<>.]+")
_NUMBER = re.compile(r"\d+(?:[.,]\d+)*")
_LATEX_SPACE = re.compile(r"\\(?:,|;|:|!|quad|qquad|left|right|displaystyle|text|mathrm|dfrac|tfrac)\b|\\[,;:! ]")


@dataclass(frozen=True)
class LeakReport:
    """Which evaluation tasks also stand in the training set: by normalised text, and by their numbers and answer."""

    train: int
    """Training tasks looked at."""
    evaluation: int
    """Evaluation tasks looked at."""
    shared: tuple[tuple[str, str], ...]
    """(evaluation id, training id) of each evaluation task that training has too."""
    contradicting: tuple[tuple[str, str], ...]
    """Those of them whose reference answers differ."""
    same_numbers: tuple[tuple[str, str], ...]
    """(evaluation id, training id) of each evaluation task of other words that has the numbers and the answer of a
    training task: a calculation that training has shown."""
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

    @property
    def calculations(self) -> str:
        """How many evaluation problems are known calculations in other words, as a sentence."""
        count = len(self.same_numbers)
        text = f"{count} of {self.evaluation} evaluation problems ({count / self.evaluation:.1%}) have the numbers and "
        return text + "the answer of a training problem, in other words"


def calculation(task: Task) -> tuple[tuple[str, ...], str] | None:
    """The numbers of a problem, in their order, and its answer; None with fewer than two, which tell nothing apart."""
    numbers = _NUMBER.findall(task.problem)
    return (tuple(numbers), task.answer.strip()) if len(numbers) > 1 else None


def normalise(problem: str) -> str:
    """Text that is equal for problems that differ in case, spacing, punctuation or LaTeX spacing only."""
    # Copies of a problem differ in typography more often than in words.
    text = unicodedata.normalize("NFKC", problem).casefold()
    text = _LATEX_SPACE.sub(" ", text)
    return " ".join(word for word in (w.strip(".") for w in _NOT_WORD.sub(" ", text).split()) if word)


def find_leaks(train: Iterable[Task], evaluation: Iterable[Task]) -> LeakReport:
    """Compare two sets of tasks by the normalised text of their problems, and by their numbers and answers."""
    train, evaluation = list(train), list(evaluation)
    by_text: dict[str, Task] = {}
    for task in train:
        by_text.setdefault(normalise(task.problem), task)
    calculations = {key: task for task in reversed(train) if (key := calculation(task)) is not None}
    eval_texts = [normalise(task.problem) for task in evaluation]
    pairs = [(task, by_text[text]) for task, text in zip(evaluation, eval_texts, strict=True) if text in by_text]
    return LeakReport(
        train=len(train),
        evaluation=len(evaluation),
        shared=tuple((e.id, t.id) for e, t in pairs),
        # Worth a line of their own: one of the two data sets has a wrong answer there.
        contradicting=tuple((e.id, t.id) for e, t in pairs if e.answer != t.answer),
        same_numbers=tuple(
            (task.id, calculations[key].id)
            for task, text in zip(evaluation, eval_texts, strict=True)
            if text not in by_text and (key := calculation(task)) in calculations
        ),
        repeated_train=len(train) - len(by_text),
        repeated_evaluation=len(evaluation) - len(set(eval_texts)),
    )
