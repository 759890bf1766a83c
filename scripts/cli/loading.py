"""Loading shared by the training and evaluation scripts: team, base, environments, shipped files."""

from __future__ import annotations

import difflib
import json
import logging
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mafrt.config import permission
from mafrt.config.team import Team
from mafrt.config.train_config import EngineConfig
from mafrt.core.errors import ConfigError, ModelError
from mafrt.core.gpus import unusable_gpu
from mafrt.core.hub import check_endpoint, reachable, stay_offline
from mafrt.core.reading import parse_json
from mafrt.core.shipped import FETCHED, SHIPPED, SHIPPED_BASES, base_folder, require_base, shipped
from mafrt.core.text import brief
from mafrt.core.threads import choose_threads
from mafrt.environment.registry import takes
from mafrt.environment.session import session_of
from mafrt.environment.workers import guarded, is_bounded
from mafrt.envs.workflows.task_env import TaskEnv
from mafrt.models import load_bases
from mafrt.models.precision import NO_FLOAT16, choose_dtype
from mafrt.scripts.cli.command import Settings
from mafrt.scripts.cli.processes import ProcessLayout, check_layout
from mafrt.scripts.cli.recorded_run import PreparedRun, recorded_settings, run_of
from mafrt.scripts.cli.settings import BaseSettings
from mafrt.storage import load_path
from mafrt.storage.run_record import RunRecord, load_record

if TYPE_CHECKING:
    from mafrt.environment.base import Env
    from mafrt.envs.construction import Construction
    from mafrt.models.several_bases import Bases
    from mafrt.storage.load_path import LoadSource

log = logging.getLogger("mafrt")


def load_team(settings: Settings, default: str | None = None) -> Team | None:
    """The team of `--profile_path`, of the recorded run, or of the file `default`; None if there is none of them.

    A recorded team stands in for a team file that has not changed or is gone; one that was edited is read again, so
    that `refuse_changes` names the difference.

    Raises:
        ConfigError: there is no such file, or `--n_agents` contradicts the team.
    """
    profile = settings["profile_path"] or default
    if settings.record is not None and "profile_path" not in settings.flags:
        team = settings.record.agents()
        permission.refuse_demands({"team": team.to_list()}, "the run's record")
        path = None if profile is None else shipped(profile)
        if path is None or not path.exists() or permission.run_of(path) is not None or Team.load(path) == team:
            return team
    if profile is None:
        return None
    path = shipped(profile)
    if not path.exists():
        names = ", ".join(sorted(f"profiles/{file.name}" for file in (SHIPPED / "profiles").glob("*.json")))
        raise ConfigError(f"There is no team file {path}; give the path of one, or one that ships: {names}.")
    team = Team.load(path)
    team.check_size(settings["n_agents"])
    if permission.run_of(path) is None:  # a file of the user's own
        permission.typed(agent.model for agent in team.agents)
    return team


def team_for(env: Env, team: Team | None, n_agents: int | None) -> Team:
    """`team`, checked against the environment's agents, or one agent with its own adapter for each of them."""
    if team is None:
        team = Team.of(env.agents)
        untrained = getattr(env, "untrained", ())
        team = Team(tuple(replace(agent, freeze=agent.name in untrained) for agent in team.agents))
        team.check_size(n_agents)
    elif set(team.names) != set(env.agents):
        raise ConfigError(
            f"The team file has the agents {', '.join(team.names)}, but {env.class_name} is played by "
            f"{', '.join(env.agents)}; use the same names."
        )
    _refuse_keys_of_workflows(env, team)
    return team


def _refuse_keys_of_workflows(env: Env, team: Team) -> None:
    """ConfigError for an agent's view or tools in one of our environments that has no workflow to use them."""
    parts = getattr(env, "envs", {"": env.unwrapped}).values()
    ours = [part for part in parts if type(part).__module__.startswith("mafrt.envs.")]
    if not ours or any(hasattr(part, "workflow") for part in parts):
        return
    for key in ("sees", "tools"):
        if with_key := [agent.name for agent in team.agents if getattr(agent, key) is not None]:
            raise ConfigError(
                f"Agent {with_key[0]!r} of the team file has the key {key!r}, which {ours[0].class_name} does not use; "
                "leave it out, or take an environment with workflows, such as math."
            )


def prepared_run(
    build: Callable[[Mapping[str, Any], Team | None], Construction], settings: Settings, team: Team | None, name: str
) -> PreparedRun:
    """The environments built from the settings, with their team."""
    built = build(settings.values, team)
    env = built.train_env
    return PreparedRun(env, built.eval_env, team_for(env, team, settings["n_agents"]), name, built.notes)


