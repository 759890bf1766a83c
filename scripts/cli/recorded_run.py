"""A run on disk as the scripts see it: its settings, and its environment and team built again from its record."""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mafrt.config import permission
from mafrt.config.resolve import add_source_folder
from mafrt.core.errors import CheckpointError, ConfigError
from mafrt.core.shipped import base_folder, shipped
from mafrt.environment.registry import held_out_of, make_env
from mafrt.scripts.cli.command_names import COMMANDS
from mafrt.storage.args_file import ARGS, read_args
from mafrt.storage.run_record import RECORD, EnvironmentRecord, RunRecord, load_record

if TYPE_CHECKING:
    from mafrt.config.team import Team
    from mafrt.environment.base import Env
    from mafrt.storage.load_path import LoadSource


@dataclass(frozen=True)
class PreparedRun:
    """Parts of a run that are built and checked before a model is loaded."""

    env: Env
    eval_env: Env | None
    team: Team
    name: str
    """names the default run directory"""
    notes: tuple[str, ...] = ()
    """lines for the person at the terminal"""


BUILD = frozenset({"train", "train_math", "train_code", "train_dsbench", "train_search", "train_tasks"})
"""Commands whose `prepare(settings)` builds environment and team."""
TRAINING = frozenset(name for name in COMMANDS if name.startswith("train"))
"""Commands that begin runs and go on with them."""
OF_PLAY = frozenset({"trust_remote_code", "coach_base_url", "vllm_servers"})
"""Settings that no environment is built from."""


def run_of(loaded: LoadSource | None) -> Path | None:
    """The run directory that `--load_path` belongs to, if it has a record; None for adapters and lone checkpoints.

    Raises:
        CheckpointError: it is a run of an earlier version of mafrt, without a record, or has lost its settings.
    """
    run = None if loaded is None else loaded.run
    if run is None:
        return None
    if not (run / ARGS).is_file():
        if (run / RECORD).is_file() and load_record(run).command is not None:  # the defaults would be another run
            raise CheckpointError(f"{run} has no {ARGS}, which held its settings; take the run from a copy.")
        return None
    if not (run / RECORD).is_file():
        load_record(run)  # which says that this is a run of an earlier version
    return run


def recorded_settings(run: Path, record: RunRecord) -> dict[str, Any]:
    """The settings in the run's args.yaml, with files where the run found them if they are not at hand."""
    return with_recorded_files(read_args(run / ARGS), record)


def with_recorded_files(stored: Mapping[str, Any], record: RunRecord) -> dict[str, Any]:
    """`stored`, with the recorded absolute path for each file that its setting does not lead to from here."""
    recorded = dict(stored)
    for key, file in record.files.items():
        name, _, number = key.partition("[")
        value = recorded.get(name)
        if number and isinstance(value, list):
            index = int(number.rstrip("]"))
            # The recorded absolute path is taken only where the given one leads nowhere, so that a moved data set can
            # be named anew.
            if index < len(value) and not shipped(str(value[index])).exists():
                recorded[name] = [*value[:index], file.path, *value[index + 1 :]]
        elif isinstance(value, str) and ".py:" in value:  # a function in a file
            source, _, function = value.rpartition(":")
            recorded[name] = value if Path(source).expanduser().exists() else f"{file.path}:{function}"
        elif isinstance(value, str) and not shipped(value).exists():
            recorded[name] = file.path
    if record.base is not None:
        model = recorded.setdefault("model_name_or_path", record.base.name)  # a run from Python has no such setting
        here = base_folder(str(model)) is not None or Path(str(model)).expanduser().exists()
        if record.base.path is not None and not here:
            recorded["model_name_or_path"] = record.base.path
    return recorded


