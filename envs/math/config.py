"""Settings of the math environment; flags and their help follow from them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class MathSettings:
    """Problems."""

    dataset_path: str | None = None
    """JSON, JSONL, Parquet, a Hugging Face data set id, or stories:train; default: the shipped word problems"""
    eval_dataset_path: str | None = None
    """held-out problems; default: the shipped ones, or the last tenth (at most 200) of your own"""


@dataclass(frozen=True)
class WorkflowSettings:
    """Team workflow."""

    problem_field: str | None = None
    """field of a record that holds the problem; default: found by its usual names"""
    answer_field: str | None = None
    """field of a record that holds the answer; default: found by its usual names"""
    workflow: str = "chain"
    """order of turns and observations: a name (docs/workflows.md), or package.module:Class"""
    horizon: int = 1
    """rounds that the team has for a problem; each agent speaks once in a round"""
    sees: str | None = None
    """view of the transcript: all, previous, predecessors, own, own+predecessors, problem, or module:function"""
    tool_turns: int | None = None
    """mathchat: turns of the Code Executor, whose program runs after each; default: 2"""
    judge: bool | None = None
    """debate: the last agent takes no part, and decides; default: off, the majority decides"""
    routes: str | None = None
    """router: YAML file of the agents' successors, by their words"""