def guarded_run(run: PreparedRun, timeout_s: float | None) -> PreparedRun:
    """The run with environments that hold a user's code in worker processes, which end at the timeout."""
    env, eval_env = (None if env is None else guarded(session_of(env), timeout_s) for env in (run.env, run.eval_env))
    assert env is not None
    return replace(run, env=env, eval_env=eval_env)


def env_arguments(given: Sequence[str], where: str) -> dict[str, Any]:
    """`key=value` words, or one JSON object, as keyword arguments; values are JSON where they can be, else text."""
    arguments: dict[str, Any] = {}
    for item in given:
        if item.lstrip().startswith("{"):
            try:
                arguments.update(parse_json(item))
            except ValueError as error:
                raise ConfigError(f"--{where} holds {brief(item)}, which is not valid JSON: {error}.") from error
            continue
        key, equals, value = item.partition("=")
        if not equals or not key.isidentifier():
            raise ConfigError(f"--{where} holds {item!r}; expected key=value, as in size=4, or one JSON object.")
        try:
            arguments[key] = json.loads(value)
        except (ValueError, RecursionError):
            arguments[key] = value
    return arguments


def with_places(env: str, kwargs: dict[str, Any], settings: Settings) -> dict[str, Any]:
    """`kwargs` with the run's sandbox and interpreter, where the environment takes them; ConfigError if one is asked
    for in vain."""
    if takes(env, "sandbox"):
        kwargs = {"sandbox": settings["sandbox"], **kwargs}
    elif "sandbox" in settings.flags:
        raise ConfigError(f"Environment {env} runs no programs, so it has no use for a sandbox; leave --sandbox out.")
    if settings["env_python"] is not None:
        if not takes(env, "env_python"):
            raise ConfigError(
                f"Environment {env} is played by this interpreter; leave --env_python out, or name one of another "
                "package, such as verifiers:ID."
            )
        kwargs = {"env_python": settings["env_python"], **kwargs}
    return kwargs


def refuse_idle_limits(settings: Settings, env: Env) -> None:
    """ConfigError for a deadline or a sandbox that is typed and that `env`, being shipped and harmless, never uses."""
    if "env_timeout_s" in settings.flags and settings["env_timeout_s"] is not None and is_bounded(env):
        raise ConfigError(
            f"{env.class_name} needs no deadline, so that --env_timeout_s has no effect; it is for environments, "
            "reward functions and workflows of your own. Leave it out."
        )
    if "sandbox" in settings.flags and isinstance(env.unwrapped, TaskEnv) and not env.blocking:
        raise ConfigError("The workflow runs no programs, so it has no use for a sandbox; leave --sandbox out.")


def resolve(settings: Settings) -> LoadSource | None:
    """The target of `--load_path`."""
    if settings["load_path"] is None:
        return None
    return load_path.resolve(settings["load_path"])


def resolve_played(settings: Settings) -> LoadSource | None:
    """The same for a team that only plays: a run's `best` adapters belong to the run."""
    return None if settings["load_path"] is None else load_path.resolve_played(settings["load_path"])


def stored_args(loaded: LoadSource | None) -> tuple[dict[str, Any], RunRecord | None]:
    """Settings and record of the run that `loaded` belongs to; neither if it belongs to none.

    Raises:
        CheckpointError: the run was written by an earlier version of mafrt.
    """
    run = run_of(loaded)
    if run is None:
        return {}, None
    record = load_record(run)
    return recorded_settings(run, record), record


def load_base(settings: Settings, team: Team, placement: ProcessLayout | None = None) -> Bases:
    """The base that the settings name, or the bases of the team. Slow: call it when everything cheap is checked."""
    from mafrt.models.pretrained import check_device

    quiet()
    check_device(settings["device"])
    if settings["device"] is None and (why := unusable_gpu()) is not None:
        print(f"{why}. Until then the CPU computes.", flush=True)
    if placement is None and "engine" in settings.values:  # else checked before the processes joined
        check_layout(settings, settings.make(EngineConfig))
    machine = {} if settings.record is None else settings.record.machine
    recorded = machine.get("threads")
    choice = choose_threads(settings["threads"], recorded if isinstance(recorded, int) else None)
    print(f"Torch threads: {choice.threads} ({choice.reason}).", flush=True)
    from mafrt.models.compute import cpu_part

    if _on_cpu(settings) and (kernels := cpu_part("choice")) is not None:
        print(kernels.choose_kernels(machine.get("kernels"), machine.get("dtype")), flush=True)
    if (malloc := cpu_part("malloc")) is not None:
        malloc.keep_freed_memory()
    shards = placement is not None and placement.shards
    bases = load_bases.load_bases(
        recorded_models(team, settings),
        settings["model_name_or_path"],
        # Measured when the base is found to be one, and once for all bases.
        dtype=cache(lambda: _dtype(settings, machine, several=placement is not None and placement.processes.size > 1)),
        # A base to be sharded may be too large for one GPU: it goes there in parts.
        device="cpu" if shards else settings["device"],
        goes_to=placement.processes.device if placement is not None and shards else None,
        trust_remote_code=settings["trust_remote_code"],
        bits=settings.make(BaseSettings).bits,
    )
    if placement is not None:
        from mafrt.runners import build

        for base in bases.parts.values():
            build.spread(base, placement.processes, placement.zero, fsdp=placement.fsdp)
    return bases


