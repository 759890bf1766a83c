"""Train a Data Engineer, a Modeler and an Analyst on tabular tasks: built-in ones, or DSBench as it lies on disk."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mafrt.core.atomic_files import write_atomic
from mafrt.core.errors import ConfigError, DataError
from mafrt.scripts.cli.command import Command, Settings, run_main
from mafrt.scripts.cli.loading import load_team, team_for
from mafrt.scripts.cli.settings import TRAIN, DsbenchSettings, ModelSettings, PlaceSettings, ScaleSettings
from mafrt.scripts.cli.stage import Stage
from mafrt.scripts.cli.train import train

if TYPE_CHECKING:
    from mafrt.envs.dsbench import DSBenchEnv, Loaded, Task

HELD_OUT_SHARE = 0.1

COMMAND = Command(
    "train_dsbench",
    "Train three agents to solve tabular modelling tasks by programs that run in one workspace.",
    (DsbenchSettings, ModelSettings, PlaceSettings, ScaleSettings, *TRAIN),
    defaults={"profile_path": "profiles/dsbench.json", "stratify": "data_type", "max_new_tokens": 4096},
    epilog="Without --data_root or --dataset_path, twelve built-in tasks are made: 8 to train on, 4 held out.",
)


def prepare(settings: Settings) -> Stage:
    """Tasks, sandbox and team, checked before the model is loaded."""
    team = load_team(settings)
    tasks, held_out, notes = read_tasks(settings.values)
    if both := sorted({task.id for task in tasks} & {task.id for task in held_out}):
        notes.append(
            f"Careful: {', '.join(both)} stand in both sets, so the evaluation shows what was learnt by heart."
        )
    env = dsbench_env(settings.values, tasks)
    eval_env = dsbench_env(settings.values, held_out) if held_out else None
    return Stage(env, eval_env, team_for(env, team, settings["n_agents"]), "dsbench", tuple(notes))


def dsbench_env(settings: Mapping[str, Any], tasks: Sequence[Task]) -> DSBenchEnv:
    """The environment that the settings describe, on these tasks."""
    from mafrt.envs.dsbench import DSBenchEnv

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


def read_tasks(settings: Mapping[str, Any]) -> tuple[Sequence[Task], Sequence[Task], list[str]]:
    """Tasks to train on, held-out ones, and lines about what was left out. Raises DataError if nothing is left."""
    if own_records(settings) is None:
        from mafrt.envs.dsbench.builtin import builtin_tasks

        return builtin_tasks("train"), builtin_tasks("eval"), []
    sets: dict[str, Sequence[Task]] = {}
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
    notes.append(
        f"Of {len(sets['train'])} tasks, the last {count} are held out."
        if count
        else "There are too few tasks to hold any out: they serve for both."
    )
    return tasks, held_out, notes


def own_records(settings: Mapping[str, Any]) -> dict[str, Path] | None:
    """The user's files of records, `train` and perhaps `eval`; None: the built-in tasks."""
    from mafrt.envs.dsbench import find_records

    root, path, eval_path = (settings[name] for name in ("data_root", "dataset_path", "eval_dataset_path"))
    if root is None and path is None:
        if eval_path is not None:
            raise ConfigError("eval_dataset_path is given, but nothing to train on; give data_root or dataset_path.")
        return None
    if root is not None and not Path(root).expanduser().is_dir():
        raise ConfigError(f"data_root {root} is not a folder; give the one that the records' paths are relative to.")
    found = {"train": Path(path).expanduser()} if path is not None else find_records(Path(root).expanduser())
    if "train" not in found:
        found = {"train": found["eval"]}
    if eval_path is not None:
        found["eval"] = Path(eval_path).expanduser()
    return found


def load_all(settings: Mapping[str, Any], progress: bool = False) -> dict[str, tuple[Path, Loaded]]:
    """Every file of records, read and validated."""
    from mafrt.envs.dsbench import load_records

    metrics = settings["task_metrics"]
    loaded = {}
    for split, path in (own_records(settings) or {}).items():
        root = Path(settings["data_root"] or path.parent).expanduser()
        told = (lambda name: print(f"reading {name}", file=sys.stderr)) if progress else (lambda name: None)
        loaded[split] = path, load_records(path, root, Path(metrics).expanduser() if metrics else None, told)
    return loaded


