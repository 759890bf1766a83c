"""The record of a run (`run.json`), made from its parts, and the check of a resumed run against it."""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mafrt.config.team import Team
from mafrt.config.train_config import TrainConfig
from mafrt.core.errors import ConfigError
from mafrt.core.shipped import TEACHING_BASE, base_folder, shipped
from mafrt.environment.base import Env
from mafrt.environment.registry import ENVIRONMENTS
from mafrt.storage.load_path import LoadSource
from mafrt.storage.run_record import (
    BaseRecord,
    EnvironmentRecord,
    FileRecord,
    RunRecord,
    as_json,
    base_hashes,
    changes,
    file_record,
    load_record,
)

if TYPE_CHECKING:
    from mafrt.models.several_bases import Bases
    from mafrt.models.shared_base import SharedBase

FILE_SETTINGS = (
    "dataset_path",
    "eval_dataset_path",
    "reward",
    "routes",
    "data_root",
    "task_metrics",
    "tasks_path",
    "eval_tasks_path",
    "records_path",
    "eval_records_path",
    "coach_rubric",
    "coach_adapter",
    "teacher_path",
    "deepspeed",
)
"""Settings that name files or folders, some of them several. Team and base have records of their own."""


TRAINING_DATA = ("dataset_path", "data_root", "tasks_path")
"""Those of them that hold the tasks of an environment."""


@dataclass(frozen=True)
class Provenance:
    """How a run was started, and the run or the adapters that it goes on from."""

    resume: LoadSource | None = None
    """the resolved `--load_path`: a checkpoint to resume, or initial adapters"""
    accept_changes: bool = False
    """go on although the environment, team, data, rubric or base of `resume` changed since"""
    args: Mapping[str, Any] | None = None
    """content of `args.yaml`; None: the config"""
    command: str | None = None
    """the script that starts the run, for `run.json`; None from Python"""

    def settings(self, config: TrainConfig) -> dict[str, Any]:
        """The settings to record, by flat name."""
        return config.flat() if self.args is None else dict(self.args)


FROM_PYTHON = Provenance()


def describe_run(
    team: Team,
    args: Mapping[str, Any],
    *,
    command: str | None = None,
    env: Env | None = None,
    eval_env: Env | None = None,
    base: Bases | None = None,
) -> RunRecord:
    """The record of a run as it stands: everything that its settings only point at.

    Args:
        team: its agents.
        args: its settings by flat name.
        command: the script that starts it; None from Python.
        env, eval_env: the environments; None for runs that learn from records.
        base: the loaded base; None before it is loaded.
    """
    return RunRecord(
        team=team.to_list(),
        command=command,
        environment=None if env is None else environment_record(env),
        eval_environment=None if eval_env is None or eval_env is env else environment_record(eval_env),
        files=_files(args, env),
        base=None if base is None else _base_record(base.main, str(args.get("model_name_or_path") or base.name)),
        bases={} if base is None else _others(base, team),
        sandbox=args.get("sandbox") if env is not None and hasattr(_plain(env), "sandbox") else None,
        machine={} if base is None else _machine(base.main),
    )


def refuse_changes(loaded: LoadSource | None, now: RunRecord, *, accept: bool) -> RunRecord | None:
    """The record of the run that `loaded` goes on with; None if it belongs to none.

    Raises:
        ConfigError: something that results depend on has changed since, and `accept` is off; names all of it.
        CheckpointError: the run has no record, or a damaged one.
    """
    if loaded is None or loaded.run is None or not loaded.resumes:
        return None
    then = load_record(loaded.run)
    differing = changes(then, now)
    if differing and not accept:
        raise ConfigError(
            f"Since the run {loaded.run} was started, this has changed: {'; '.join(differing)}. Change it back, or go "
            "on all the same with --accept_changes (`Provenance(resume, accept_changes=True)` from Python)."
        )
    return then


def environment_record(env: Env) -> EnvironmentRecord:
    """Path, arguments and source of an environment, as far as it can be built again from them."""
    env = _plain(env)
    kind = type(env)
    arguments = _arguments(env)
    if kind.__module__.startswith("mafrt."):
        shipped_as = {path: name for name in ENVIRONMENTS.names() if (path := ENVIRONMENTS.path_of(name))}
        path = f"{kind.__module__}:{kind.__qualname__}"
        package = f"{kind.__module__.rpartition('.')[0]}:{kind.__qualname__}"
        return EnvironmentRecord(shipped_as.get(path) or shipped_as.get(package) or path, arguments)
    try:
        file = inspect.getsourcefile(kind)
    except (TypeError, OSError):  # a class typed into an interpreter
        file = None
    source = None if file is None else file_record(file)
    module = str(Path(source.path)) if kind.__module__ == "__main__" and source is not None else kind.__module__
    importable = "<locals>" not in kind.__qualname__ and (kind.__module__ != "__main__" or source is not None)
    return EnvironmentRecord(
        f"{module}:{kind.__qualname__}",
        arguments if importable else None,
        None if source is None else source.path,
        None if source is None else source.sha256,
    )


