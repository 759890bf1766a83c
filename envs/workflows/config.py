"""Settings of workflows, for every task source: the flags, and the keyword arguments of the environments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict, cast


@dataclass(frozen=True)
class FieldSettings:
    """Fields of the records."""

    problem_field: str | None = None
    """field of a record that holds the problem, such as a.b for nested ones; default: found by its usual names"""
    answer_field: str | None = None
    """field of a record that holds the answer, such as reward_model.ground_truth; default: found by its usual names"""


@dataclass(frozen=True)
class WorkflowSettings:
    """Team workflow."""

    train_limit: int | None = None
    """train on a random subset of so many tasks, drawn with the seed; default: all"""
    workflow: str = "chain"
    """order of turns and observations: a name (docs/workflows.md), or package.module:Class"""
    horizon: int = 1
    """rounds that the team has for a problem; each agent speaks once in a round"""
    sees: str | None = None
    """view of the transcript: all, previous, predecessors, own, own+predecessors, problem, or module:function"""
    tool_turns: int | None = None
    """turns of an agent that call tools: mathchat 2 by default, tools 4"""
    tools: tuple[str, ...] = ()
    """tools: calculator, python, files, files:FOLDER, search:FILE, search:URL, mcp:FILE; default: calculator"""
    judge: bool | None = None
    """debate: the last agent takes no part, and decides; default: off, the majority decides"""
    verdict: str | None = None
    """pro_con: jury, rules or coach decide which side wins; default: the jury if there is one, else rules"""
    sides: str | None = None
    """pro_con: the first debater's side is PRO (fixed), CON (swapped), or by_task; default: by_task"""
    routes: str | None = None
    """router: YAML file of the agents' successors, by their words"""


class WorkflowOptions(TypedDict, total=False):
    """Keyword arguments of every environment with tasks: how the team works on them. All may be left out."""

    workflow: str
    """name, or `package.module:Class`"""
    horizon: int
    """rounds that the team has for a problem"""
    judge_lines: bool
    """whether a failed round is followed by the line `judge: The answer is incorrect.`"""
    rewards: str
    """rewards of `step` besides the outcome: `outcome_only`, `last` or `each`"""
    sandbox: str
    """where programs run: `bwrap`, `fusion:URL` or `degraded`"""
    sees: str | None
    """view of the transcript of agents that have none of their own (`mafrt.envs.workflows.state`)"""
    tool_turns: int | None
    """turns of an agent that call tools"""
    tools: Sequence[str] | None
    """tools of the workflow `tools`"""
    judge: bool | None
    """debate: the last agent takes no part, and decides"""
    verdict: str | None
    """pro_con: `jury`, `rules` or `coach` decide which side wins"""
    sides: str | None
    """pro_con: `by_task`, `fixed` or `swapped`"""
    routes: str | None
    """router: YAML file of the agents' successors"""


def workflow_options(settings: Mapping[str, Any]) -> WorkflowOptions:
    """The entries of `settings` that are options of a workflow."""
    names = WorkflowOptions.__annotations__
    return cast(WorkflowOptions, {name: settings[name] for name in names if name in settings})