def fitting(loaded: Loaded, workspace_mib: int) -> tuple[list[Task], list[str]]:
    """The tasks whose tables fit into the workspace, and what is wrong with the others."""
    good, problems = [], [str(problem) for problem in loaded.problems]
    for task in loaded.tasks:
        # Tables are there from the start, and features made from them are about as large again.
        if task.size_mib * 2 > workspace_mib:
            problems.append(f"{task.id}: has {task.size_mib:.0f} MiB of tables; raise --workspace_mib above twice that")
        else:
            good.append(task)
    return good, problems


def check(settings: Settings) -> int:
    """Read and validate everything, and say what is there; 0 unless nothing can be used."""
    values = settings.values
    if own_records(values) is None:
        from mafrt.envs.dsbench.builtin import builtin_tasks
        from mafrt.envs.dsbench.records import Loaded

        sets = {split: (Path("built-in"), Loaded(builtin_tasks(split), ())) for split in ("train", "eval")}
    else:
        sets = load_all(values, progress=sys.stderr.isatty())
    usable = 0
    for split, (path, loaded) in sets.items():
        good, problems = fitting(loaded, values["workspace_mib"])
        usable += len(good)
        print(f"{split}: {path}: {len(good)} of {len(good) + len(problems)} tasks can be used")
        for task in good:
            answers = task.answers
            against = f"baseline {answers.baseline:.4g}"
            against += "" if answers.reference is None else f", reference {answers.reference:.4g}"
            targets = ", ".join(answers.targets[:3]) + (" ..." if len(answers.targets) > 3 else "")
            print(
                f"  {task.id}: {task.data_type or 'no data_type'}, {answers.metric.name} of {targets}, "
                f"{len(answers.ids)} test rows, {task.size_mib:.1f} MiB, {against}"
            )
            left_out = [name for index, name in enumerate(answers.targets) if index not in answers.scored]
            if left_out:
                print(f"    not scored, constant in the answers: {', '.join(left_out)}")
        for problem in problems:
            print(f"  PROBLEM {problem}")
        counted = {"data_type": [t.data_type or "none" for t in good], "metric": [t.answers.metric.name for t in good]}
        for what, names in counted.items() if good else ():
            print(f"  {what}: " + ", ".join(f"{name} {count}" for name, count in sorted(Counter(names).items())))
    return 0 if usable else 2


def write_programs(settings: Settings) -> int:
    """Play demonstrations, write them as JSON lines, and say what to do with them."""
    from mafrt.envs.dsbench.demonstrations import demonstrations
    from mafrt.storage.run_dir import set_aside

    path = Path(settings["demonstrations"]).expanduser()
    episodes, seed = settings["demonstration_episodes"], settings["seed"]
    if episodes < 1:
        raise ConfigError(f"demonstration_episodes is {episodes}; choose at least 1.")
    if path.is_dir():
        raise ConfigError(f"demonstrations {path} is a folder; name a file.")
    tasks, _, _ = read_tasks(settings.values)
    records = demonstrations(tasks, episodes, seed, settings["sandbox"], settings["agent_turns"])
    path.parent.mkdir(parents=True, exist_ok=True)
    if aside := set_aside(path):
        print(f"The earlier file is now {aside}.")
    write_atomic(path, "".join(json.dumps(record) + "\n" for record in records).encode())
    print(f"{len(records)} records in {path}; imitate them with train_sft --records_path {path}")
    return 0


def run(argv: Sequence[str]) -> int:
    settings = COMMAND.read(argv)
    if settings["check"]:
        return check(settings)
    if settings["demonstrations"] is not None:
        return write_programs(settings)
    return train(COMMAND, argv, prepare)


def main(argv: Sequence[str] | None = None) -> int:
    return run_main(run, argv)


if __name__ == "__main__":
    sys.exit(main())