def rebuild(run: Path, changed: Mapping[str, Any] | None = None, split: str | None = None) -> PreparedRun:
    """Environment and team of a run, from its record.

    Args:
        run: the run directory.
        changed: settings that go before the run's own.
        split: of the environment of evaluations, `validation` or `test`; None: the run's own.

    Raises:
        ConfigError: the run learnt from records, or was made from Python with arguments that cannot be recorded.
        CheckpointError: it has no record.
        DataError, EnvError: its data or its environment is not there any more.
    """
    record = load_record(run)
    # An environment that was made from Python has no settings here; only where it plays may change.
    known = {"sandbox", "env_python", "n_agents"}
    if record.command in BUILD:
        command: Any = importlib.import_module(f"mafrt.scripts.{record.command}")
        known |= command.COMMAND.settings().keys()
    if foreign := sorted((changed or {}).keys() - known):
        name = record.command or (record.environment.path if record.environment else "train_dpo")
        raise ConfigError(
            f"--{foreign[0].removeprefix('eval_')} does not go with the run {run}, whose environment ({name}) has no "
            "such setting; leave it out, or name an environment by --env."
        )
    if record.command in BUILD:
        below = {name: value for name, value in recorded_settings(run, record).items() if name not in OF_PLAY}
        permission.typed((changed or {}).values())
        below |= {**(changed or {}), **({} if split is None else {"eval_split": split})}
        prepared: PreparedRun = command.prepare(command.COMMAND.read([], below=below, record=record))
        return prepared
    if record.environment is None:
        raise ConfigError(f"The run {run} learnt from records, so it has no environment; name one by --env.")
    env = build_environment(record.environment, run)
    eval_env = None if record.eval_environment is None else build_environment(record.eval_environment, run)
    if split is not None:
        eval_env = _of_split(record.eval_environment or record.environment, eval_env or env, split) or eval_env
    name = re.sub(r"[^A-Za-z0-9_.-]+", "_", record.environment.path.rpartition(":")[2])
    return PreparedRun(env, eval_env, record.agents(), name)


def _of_split(record: EnvironmentRecord, env: Env, split: str) -> Env | None:
    """`env`, which `record` describes, on another split; None if it has none. What the user set otherwise stays."""
    given, other = dict(record.arguments or {}), held_out_of(env, split)
    known = [env.validation, env.held_out]
    own_values = {name: value for name, value in given.items() if not any(k.get(name) == value for k in known)}
    return make_env(record.path, **{**given, **other, **own_values}) if other else None


def build_environment(record: EnvironmentRecord, run: Path) -> Env:
    """The environment that a record describes.

    Raises:
        ConfigError: its arguments could not be recorded.
        EnvError: it cannot be found or built.
    """
    # Objects that were passed from Python cannot be written down.
    if record.arguments is None:
        raise ConfigError(
            f"The environment of the run {run} is {record.path}, made from Python with arguments that run.json cannot "
            "hold; evaluate it from Python, or name an environment by --env."
        )
    permission.refuse_demands({"environment": record.path, **record.arguments}, f"the run {run}")
    add_source_folder(record.path, record.file)
    return make_env(record.path, **record.arguments)


def flags_needed(run: Path) -> list[str]:
    """Flags by which the user permits again what a run's own settings ask for."""
    args = read_args(run / ARGS) if (run / ARGS).is_file() else {}
    code = ["--trust_remote_code"] if args.get("trust_remote_code") else []
    return [*code, *(["--trust_run"] if next(permission.demands(args), None) is not None else [])]


def command_of(load_path: Path) -> str | None:
    """The script that a run, or one of its checkpoints, is gone on with by.

    None for a run from Python whose environment cannot be built.
    """
    run = load_path.parent if load_path.name.startswith("step_") else load_path
    # The adapters of a run, which lie in it too, begin another run, of any command.
    run = run.parent if run.name == "checkpoints" else run
    try:
        record = load_record(run)
    # Without a readable record there is nothing to decide by, and the command that was typed goes on.
    except CheckpointError:
        return None
    if record.command is not None:
        # A record names a command, not any module of the scripts.
        return record.command if record.command in TRAINING else None
    return "train" if record.environment is not None and record.environment.arguments is not None else None
