"""Two solvers answer side by side, see each other's answer, and answer again: the task for rules that need rounds."""

from __future__ import annotations

from typing import Any

from mafrt.env import Env
from mafrt.envs.math import load_tasks, verify
from mafrt.team import AgentSpec, Team
from mafrt.types import StepResult

ROLE = "You are the Solver."
TEAM = Team(tuple(AgentSpec(name=name, prompt=ROLE, with_answer=True) for name in ("ann", "ben")))


class Debate(Env):
    """Every turn is rewarded with whether its answer is right; the outcome is the share that is right at the end."""

    agents = TEAM.names
    rounds = 2

    def __init__(self, split: str = "train") -> None:
        self.tasks = load_tasks(None, split=split)
        self.num_tasks = len(self.tasks)

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self.task = self.tasks[options["task"]] if options else self.rng.choice(self.tasks)
        self.seen = f"Problem: {self.task.problem}"
        return dict.fromkeys(self.agents, self.seen), {"task": self.task.id}

    def step(self, actions: dict[str, str]) -> StepResult:
        right = {name: float(verify(text, self.task.answer)) for name, text in actions.items()}
        if self.step_count + 1 >= self.rounds:
            return StepResult({}, right, True, False, {"outcome": sum(right.values()) / len(right)})
        others = {name: other for name in actions for other in actions if other != name}
        seen = {name: f"{self.seen}\nsolver: {actions[other]}" for name, other in others.items()}
        return StepResult(seen, right, False, False, {})
