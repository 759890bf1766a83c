"""`RewardEnv`: tasks from a file and a reward function, as a task source for every workflow."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Unpack

from mafrt.config.resolve import load_object
from mafrt.config.team import Team
from mafrt.core.errors import ConfigError, EnvError
from mafrt.core.text import brief
from mafrt.core.types import Scored
from mafrt.environment.python_tool import Ran
from mafrt.envs.math.answers import boxed
from mafrt.envs.math.tasks import Task, load_tasks
from mafrt.envs.workflows.config import WorkflowOptions
from mafrt.envs.workflows.graded_rules import GradedRules
from mafrt.envs.workflows.task_env import TaskEnv

Reward = Callable[[str, Mapping[str, Any]], float]
"""(text, record) -> grade, as a rule in 0..1"""


class RewardEnv(TaskEnv):
    """A team works on tasks that a function grades."""

    def __init__(
        self,
        dataset_path: str | Path | None = None,
        reward: str | Reward | None = None,
        team: Team | None = None,
        tasks: Sequence[Task] | None = None,
        **options: Unpack[WorkflowOptions],
    ) -> None:
        """Read the tasks of `dataset_path`, or take `tasks` as given.

        `reward`: a function, or `file.py:function`. It is called with the text of an answer and the whole record.
        Raises DataError for the data, ConfigError for the function or a setting.
        """
        self.score = reward_function(reward)
        if tasks is None:
            if dataset_path is None:
                raise ConfigError(
                    "a reward function needs tasks; give --dataset_path, a file with one problem a record"
                )
            tasks = load_tasks(dataset_path, needs_answer=False)
        self.tasks = tuple(tasks)
        if not self.tasks:
            raise ConfigError("tasks is empty; give at least one")
        super().__init__(team if team is not None else Team.of(("solver",)), **options)
        self.bounded = False  # the function is the user's

    def task_count(self) -> int:
        return len(self.tasks)

    def choose(self, index: int) -> tuple[str, dict[str, Any]]:
        self.task = self.tasks[index]
        info = {"task": self.task.id}
        return self.task.problem, info | ({"answer": self.task.answer} if self.task.answer else {})

    def grade(self, texts: Sequence[str]) -> list[float]:
        return [self._grade(text) for text in texts]

    def _grade(self, text: str) -> float:
        record = {"problem": self.task.problem, "answer": self.task.answer, **self.task.meta}
        grade = self.score(text, record)
        if not isinstance(grade, (bool, int, float)) or not math.isfinite(grade):
            name = getattr(self.score, "__qualname__", repr(self.score))
            raise EnvError(f"the reward function {name} returned {brief(grade)}; expected a finite number")
        return float(grade)

    def key(self, text: str) -> str | None:
        """The boxed answer, else the last line that is not blank; without case."""
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        answer = boxed(text) or (lines[-1] if lines else None)
        return None if answer is None else answer.strip().casefold()

    def rules(self) -> GradeRules:
        return GradeRules(self._grade)


@dataclass(frozen=True)
class GradeRules(GradedRules):
    """Scores of turns by the reward function alone: answers by their grade, other turns by the team's result."""

    grade: Callable[[str], float]

    def right(self, text: str) -> bool:
        return self.grade(text) > 0.5

    def answer(self, text: str, plan: str | None = None) -> Scored:
        grade = self.grade(text)
        return Scored(10.0 * min(max(grade, 0.0), 1.0), f"The reward function gives {grade:g}.")

    def prints_right(self, ran: Ran) -> bool:
        return ran.status == "ok" and self.right(ran.stdout)

    def followed(self, right: bool, what: str) -> Scored:
        return Scored(7.0 if right else 2.0, f"{what} was {'graded above 0' if right else 'graded 0 or less'}.")


def reward_function(reward: str | Reward | None) -> Reward:
    """The function that grades. Raises ConfigError if there is none of that name."""
    if reward is None:
        raise ConfigError("no reward function is given; name one by --reward my.py:score")
    function = load_object(reward) if isinstance(reward, str) else reward
    if not callable(function):
        raise ConfigError(f"reward {reward}: expected a function of (text, record), found {brief(function)}")
    return function
