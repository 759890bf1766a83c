"""`RewardEnv`: tasks from a file and a reward function, as a task source for every workflow."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Unpack

from mafrt.config.team import Team
from mafrt.core.errors import ConfigError
from mafrt.core.types import Observation, Scored, StepResult
from mafrt.environment.python_tool import Ran
from mafrt.envs.math.answers import boxed
from mafrt.envs.math.tasks import Task, load_tasks
from mafrt.envs.tasks.reward_functions import Reward, reward_function
from mafrt.envs.workflows.config import WorkflowOptions
from mafrt.envs.workflows.state import GradedRules
from mafrt.envs.workflows.task_env import TaskEnv

CHECKED = 100
"""Records whose fields are compared with the names that a reward function asks for."""


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

        `reward`: a function in one of the forms of `mafrt.envs.tasks.reward_functions`, or `file.py:function`.
        Raises DataError for the data, ConfigError for the function or a setting.
        """
        if reward is None:
            reward_function(reward)
        if tasks is None:
            if dataset_path is None:
                raise ConfigError(
                    "a reward function needs tasks; give --dataset_path, a file with one problem a record"
                )
            tasks = load_tasks(dataset_path, needs_answer=False)
        self.tasks = tuple(tasks)
        if not self.tasks:
            raise ConfigError("tasks is empty; give at least one")
        self.reward = reward_function(reward, [_record(task) for task in self.tasks[:CHECKED]])
        self.measured: dict[str, float] = {}
        """further numbers of the reward function on the latest decisive answer"""
        super().__init__(team if team is not None else Team.of(("solver",)), **options)
        self.bounded = False  # the function is the user's

    def task_count(self) -> int:
        return len(self.tasks)

    def choose(self, index: int) -> tuple[str, dict[str, Any]]:
        self.task = self.tasks[index]
        info = {"task": self.task.id}
        return self.task.problem, info | ({"answer": self.task.answer} if self.task.answer else {})

    def reset(
        self, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Observation], dict[str, Any]]:
        self.measured = {}
        return super().reset(seed, options)

    def step(self, actions: dict[str, str]) -> StepResult:
        result = super().step(actions)
        if not result.terminated or not self.measured:
            return result
        measures = {**self.measured, **result.info.get("measures", {})}
        return result._replace(info={**result.info, "measures": measures})

    def grade(self, texts: Sequence[str]) -> list[float | None]:
        grades = [self.reward.grade(text, _record(self.task)) for text in texts]
        self.measured = {name: value for grade in grades for name, value in grade.measures.items()}
        return [grade.score for grade in grades]

    def key(self, text: str) -> str | None:
        """The boxed answer, else the last line that is not blank; without case."""
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        answer = boxed(text) or (lines[-1] if lines else None)
        return None if answer is None else answer.strip().casefold()

    def rules(self) -> GradeRules:
        return GradeRules(lambda text: self.reward.grade(text, _record(self.task)).score)


def _record(task: Task) -> dict[str, Any]:
    """The record as a reward function gets it."""
    return {"problem": task.problem, "answer": task.answer, **task.meta}


@dataclass(frozen=True)
class GradeRules(GradedRules):
    """Scores of turns by the reward function alone: answers by their grade, other turns by the team's result."""

    grade: Callable[[str], float | None]

    def right(self, text: str) -> bool:
        return (self.grade(text) or 0.0) > 0.5

    def answer(self, text: str, plan: str | None = None) -> Scored | None:
        grade = self.grade(text)
        if grade is None:
            return None
        return Scored(10.0 * min(max(grade, 0.0), 1.0), f"The reward function gives {grade:g}.")

    def prints_right(self, ran: Ran) -> bool:
        return ran.status == "ok" and self.right(ran.stdout)

    def shows_right(self, output: str) -> bool:
        return self.right(output)
