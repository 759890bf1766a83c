"""`MathEnv`: math problems with a verifier, as a task source for every workflow."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mafrt.config.team import Team
from mafrt.core.errors import ConfigError
from mafrt.envs.math.answers import extract_answer, plain_number, tidy
from mafrt.envs.math.process_rewards import MathRules
from mafrt.envs.math.tasks import Task, load_tasks
from mafrt.envs.math.verifier import verify, verify_many
from mafrt.envs.workflows.registry import RUBRICS
from mafrt.envs.workflows.task_env import TaskEnv


class MathEnv(TaskEnv):
    """A team solves a math problem.

    The score of a round is the share of the decisive answers that are right; in most workflows these are the answers
    of the agents with `with_answer`.
    """

    def __init__(
        self,
        dataset_path: str | Path | None = None,
        team: Team | None = None,
        horizon: int = 1,
        problem_field: str | None = None,
        answer_field: str | None = None,
        split: str = "train",
        workflow: str = "chain",
        judge_lines: bool = True,
        rewards: str = "outcome_only",
        last_number: bool = False,
        tasks: Sequence[Task] | None = None,
        sees: str | None = None,
        tool_turns: int | None = None,
        judge: bool | None = None,
        routes: str | None = None,
        tools: Sequence[str] = (),
        sandbox: str = "bwrap",
    ) -> None:
        """Read the tasks (`dataset_path=None`: the shipped word problems) or take `tasks` as given.

        `last_number`: whether a text without a marked answer is read as giving its last number.
        `sees`: view of the transcript of agents that have none of their own (`mafrt.envs.workflows.views`).
        `tool_turns`, `judge`, `routes`: options of the workflows `mathchat`, `debate` and `router`.
        The others are those of `TaskEnv`. Raises DataError for the data besides.
        """
        self.last_number = last_number
        self.tasks: tuple[Task, ...] = (
            tuple(tasks)
            if tasks is not None
            else load_tasks(dataset_path, problem_field=problem_field, answer_field=answer_field, split=split)
        )
        if not self.tasks:
            raise ConfigError("tasks is empty; give at least one")
        options = {
            "sees": sees,
            "tool_turns": tool_turns,
            "judge": judge,
            "routes": routes,
            "tools": tools or None,
        }
        team = team if team is not None else Team.of(("reasoner", "actor"))
        super().__init__(team, workflow, horizon, judge_lines, rewards, sandbox, options)
        self.rubric = workflow if workflow in RUBRICS else None

    def task_count(self) -> int:
        return len(self.tasks)

    def choose(self, index: int) -> tuple[str, dict[str, Any]]:
        self.task = self.tasks[index]
        return self.task.problem, {"task": self.task.id, "answer": self.task.answer}

    def grade(self, texts: Sequence[str]) -> list[float]:
        return [
            float(right) for right in verify_many([(t, self.task.answer) for t in texts], last_number=self.last_number)
        ]

    def key(self, text: str) -> str | None:
        given = extract_answer(text, last_number=self.last_number)
        if given is None:
            return None
        number = plain_number(tidy(given))
        return tidy(given) if number is None else str(number)

    def rules(self) -> MathRules:
        return MathRules(lambda text: verify(text, self.task.answer, last_number=self.last_number), self.task.problem)
