"""Training tasks of `bench learn`: one per family of rules, all on the shipped word problems."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mafrt.config.agent import AgentSpec
from mafrt.config.team import Team
from mafrt.core.shipped import SHIPPED
from mafrt.core.types import StepResult
from mafrt.environment.base import Env
from mafrt.envs.math import MathEnv, load_tasks, verify
from mafrt.envs.workflows.state import TaskState

CHAIN = Team.load(SHIPPED / "profiles" / "quickstart_math.json")
ROLE = "You are the Solver. Propose a boxed answer."
SOLVERS = Team(tuple(AgentSpec(name=name, prompt=ROLE, with_answer=True) for name in ("ann", "ben")))


class ReasonerActorEnv(MathEnv):
    """Reasoner, then Actor; both learn from the outcome."""

    team = CHAIN

    def __init__(self, split: str = "train") -> None:
        super().__init__(team=CHAIN, split=split)


class TwoRoundEnv(MathEnv):
    """Two rounds of Reasoner and Actor, each paid for its own turn: `SCALE` for a right plan, 1 for a right answer.

    So a trajectory's mean, an agent's turns and an agent's first and second turn are three different baselines, and an
    episode has two or four turns. The metric is the outcome: whether the team's final answer is right.
    """

    SCALE = 10.0
    team = CHAIN

    def __init__(self, split: str = "train") -> None:
        super().__init__(team=CHAIN, split=split, horizon=2)

    def step(self, actions: dict[str, str]) -> StepResult:
        result = super().step(actions)
        if "outcome" in result.info:
            return result._replace(rewards={"actor": float(result.info["outcome"])})
        judged = result.info["evidence"]["reasoner"].rules
        return result._replace(rewards={"reasoner": self.SCALE * (judged is not None and judged.score == 10.0)})


class RetryEnv(MathEnv):
    """Reasoner, then Actor; where the answer is wrong they begin anew, once, and know nothing of the first try.

    So states recur, in an episode as between episodes, and a turn can be compared with others in the same place.
    """

    TRIES = 2
    team = CHAIN

    def __init__(self, split: str = "train") -> None:
        super().__init__(team=CHAIN, split=split)
        self.max_steps = self.TRIES * len(self.agents)

    def step(self, actions: dict[str, str]) -> StepResult:
        result = super().step(actions)
        if result.info.get("outcome") != 0.0 or self.step_count + 1 >= self.TRIES * len(self.agents):
            return result
        self.state = TaskState(self.task.problem)
        return StepResult(self.workflow.observe(self.state), {}, False, False, {})


class SolverPairEnv(Env):
    """Two solvers answer two problems at the same time, and are told only how many answers were right: who was?"""

    team = SOLVERS
    agents = SOLVERS.names

    def __init__(self, split: str = "train") -> None:
        self.tasks = load_tasks(None, split=split)
        self.num_tasks = len(self.tasks)

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        first = options["task"] if options else self.rng.randrange(len(self.tasks))
        # The other one is far from it in the list, and both come up equally often.
        self.mine = [self.tasks[(first + shift) % len(self.tasks)] for shift in (0, len(self.tasks) // 2)]
        seen = {name: f"Problem: {task.problem}" for name, task in zip(self.agents, self.mine, strict=True)}
        return seen, {"task": self.mine[0].id}

    def step(self, actions: dict[str, str]) -> StepResult:
        right = [verify(actions[name], task.answer) for name, task in zip(self.agents, self.mine, strict=True)]
        return StepResult({}, {}, True, False, {"outcome": sum(right) / len(right)})


class DebateEnv(Env):
    """Two solvers answer side by side, see each other's answer, and answer again.

    Every turn is rewarded with whether its answer is right; the outcome is the share that is right at the end.
    """

    team = SOLVERS
    agents = SOLVERS.names
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


ENVIRONMENTS: Mapping[str, type[Env]] = {
    "chain": ReasonerActorEnv,
    "rounds": TwoRoundEnv,
    "retry": RetryEnv,
    "pair": SolverPairEnv,
    "debate": DebateEnv,
}
"""task of `mafrt bench learn` -> its environment"""
