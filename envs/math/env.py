"""`MathEnv`: math problems with a verifier, as a task source for every workflow, and its debates and tools by name."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Unpack

from mafrt.config.schema import unknown
from mafrt.config.team import Team
from mafrt.core.errors import ConfigError
from mafrt.envs.construction import named_split
from mafrt.envs.math.answers import extract_answer, plain_number, tidy
from mafrt.envs.math.process_rewards import MathRules
from mafrt.envs.math.tasks import Task, load_tasks
from mafrt.envs.math.verifier import verify
from mafrt.envs.workflows.config import WorkflowOptions
from mafrt.envs.workflows.registry import RUBRICS
from mafrt.envs.workflows.task_env import TaskEnv

SCORE_ANSWERS_BY = ("result", "plan")


class MathEnv(TaskEnv):
    """A team solves a math problem.

    The score of a round is the share of the decisive answers that are right; in most workflows these are the answers
    of the agents with `with_answer`.
    """

    def __init__(
        self,
        dataset_path: str | Path | None = None,
        team: Team | None = None,
        split: str = "train",
        last_number: bool = False,
        tasks: Sequence[Task] | None = None,
        score_answers_by: str = "result",
        **options: Unpack[WorkflowOptions],
    ) -> None:
        """Read the tasks (`dataset_path=None`: the shipped word problems) or take `tasks` as given.

        `tasks`: such as `load_tasks(path, problem_field="question")` reads them.
        `score_answers_by`: whether the coach's rules take an answer that carries out a wrong plan without a mistake
        for wrong (`result`), or for right work of its agent (`plan`).
        `last_number`: whether a text without a marked answer is read as giving its last number.
        Raises DataError for the data, and as `TaskEnv`.
        """
        if score_answers_by not in SCORE_ANSWERS_BY:
            raise ConfigError(unknown("score_answers_by", score_answers_by, SCORE_ANSWERS_BY))
        self.last_number, self.score_answers_by = last_number, score_answers_by
        self.tasks: tuple[Task, ...] = tuple(tasks) if tasks is not None else load_tasks(dataset_path, split=split)
        if not self.tasks:
            raise ConfigError("tasks is empty; give at least one")
        if tasks is None:
            self.split = split if dataset_path is None else named_split(dataset_path)
        if tasks is None and dataset_path is None:
            self.held_out, self.validation = {"split": "test"}, {"split": "validation"}
        super().__init__(team if team is not None else Team.of(("reasoner", "actor")), **options)
        workflow = options.get("workflow", "chain")
        if score_answers_by == "plan" and not self.workflow.has_plans:
            raise ConfigError(
                f"score_answers_by is 'plan', and no agent of workflow {workflow!r} plans for one that answers; take "
                "chain or router with an agent without with_answer, or score_answers_by 'result'"
            )
        self.rubric = workflow if workflow in RUBRICS else None

    def task_count(self) -> int:
        return len(self.tasks)

    def choose(self, index: int) -> tuple[str, dict[str, Any]]:
        self.task = self.tasks[index]
        return self.task.problem, {"task": self.task.id, "answer": self.task.answer}

    def grade(self, texts: Sequence[str]) -> list[float]:
        return [float(self.right(text)) for text in texts]

    def key(self, text: str) -> str | None:
        given = extract_answer(text, last_number=self.last_number)
        if given is None:
            return None
        number = plain_number(tidy(given))
        # Votes are counted by value, so that 1,000 and 1000.0 are one answer.
        return tidy(given) if number is None else str(number)

    def right(self, text: str) -> bool:
        """Whether a text gives the task's answer."""
        return verify(text, self.task.answer, last_number=self.last_number, problem=self.task.problem)

    def rules(self) -> MathRules:
        return MathRules(self.right, self.task.problem, self.score_answers_by == "plan")


CLAIMS = "arithmetic:train:claims=1"


class DebateEnv(MathEnv):
    """`pro_con` on claims of arithmetic: two debaters with sides, and rules that say which side wins."""

    def __init__(self, dataset_path: str | Path | None = CLAIMS, team: Team | None = None, **options: Any) -> None:
        """As `MathEnv`; without a team the debaters are `ann` and `bob`."""
        options = {"workflow": "pro_con", "verdict": "rules", **options}
        super().__init__(dataset_path, team if team is not None else Team.of(("ann", "bob")), **options)
        if dataset_path == CLAIMS:
            self.held_out = {"dataset_path": CLAIMS.replace("train", "test")}
            self.validation = {"dataset_path": CLAIMS.replace("train", "validation")}


class ToolEnv(MathEnv):
    """The workflow `tools`: agents that call a calculator, or the tools that `tools` names."""

    def __init__(self, dataset_path: str | Path | None = None, team: Team | None = None, **options: Any) -> None:
        """As `MathEnv`; without a team there is one agent, `solver`."""
        options = {"workflow": "tools", **options}
        super().__init__(dataset_path, team if team is not None else Team.of(("solver",)), **options)
