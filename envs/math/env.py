"""`MathEnv`: math problems, a workflow, and a verifier put together."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mafrt.config.schema import unknown
from mafrt.config.team import Team
from mafrt.core.errors import ConfigError
from mafrt.core.types import Evidence, Observation, StepResult
from mafrt.environment.base import Env
from mafrt.environment.cloning import fork_sharing, spawn_sharing
from mafrt.environment.python_tool import PythonTool, Ran
from mafrt.envs.math import process_rewards
from mafrt.envs.math.tasks import Task, load_tasks
from mafrt.envs.math.verifier import verify, verify_many
from mafrt.envs.math.workflows.registry import SHIPPED, MathState, make_workflow

REWARDS = ("outcome_only", "last", "each")


class MathEnv(Env):
    """A team solves a math problem.

    The score of a round is the fraction of the answering agents (`with_answer`) whose answer is right. An episode ends
    with the first round that scores above 0, or with round `horizon`; its score is `info["outcome"]`.

    `rewards` selects the rewards of `step` besides the outcome, in the step that ends the episode: `outcome_only` none
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
        sees: str | None = None,
        tool_turns: int | None = None,
        sandbox: str = "bwrap",
    ) -> None:
        """Read the tasks (`dataset_path=None`: the shipped word problems) or take `tasks` as given.

        `judge_lines`: whether a failed round is followed by the line `judge: The answer is incorrect.`
        `last_number`: whether a text without a marked answer is read as giving its last number.
        `sees`: visible transcript of an agent: `all` (default), `previous` (the agent before it), `problem`.
        `tool_turns`: turns of an agent that has its programs run, each with one run (`mathchat`; default 2).
        `sandbox`: where they run: `bwrap`, `fusion:URL` or `degraded`.
        Raises DataError for the data, ConfigError for a setting, SandboxError if a sandbox is needed and not there.
        """
        if rewards not in REWARDS:
            raise ConfigError(unknown("rewards setting", str(rewards), REWARDS))
        self.team = team if team is not None else Team.of(("reasoner", "actor"))
        options = {"sees": sees, "tool_turns": tool_turns}
        self.workflow = make_workflow(workflow, self.team, horizon, judge_lines, **options)
        self.rubric = workflow if workflow in SHIPPED else None
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
        self.blocking = getattr(self.workflow, "uses_tools", False)
        self.tool = PythonTool(sandbox) if self.blocking else None
        # A workflow of the user's own may hang; the rest has deadlines.
        self.bounded = type(self.workflow).__module__.startswith("mafrt.") and type(self) is MathEnv

    spawn, fork = spawn_sharing, fork_sharing

    def reset(
        self, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Observation], dict[str, Any]]:
        chosen = (options or {}).get("task")
        self.task = self.tasks[self.rng.randrange(len(self.tasks)) if chosen is None else chosen]
        self.state = MathState(self.task.problem)
        self.undecided: frozenset[str] = frozenset()
        info = {"task": self.task.id, "problem": self.task.problem, "answer": self.task.answer}
        return self.workflow.observations(self.state), info

    def transition(self, state: MathState, actions: dict[str, str]) -> MathState:
        """Append the turns to the transcript and advance to the next agent."""
        return self.workflow.advance(state, actions)

    def step(self, actions: dict[str, str]) -> StepResult:
        before, ran = self.state, None
        after = self.transition(before, actions)
        if after.pending is not None:
            assert self.tool is not None  # only workflows that use tools leave a program
            ran = self.tool.run(after.pending)
            after = self.workflow.answered(after, self.tool.says(ran))
        self.state = after
        evidence = self._evidence(before, after, ran)
        answers = self.workflow.answers(after)
        if answers is None:
            info: dict[str, Any] = {"state": after, "evidence": evidence}
            return StepResult(self.workflow.observations(after), {}, False, False, info)
        pairs = [(text, self.task.answer) for text in answers.values()]
        correct = dict(zip(answers, verify_many(pairs, last_number=self.last_number), strict=True))
        score = sum(correct.values()) / len(correct)
        self.state = self.workflow.judged(after, score)
        for agent in self.undecided:
            evidence[agent] = Evidence(rules=process_rewards.followed(score > 0, "the team's answer"))
        self.undecided = frozenset()
        info = {"outcome": score, "correct": correct, "rounds": self.state.round, "state": self.state}
        over = self.state.over
        info["evidence"] = evidence
        return StepResult(self.workflow.observations(self.state), self._rewards(score, over), over, False, info)

    def _evidence(self, before: MathState, after: MathState, ran: Ran | None) -> dict[str, Evidence]:
        """The workflow's evidence about the latest turns; undecided turns wait for the answer."""
        judge = getattr(self.workflow, "evidence", None)
        if judge is None:
            return {}
        found: dict[str, Evidence] = judge(before, after, ran, self._right)
        decided = {agent for agent, evidence in found.items() if evidence.rules is not None}
        self.undecided = (self.undecided | found.keys()) - decided
        return found

    def _right(self, text: str) -> bool:
        return verify(text, self.task.answer, last_number=self.last_number)

    def _rewards(self, score: float, over: bool) -> dict[str, float]:
        if not over or self.rewards == "outcome_only":
            return {}
        return dict.fromkeys(self.agents if self.rewards == "each" else self.agents[-1:], score)