def recorded_models(team: Team, settings: Settings) -> Team:
    """The team with the recorded path for each `model` that does not lead to its folder from here."""
    record = settings.record
    paths = {} if record is None else {name: base.path for name, base in record.bases.items() if base.path is not None}

    def found(model: str | None) -> str | None:
        return paths.get(model, model) if model and not Path(model).expanduser().exists() else model

    return Team(tuple(replace(agent, model=found(agent.model)) for agent in team.agents))


def models_of(settings: Settings, team: Team) -> dict[str, str]:
    """Adapter -> its base."""
    return load_bases.models_of(recorded_models(team, settings), settings["model_name_or_path"])


def check_models(settings: Settings, team: Team) -> dict[str, str]:
    """Adapter -> its base, checked as far as it can be before one is loaded. Raises ModelError and ConfigError."""
    settings.make(BaseSettings)
    models = models_of(settings, team)
    for model in dict.fromkeys(models.values()):
        work_offline_if_unreachable(model)
    load_bases.check_models(models, trust_remote_code=settings["trust_remote_code"])
    return models


def check_format(settings: Settings) -> None:
    """ConfigError for a number format of the base in which nothing can be learnt."""
    if settings["dtype"] == "float16":
        raise ConfigError(f"dtype is float16, but {NO_FLOAT16}")


def _dtype(settings: Settings, machine: Mapping[str, Any], *, several: bool) -> str | None:
    """The number format of the base; None for the default of its device.

    Measured for a base on a CPU that is not quantised. Several processes do not measure: all need the same format.
    """
    asked: str | None = settings["dtype"]
    if several or not _on_cpu(settings) or settings.make(BaseSettings).bits:
        return asked
    name = settings["model_name_or_path"]
    folder = base_folder(name) or Path(name).expanduser()
    recorded = machine.get("dtype") if machine.get("device") == "cpu" else None
    choice = choose_dtype(asked, recorded, folder if folder.is_dir() else None)
    print(f"Number format of the base: {choice.dtype} ({choice.reason}).", flush=True)
    return choice.dtype


def _on_cpu(settings: Settings) -> bool:
    import torch

    device = settings["device"]
    return device == "cpu" or (device is None and not torch.cuda.is_available())


def work_offline_if_unreachable(model: str) -> None:
    """Let a hub id be looked up in the local cache only if the hub cannot be reached.

    A folder is left alone, and so is a connection through a proxy, which cannot be probed this way.

    Raises:
        ModelError: it is not in the cache either, or not there and named by the files of a run alone.
    """
    hub_id = re.fullmatch(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", model) is not None
    require_base(model)
    if base_folder(model) is not None or not hub_id or Path(model).exists():
        return
    check_endpoint()
    if os.environ.get("HF_HUB_OFFLINE"):
        return
    from huggingface_hub import try_to_load_from_cache

    try:
        cached = isinstance(try_to_load_from_cache(model, "config.json"), str)
    except ValueError:  # no hub has such an id
        cached = False
    if not cached and not permission.is_ours(model):
        raise ModelError(
            f"the run's files name the model {model!r}, which is not in the local cache, and a file is no permission "
            "to fetch it; type --model_name_or_path, or --trust_run if you know whose run this is"
        )
    if not reachable():
        if not cached:
            if near := difflib.get_close_matches(model, [*SHIPPED_BASES, *FETCHED], n=1, cutoff=0.8):
                raise ModelError(f"there is no base {model!r}; did you mean {near[0]!r}?")
            raise ModelError(
                f"the model {model!r} cannot be loaded: the model hub cannot be reached, and the model is not in the "
                "local cache; expected a folder with config.json, weights and tokenizer, or a Hugging Face model id "
                "that can be reached from here"
            )
        log.warning("The model hub cannot be reached; looking for %s in the local cache.", model)
        stay_offline()


def quiet() -> None:
    """Keep the progress bars, retries and advice of transformers and its hub client out of the terminal."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # a line for each retry, before our one sentence
    for name in ("bitsandbytes", "bitsandbytes.autograd._functions"):
        logging.getLogger(name).setLevel(logging.ERROR)  # a line for every layer that is computed in half precision
