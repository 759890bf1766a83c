"""`MathEnv`: math problems, a workflow, and a verifier put together."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mafrt.config import unknown
from mafrt.env import Env
from mafrt.envs.math.tasks import Task, load_tasks
from mafrt.envs.math.verifier import verify_many
from mafrt.envs.math.workflow import MathState, make_workflow
from mafrt.errors import ConfigError
from mafrt.team import Team
from mafrt.types import Observation, StepResult

REWARDS = ("outcome_only", "last", "each")


class MathEnv(Env):
    """A team solves a math problem.

    The score of a round is the fraction of the answering agents (`with_answer`) whose answer is right. An episode ends
    with the first round that scores above 0, or with round `horizon`; its score is `info["outcome"]`.

    `rewards` says what `step` gives besides the outcome, in the step that ends the episode: `outcome_only` nothing
    (the outcome reaches the turns through the credit settings), `last` the score to the last agent (MARFT's own way),
    `each` the score to every agent. With the latter two, the run's `outcome_weight` should be 0, or the score counts
    twice.
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
    ) -> None:
        """Read the tasks (`dataset_path=None`: the shipped word problems) or take `tasks` as given.

        `judge_lines`: whether a failed round is followed by the line `judge: The answer is incorrect.`
        `last_number`: whether a text without a marked answer is read as giving its last number.
        Raises DataError for the data, ConfigError for a setting.
        """
        if rewards not in REWARDS:
            raise ConfigError(unknown("rewards setting", str(rewards), REWARDS))
        self.team = team if team is not None else Team.of(("reasoner", "actor"))
        self.workflow = make_workflow(workflow, self.team, horizon, judge_lines)
        self.tasks: tuple[Task, ...] = (
            tuple(tasks)
            if tasks is not None
            else load_tasks(dataset_path, problem_field=problem_field, answer_field=answer_field, split=split)
        )
        if not self.tasks:
            raise ConfigError("tasks is empty; give at least one")
        self.agents = self.team.names
        self.num_tasks = len(self.tasks)
        self.max_steps = self.workflow.max_steps
        self.rewards, self.last_number = rewards, last_number

    def spawn(self) -> MathEnv:
        """A sibling on the same tasks; nothing is read again."""
        sibling = object.__new__(type(self))
        # Tasks, team and workflow never change, so they are shared; what an episode changes is its own.
        vars(sibling).update(vars(self))
        sibling.rng, sibling.done, sibling._acting = random.Random(), True, frozenset()
        return sibling

    def reset(
        self, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Observation], dict[str, Any]]:
        chosen = (options or {}).get("task")
        self.task = self.tasks[self.rng.randrange(len(self.tasks)) if chosen is None else chosen]
        self.state = MathState(self.task.problem)
        info = {"task": self.task.id, "problem": self.task.problem, "answer": self.task.answer}
        return self.workflow.observations(self.state), info

    def transition(self, state: MathState, actions: dict[str, str]) -> MathState:
        """What was said joins the transcript, and the next agent's turn comes."""
        return self.workflow.advance(state, actions)

    def step(self, actions: dict[str, str]) -> StepResult:
        self.state = self.transition(self.state, actions)
        answers = self.workflow.answers(self.state)
        if answers is None:
            return StepResult(self.workflow.observations(self.state), {}, False, False, {"state": self.state})
        pairs = [(text, self.task.answer) for text in answers.values()]
        correct = dict(zip(answers, verify_many(pairs, last_number=self.last_number), strict=True))
        score = sum(correct.values()) / len(correct)
        self.state = self.workflow.judged(self.state, score)
        info = {"outcome": score, "correct": correct, "rounds": self.state.round, "state": self.state}
        over = self.state.over
        return StepResult(self.workflow.observations(self.state), self._rewards(score, over), over, False, info)

    def _rewards(self, score: float, over: bool) -> dict[str, float]:
        if not over or self.rewards == "outcome_only":
            return {}
        return dict.fromkeys(self.agents if self.rewards == "each" else self.agents[-1:], score)
