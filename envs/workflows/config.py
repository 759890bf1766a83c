"""Settings of workflows, for every task source; flags and their help follow from them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class WorkflowSettings:
    """Team workflow."""

    problem_field: str | None = None
    """field of a record that holds the problem, such as a.b for nested ones; default: found by its usual names"""
    answer_field: str | None = None
    """field of a record that holds the answer, such as reward_model.ground_truth; default: found by its usual names"""
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
    routes: str | None = None
    """router: YAML file of the agents' successors, by their words"""
