"""The DSBench environment and its settings, from which flags and their help follow."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from mafrt.config.team import Team
from mafrt.core.errors import ConfigError, DataError
from mafrt.core.text import counted
from mafrt.envs.construction import TEST, Construction, evaluated_split, part_of
from mafrt.envs.dsbench.builtin import builtin_tasks
from mafrt.envs.dsbench.env import DSBenchEnv
from mafrt.envs.dsbench.records import Loaded, find_records, load_records
from mafrt.envs.dsbench.tasks import TabularTask


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


NAME = "dsbench"
HELD_OUT_SHARE = 0.1


def build(settings: Mapping[str, Any], team: Team | None = None) -> Construction:
    """Tasks, sandbox and environments.

    Args:
        settings: the fields of `DsbenchSettings`, and `sandbox`, by name. All are JSON values.
        team: not looked at, since the three agents are always the same.

    Raises:
        DataError: no task can be used.
        ConfigError: a setting does not fit.
        SandboxError: there is no such sandbox here.
    """
    settings = {**asdict(DsbenchSettings()), "sandbox": "bwrap", **settings}
    tasks, held_out, notes = read_tasks(settings)
    if both := sorted({task.id for task in tasks} & {task.id for task in held_out}):
        notes.append(
            f"Careful: {', '.join(both)} stand in both sets, so the evaluation shows what was learnt by heart."
        )
    eval_env = build_env(settings, held_out) if held_out else None
    if eval_env is not None and settings["eval_dataset_path"] is None:
        eval_env.split = evaluated_split(settings)
    return Construction(build_env(settings, tasks), eval_env, tuple(notes))


def build_env(settings: Mapping[str, Any], tasks: Sequence[TabularTask]) -> DSBenchEnv:
    """The environment that the settings describe, on these tasks."""
    return DSBenchEnv(
        tasks=tasks,
        turns=settings["agent_turns"],
        style=settings["style"],
        lab=settings["lab"] or settings["style"] == "brief",
        sandbox=settings["sandbox"],
        timeout_s=settings["program_timeout"],
        memory_mib=settings["program_memory"],
        workspace_mib=settings["workspace_mib"],
    )


def read_tasks(settings: Mapping[str, Any]) -> tuple[Sequence[TabularTask], Sequence[TabularTask], list[str]]:
    """Training tasks, held-out tasks, and lines about excluded ones. Raises DataError if nothing is left."""
    if own_records(settings) is None:
        return builtin_tasks("train"), builtin_tasks("eval" if evaluated_split(settings) == TEST else "validation"), []
    sets: dict[str, Sequence[TabularTask]] = {}
    notes = []
    for split, (path, loaded) in load_all(settings).items():
        good, problems = fitting(loaded, settings["workspace_mib"])
        notes += [f"Skipped: {problem}" for problem in problems]
        if not good:
            raise DataError(
                f"none of the tasks of {path} can be used, the first one: {problems[0]} (--check names all)"
            )
        sets[split] = good
    if "eval" in sets:
        return sets["train"], sets["eval"], notes
    count = max(1, round(len(sets["train"]) * HELD_OUT_SHARE)) if len(sets["train"]) > 4 else 0
    tasks, held_out = sets["train"][: len(sets["train"]) - count], sets["train"][len(sets["train"]) - count :]
    held_out = part_of(held_out, evaluated_split(settings))
    notes.append(
        f"Of {counted(len(sets['train']), 'tasks')}, the last {count} are held out."
        if count
        else "There are too few tasks to hold any out: they serve for both."
    )
    return tasks, held_out, notes


def own_records(settings: Mapping[str, Any]) -> dict[str, Path] | None:
    """The user's files of records, `train` and perhaps `eval`; None: the built-in tasks."""
    root, path, eval_path = (settings[name] for name in ("data_root", "dataset_path", "eval_dataset_path"))
    if root is None and path is None:
        if eval_path is not None:
            raise ConfigError("eval_dataset_path is given, but nothing to train on; give data_root or dataset_path.")
        return None
    if root is not None and not Path(root).expanduser().is_dir():
        raise ConfigError(f"data_root {root} is not a folder; give the one that the records' paths are relative to.")
    files = {"train": Path(path).expanduser()} if path is not None else find_records(Path(root).expanduser())
    if "train" not in files:
        files = {"train": files["eval"]}
    if eval_path is not None:
        files["eval"] = Path(eval_path).expanduser()
    return files


def load_all(
    settings: Mapping[str, Any], progress: Callable[[str], None] = lambda name: None
) -> dict[str, tuple[Path, Loaded]]:
    """Every file of records, read and validated; `progress` is told each task's name."""
    metrics = settings["task_metrics"]
    loaded = {}
    for split, path in (own_records(settings) or {}).items():
        root = Path(settings["data_root"] or path.parent).expanduser()
        loaded[split] = path, load_records(path, root, Path(metrics).expanduser() if metrics else None, progress)
    return loaded


def fitting(loaded: Loaded, workspace_mib: int) -> tuple[list[TabularTask], list[str]]:
    """The tasks whose tables fit into the workspace, and the faults of the others."""
    good, problems = [], [str(problem) for problem in loaded.problems]
    for task in loaded.tasks:
        # Tables are there from the start, and features made from them are about as large again.
        if task.size_mib * 2 > workspace_mib:
            problems.append(f"{task.id}: has {task.size_mib:.0f} MiB of tables; raise --workspace_mib above twice that")
        else:
            good.append(task)
    return good, problems
