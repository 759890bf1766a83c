"""`TaskEnv`: a task source, a workflow and a team put together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar, Unpack

from mafrt.config.schema import unknown
from mafrt.config.team import Team
from mafrt.core.errors import ConfigError
from mafrt.core.types import Evidence, Observation, StepResult
from mafrt.environment.base import Env
from mafrt.environment.cloning import fork_sharing, spawn_sharing
from mafrt.envs.workflows.config import WorkflowOptions
from mafrt.envs.workflows.registry import make_workflow
from mafrt.envs.workflows.state import EpisodeTool, TaskState, TurnRules, WorkflowTool

E = TypeVar("E", bound="TaskEnv")
REWARDS = ("outcome_only", "last", "each")


class TaskEnv(Env):
    """A team works on tasks in the order that a workflow gives.

    The score of a round is the mean grade of the answers that the workflow lets decide. An episode ends when the
    workflow says so; its last score is `info["outcome"]`. A subclass is a task source: it defines `task_count`,
    `choose`, `grade`, and what its rules and answers are.

    `rewards` selects the rewards of `step` besides the outcome, in the step that ends the episode: `outcome_only` none
    (the outcome reaches the turns through the credit settings), `last` the score to the last agent (MARFT's own way),
    `each` the score to every agent. With the latter two, the run's `outcome_weight` should be 0, or the score counts
    twice.
    """

    def __init__(self, team: Team, **options: Unpack[WorkflowOptions]) -> None:
        """Build the workflow. Raises ConfigError for a setting, SandboxError if a sandbox is needed and not there."""
        given: dict[str, Any] = dict(options)
        for name in given:
            if name not in WorkflowOptions.__annotations__:
                raise ConfigError(unknown("option of a workflow", name, WorkflowOptions.__annotations__))
        rewards, sandbox = given.pop("rewards", "outcome_only"), given.pop("sandbox", "bwrap")
        if rewards not in REWARDS:
            raise ConfigError(unknown("rewards setting", str(rewards), REWARDS))
        self.team, self.rewards = team, rewards
        given["tools"] = given.get("tools") or None
        self.workflow = make_workflow(
            given.pop("workflow", "chain"), team, given.pop("horizon", 1), given.pop("judge_lines", True), **given
        )
        self.agents = team.names
        self.num_tasks = self.task_count()
        self.max_steps = self.workflow.max_steps
        self.blocking = self.workflow.uses_tools
        self.tool = self.make_tool(sandbox) if self.blocking else None
        # A workflow of the user's own, or a pattern of theirs, may hang; the rest has deadlines.
        shipped = all(type(part).__module__.startswith("mafrt.envs.") for part in (self, self.workflow))
        self.bounded = self.workflow.bounded and shipped

    spawn = spawn_sharing

    def make_tool(self, sandbox: str) -> WorkflowTool:
        """The tool of the workflow. A task source may bring one. Raises as `Workflow.make_tool`."""
        return self.workflow.make_tool(sandbox)

    def fork(self: E) -> E:
        twin = fork_sharing(self)
        if isinstance(twin.tool, EpisodeTool):
            twin.tool = twin.tool.copy()
        return twin

    # ---------------------------------------------------------------------------------------------- the task source

    def task_count(self) -> int:
        """Number of tasks. Called once, by the constructor."""
        raise NotImplementedError

    def choose(self, index: int) -> tuple[str, dict[str, Any]]:
        """Take up a task. Returns the text of the problem, and an info dict with `task`, its id."""
        raise NotImplementedError

    def grade(self, texts: Sequence[str]) -> Sequence[float | None]:
        """The grade of each text as an answer to the present task; None: it has no grade, and counts for nothing."""
        raise NotImplementedError

    def right_share(self, grades: Sequence[float]) -> float:
        """How far the team is right, for the workflow: a round of `chain` whose share is 0 is followed by another."""
        return sum(grades) / len(grades) if grades else 0.0

    def key(self, text: str) -> str | None:
        """The answer that a text gives, in a form in which equal answers are equal; None if it gives none."""
        raise NotImplementedError

    def rules(self) -> TurnRules:
        """Scores of turns by rules, for the present task."""
        raise NotImplementedError

    # --------------------------------------------------------------------------------------------------- the episode

    def reset(
        self, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Observation], dict[str, Any]]:
        chosen = (options or {}).get("task")
        assert self.num_tasks is not None
        problem, info = self.choose(self.rng.randrange(self.num_tasks) if chosen is None else chosen)
        self.state = TaskState(problem)
        if isinstance(self.tool, EpisodeTool):
            self.tool = self.tool.fresh()
        self.unscored: frozenset[str] = frozenset()
        """agents whose latest turn is scored by the result"""
        return self.workflow.observe(self.state), {**info, "problem": problem}

    def transition(self, state: TaskState, actions: dict[str, str]) -> TaskState:
        """Append the turns to the transcript and advance to the next agents."""
        return self.workflow.transition(state, actions)

    def step(self, actions: dict[str, str]) -> StepResult:
        before, ran = self.state, None
        after = self.transition(before, actions)
        if after.pending is not None:
            assert self.tool is not None  # only workflows that use tools leave a program
            ran = self._run(self.tool, after)
            after = self.workflow.answered(after, self.tool.says(ran))
        self.state = after
        evidence = self._evidence(before, after, ran)
        answers = self.workflow.answers(after)
        if answers is None:
            info: dict[str, Any] = {"state": after, "evidence": evidence}
            return StepResult(self.workflow.observe(after), {}, False, False, info)
        decisive = self.workflow.decide(answers, self.key)
        grades = dict(zip(decisive, self.grade(list(decisive.values())), strict=True))
        correct = {agent: grade for agent, grade in grades.items() if grade is not None}
        score = sum(correct.values()) / len(correct) if correct else 0.0
        right = self.right_share(list(correct.values()))
        self.state = self.workflow.judged(after, right)
        over = self.state.over
        for agent in self.unscored:
            evidence[agent] = Evidence(rules=self.rules().followed(right > 0, "the team's answer"))
        self.unscored = frozenset()
        info = {"correct": correct, "rounds": self.state.round, "state": self.state}
        # Without a grade on any answer, the outcome is not known.
        if self.workflow.graded and (correct or not grades):
            info["outcome"] = score
        info["evidence"] = evidence
        info["answers"] = {
            agent: {"key": self.key(decisive[agent]), "score": score} for agent, score in correct.items()
        }
        if over and (measures := self.workflow.measures(self.state, self.key)):
            info["measures"] = measures
        return StepResult(self.workflow.observe(self.state), self._rewards(score, over), over, False, info)

    def _run(self, tool: WorkflowTool, state: TaskState) -> Any:
        """Run what is pending; a tool of an episode is told which agent asks."""
        assert state.pending is not None
        return tool.run(state.pending, state.said[-1][0]) if isinstance(tool, EpisodeTool) else tool.run(state.pending)

    def _evidence(self, before: TaskState, after: TaskState, ran: Any) -> dict[str, Evidence]:
        """The workflow's evidence about the latest turns; turns without a score wait for the result."""
        by_agent = self.workflow.evidence(before, after, ran, self.rules())
        scored = {agent for agent, evidence in by_agent.items() if evidence.rules is not None}
        self.unscored = (self.unscored | by_agent.keys()) - scored
        return by_agent

    def _rewards(self, score: float, over: bool) -> dict[str, float]:
        if over and (paid := self.workflow.payments(self.state, self.key)) is not None:
            return paid
        if not over or self.rewards == "outcome_only":
            return {}
        return dict.fromkeys(self.agents if self.rewards == "each" else self.agents[-1:], score)
