"""Settings of the DSBench environment; flags and their help follow from them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

FIXED_FLOW = (
    "every stage (data_engineer, modeler, analyst) works on the files that the stage before it left in the workspace, "
    "so the order of turns is fixed; leave it out, or take other tasks, such as math or code, for another workflow."
)
REFUSED = dict.fromkeys(("workflow", "horizon", "sees", "routes", "judge", "tools", "tool_turns"), FIXED_FLOW)
"""Settings of workflows, which these tasks cannot have, with the reason."""


@dataclass(frozen=True)
class DsbenchSettings:
    """Tasks and team workflow."""

    data_root: str | None = None
    """folder that the records' paths are relative to; default: the built-in tasks"""
    dataset_path: str | None = None
    """JSON or JSONL of DSBench records; default: found in data_root, else the built-in tasks"""
    eval_dataset_path: str | None = None
    """held-out records; default: found in data_root, else the last tenth of your own tasks"""
    task_metrics: str | None = None
    """JSON of task -> metric, target and id column; default: dsbench_task_metrics.json beside the records"""
    agent_turns: tuple[int, ...] = (4,)
    """turns that each agent has: one number, or one for each of data_engineer, modeler and analyst"""
    style: Literal["full", "brief"] = "full"
    """prompt style: a page, or a few lines and the helper module lab, for very small models"""
    lab: bool = False
    """put the helper module lab into the workspace; the brief style always does"""
    program_timeout: float = 60.0
    """seconds that a program may take"""
    program_memory: int = 2048
    """MiB of memory that it may take"""
    workspace_mib: int = 256
    """MiB of all files of an episode; tasks with larger tables are left out"""
    check: bool = False
    """read and validate all records, name each problem, and leave"""
    demonstrations: str | None = None
    """write good and careless programs in the brief style to this JSONL, for train_sft, and leave"""
    demonstration_episodes: int = 200
    """episodes that they come from"""
