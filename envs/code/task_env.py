"""`CodeTaskEnv`: programming problems with hidden tests, as a task source for every workflow."""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Unpack

from mafrt.config.team import Team
from mafrt.core.errors import ConfigError
from mafrt.core.types import Scored
from mafrt.environment.python_tool import PythonTool, Ran
from mafrt.environment.tool_calls import find_code
from mafrt.envs.code.grading import Grade, Grader
from mafrt.envs.code.state import why_not
from mafrt.envs.code.tasks import SETS, CodeTask, load_tasks
from mafrt.envs.workflows.config import WorkflowOptions
from mafrt.envs.workflows.state import GradedRules
from mafrt.envs.workflows.task_env import TaskEnv


class CodeTaskEnv(TaskEnv):
    """A team writes a program; the grade of an answer is the share of the hidden tests that its last program passes.

    Only a program that passes all tests counts as right: it alone ends the rounds of `chain` early. Programs are equal
    if they are the same but for comments and layout. Hidden tests are not shown, nor are their results.
    """

    def __init__(
        self,
        dataset_path: str | Path | None = None,
        team: Team | None = None,
        split: str = "train",
        timeout_s: float = 10.0,
        memory_mib: int = 1024,
        tasks: Sequence[CodeTask] | None = None,
        **options: Unpack[WorkflowOptions],
    ) -> None:
        """Read the problems (`dataset_path`: a file, or `functions` or `programs`, which ship) or take `tasks`.

        `timeout_s`, `memory_mib`: limits of a program with all its tests.
        Raises DataError for the data, ConfigError for a setting, SandboxError if there is no such sandbox here.
        """
        self.tasks = tuple(tasks) if tasks is not None else load_tasks(dataset_path, split=split)
        if tasks is None and (dataset_path is None or dataset_path in SETS):
            self.split, self.held_out, self.validation = split, {"split": "test"}, {"split": "validation"}
        if not self.tasks:
            raise ConfigError("tasks is empty; give at least one")
        super().__init__(team if team is not None else Team.of(("coder",)), **options)
        self.grader = Grader(PythonTool(options.get("sandbox", "bwrap"), timeout_s, memory_mib))
        self.blocking = True

    def task_count(self) -> int:
        return len(self.tasks)

    def choose(self, index: int) -> tuple[str, dict[str, Any]]:
        self.task = self.tasks[index]
        self.grades: dict[str, Grade] = {}
        """text -> grade of its program, for the present task"""
        reference = self.task.reference
        return self.task.shown, {"task": self.task.id} | ({"answer": reference} if reference else {})

    def grade(self, texts: Sequence[str]) -> list[float]:
        return [0.0 if (grade := self.graded(text)) is None else grade.fraction for text in texts]

    def graded(self, text: str) -> Grade | None:
        """The grade of the last program in a text; None if there is none. Raises EnvError if the sandbox failed."""
        program = find_code(text)
        if not isinstance(program, str):
            return None
        if program not in self.grades:
            self.grades = {**self.grades, program: self.grader.grade(self.task, program)}
        return self.grades[program]

    def right_share(self, grades: Sequence[float]) -> float:
        return sum(grade >= 1.0 for grade in grades) / len(grades) if grades else 0.0

    def key(self, text: str) -> str | None:
        program = find_code(text)
        return normalized(program) if isinstance(program, str) else None

    def rules(self) -> CodeRules:
        return CodeRules(self.graded)


@dataclass(frozen=True)
class CodeRules(GradedRules):
    """Scores of turns by the tests: programs by the share that they pass, other turns by the team's result."""

    graded: Callable[[str], Grade | None]

    def right(self, text: str) -> bool:
        grade = self.graded(text)
        return grade is not None and grade.passed == grade.total

    def answer(self, text: str, plan: str | None = None) -> Scored:
        grade = self.graded(text)
        return Scored(0.0, why_not(text)) if grade is None else scored(grade)

    def prints_right(self, ran: Ran) -> bool:
        return ran.status == "ok"

    def shows_right(self, output: str) -> bool:
        return self.right(output)


def scored(grade: Grade) -> Scored:
    """The score of a program: 1 if it does not compile, else 2 to 10 by the tests that it passes."""
    counted = f"The program passes {grade.passed} of {grade.total} tests"
    if grade.status == "ok" or grade.passed == grade.total:
        return Scored(2.0 + 8.0 * grade.fraction, f"{counted}.")
    last = (grade.trace.strip().splitlines() or [grade.status])[-1][:200]
    return Scored(1.0 if grade.status == "syntax" else 2.0 + 8.0 * grade.fraction, f"{counted} ({last}).")


def normalized(program: str) -> str:
    """A program without comments and layout of its own; one that does not parse as it is, less the blanks around it."""
    try:
        return ast.unparse(ast.parse(program))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return program.strip()