def training_data(env: Env, args: Mapping[str, Any]) -> str:
    """16 hex digits that change with the tasks that are trained on: their texts, else all that they hold, else their
    number and their files. Of a mixture, with its parts."""
    plain = _plain(env)
    tasks = getattr(plain, "tasks", None) or getattr(plain, "questions", None) or ()
    texts: Any = [getattr(task, "problem", None) or getattr(task, "question", None) for task in tasks]
    parts = getattr(plain, "envs", None)
    if isinstance(parts, dict) and all(isinstance(part, Env) for part in parts.values()):
        texts = {name: training_data(part, args) for name, part in parts.items()}
    elif not texts or not all(isinstance(text, str) for text in texts):
        texts = _held(tasks)
    if texts is None:
        named = {name: args.get(name) for name in TRAINING_DATA}
        hashes = {name: file.sha256 for name, file in {**_own_files(plain), **_files(named, None)}.items()}
        texts = [hashes or None, *(value for name, value in named.items() if name not in hashes)]
    described = json.dumps([type(plain).__qualname__, env.num_tasks, texts], default=str)
    return hashlib.sha256(described.encode()).hexdigest()[:16]


def _held(tasks: Any) -> str | None:
    """Tasks of a user's own environment as JSON; None if they are no JSON."""
    if not tasks or not isinstance(tasks, (list, tuple)):
        return None
    try:
        return json.dumps([asdict(task) if is_dataclass(task) else task for task in tasks], sort_keys=True)  # type: ignore[arg-type]
    except (TypeError, ValueError, RecursionError):
        return None


def _own_files(env: Any) -> dict[str, FileRecord]:
    """The arguments of a user's environment that name files."""
    paths = {f"own {n}": Path(v) for n, v in (_arguments(env) or {}).items() if isinstance(v, str) and len(v) < 1000}
    return {name: record for name, path in paths.items() if path.is_file() and (record := file_record(path))}


def _plain(env: Env) -> Any:
    """The user's own object, without wrappers."""
    return getattr(env, "unwrapped", env)


def _arguments(env: Any) -> dict[str, Any] | None:
    positional, named = getattr(env, "_init_args", ((), {}))
    if positional:
        try:
            signature = inspect.signature(type(env))
            bound = dict(signature.bind(*positional, **named).arguments)
            # `**options` of the constructor are recorded flat, as they were given.
            keywords = next((p.name for p in signature.parameters.values() if p.kind == p.VAR_KEYWORD), None)
            named = {**(bound.pop(keywords, {}) if keywords is not None else {}), **bound}
        except (TypeError, ValueError):
            return None
    return as_json(named)


def _files(args: Mapping[str, Any], env: Env | None) -> dict[str, FileRecord]:
    files = {}
    for name in FILE_SETTINGS:
        value = args.get(name)
        several = isinstance(value, (list, tuple))
        paths: list[Any] = list(value) if isinstance(value, (list, tuple)) else [value]
        for number, path in enumerate(paths):
            if isinstance(path, str) and ".py:" in path:  # a function in a file
                path = path.rpartition(":")[0]
            if isinstance(path, str) and (record := file_record(shipped(path))) is not None:
                files[f"{name}[{number}]" if several else name] = record
    program = args.get("program")
    if isinstance(program, str) and (record := file_record(program.partition(":")[0])) is not None:
        files["program"] = record
    rubric = None if env is None else getattr(_plain(env), "rubric", None)
    if isinstance(rubric, str) and (record := file_record(rubric)) is not None:
        files["rubric"] = record
    return files


def _others(base: Bases, team: Team) -> dict[str, BaseRecord]:
    """Records of the bases that agents name for themselves."""
    sitting = {agent.model: base.of_agent(agent.name) for agent in team.agents if agent.model is not None}
    return {model: _base_record(part, model) for model, part in sitting.items()}


def _base_record(base: SharedBase, name: str) -> BaseRecord:
    folder = base_folder(base.name) or Path(base.name).expanduser()
    local = folder.is_dir()
    config, header = base_hashes(folder) if local else (None, None)
    is_local = local and folder != TEACHING_BASE
    return BaseRecord(name, base.fingerprint(), config, header, str(folder.resolve()) if is_local else None)


def _machine(base: SharedBase) -> dict[str, Any]:
    import torch

    machine = {
        "dtype": str(base.model.dtype).removeprefix("torch."),
        "device": base.device.type,
        "threads": torch.get_num_threads(),
    }
    return {**machine, "kernels": base.compute.kernels(base.model.dtype)} if base.device.type == "cpu" else machine
