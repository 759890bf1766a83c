"""Train a team on any environment: `--env math`, or your own as `--env package.module:Class`."""

from __future__ import annotations

import argparse
import difflib
import importlib
import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mafrt.config.resolve import add_source_folder
from mafrt.config.schema import Setting
from mafrt.core.errors import ConfigError
from mafrt.core.shipped import shipped
from mafrt.environment.registry import env_names, held_out_of, make_env, settings_of, takes
from mafrt.environment.sample import payment_problem, sample_episode
from mafrt.environment.session import session_of
from mafrt.environment.workers import check_guarded, guarded
from mafrt.envs.mixed import MixedTasks, is_mixture, named_sets, weights_of
from mafrt.envs.program import ProgramEnv
from mafrt.scripts.cli.command import Command, FlagHelp, Settings, add_flag, underscored
from mafrt.scripts.cli.command_names import COMMANDS
from mafrt.scripts.cli.foreign_config import command_of as command_of_config
from mafrt.scripts.cli.foreign_config import library_of
from mafrt.scripts.cli.loading import env_arguments, load_team, team_for, with_places
from mafrt.scripts.cli.recorded_run import PreparedRun, command_of, rebuild
from mafrt.scripts.cli.run_main import run_main
from mafrt.scripts.cli.settings import TRAIN, EnvSettings, ModelSettings, PlaceSettings, ScaleSettings
from mafrt.scripts.cli.strict_parser import StrictParser
from mafrt.scripts.cli.train import train
from mafrt.scripts.cli.unknown_flags import refuse_values_of_switches
from mafrt.scripts.cli.values import convert, read_yaml

if TYPE_CHECKING:
    from mafrt.config.team import Team
    from mafrt.environment.base import Env


SAMPLES = 3
"""Episodes that are played before training to see whether the environment ever pays."""

COMMAND = Command(
    "train",
    "Train a team of agents, each with its own LoRA adapter on one frozen base, by playing an environment.",
    (EnvSettings, ModelSettings, PlaceSettings, ScaleSettings, *TRAIN),
    elsewhere={
        "dataset_path": "file or folder of problems, with --reward or --env math|code|search|dsbench",
        "reward": "function that scores an answer, such as my_reward.py:score (mafrt train_tasks --help)",
        "workflow": "who speaks next and sees what, over the tasks of --reward or of --env math|code|search|dsbench",
    },
)


def prepare(settings: Settings) -> PreparedRun:
    """Environment and team, checked before the model is loaded."""
    if settings["program"] is not None or settings["command"] is not None:
        return prepare_program(settings)
    name = settings["env"]
    recorded = None if settings.record is None else settings.record.environment
    if recorded is not None:
        if name is None and settings["load_path"] is not None:  # a run that was started from Python
            return rebuild(Path(settings["load_path"]))
        # The user's own file must be importable again, whatever folder the run is continued from.
        add_source_folder(recorded.path, recorded.file)
    if name is None:
        raise ConfigError(
            f"Name an environment: --env {' or '.join(env_names())}, --env package.module:Class, or a --program."
        )
    team = load_team(settings)
    if is_mixture(name):
        return prepare_mixture(settings, team, name)
    kwargs = with_places(name, env_arguments(settings["env_kwargs"], "env_kwargs"), settings)
    if team is not None and takes(name, "team"):
        kwargs = {"team": team, **kwargs}
    notes: list[str] = []
    # Worker processes are forked here, before a model is loaded and its threads begin.
    env = guarded(make_env(name, **kwargs), settings["env_timeout_s"])
    # Programs of others answer for themselves; each of their episodes starts something outside.
    if settings["check_env"] and not isinstance(env.unwrapped, ProgramEnv):
        check_guarded(make_env(name, **kwargs), settings["env_timeout_s"])
        # With a coach an environment need not pay anything itself.
        if settings["coach"] == "none":
            samples = [sample_episode(env, seed) for seed in range(SAMPLES)]
            if (problem := payment_problem(samples)) is not None:
                notes.append(f"Careful: {problem}.")
    given = env_arguments(settings["eval_env_kwargs"], "eval_env_kwargs")
    differing = {**held_out_of(env, settings["eval_split"]), **given}
    eval_env = guarded(make_env(name, **{**kwargs, **differing}), settings["env_timeout_s"]) if differing else None
    # The name becomes a part of the run's folder, so that only harmless characters stay.
    short = re.sub(r"[^A-Za-z0-9_.-]+", "_", name.rpartition(":")[2])
    return PreparedRun(env, eval_env, team_for(env, team, settings["n_agents"]), short, tuple(notes))


def prepare_mixture(settings: Settings, team: Team | None, names: str) -> PreparedRun:
    """Several environments as one, `--env math@2,code`; `--env_kwargs '{"math": {...}}'` has arguments of one."""
    sets = named_sets(names)
    given, differing = (env_arguments(settings[name], name) for name in ("env_kwargs", "eval_env_kwargs"))
    for name in [*given, *differing]:
        if name not in sets:
            raise ConfigError(f"env_kwargs names {name!r}; in a mixture its keys are {', '.join(sets)}.")

    def build(more: Mapping[str, Mapping[str, Any]]) -> MixedTasks:
        envs = {}
        for name, (path, _) in sets.items():
            arguments = {**with_places(path, dict(given.get(name, {})), settings), **more.get(name, {})}
            with_team = {"team": team} if team is not None and takes(path, "team") else {}
            envs[name] = make_env(path, **{**with_team, **arguments})
        return MixedTasks(envs, weights_of(sets))

    env = build({})
    split = settings["eval_split"]
    held_out = {name: {**held_out_of(each, split), **differing.get(name, {})} for name, each in env.envs.items()}
    eval_env = build(held_out) if any(held_out.values()) else None
    parts = [None if part is None else guarded(session_of(part), settings["env_timeout_s"]) for part in (env, eval_env)]
    assert parts[0] is not None
    return PreparedRun(parts[0], parts[1], team_for(env, team, settings["n_agents"]), "_".join(sets))


def prepare_program(settings: Settings) -> PreparedRun:
    """The environment that runs the user's own program."""
    if settings["env"] is not None:
        raise ConfigError(f"--env {settings['env']} and a program exclude each other; leave one of them out.")
    team = load_team(settings)
    given = {
        "program": settings["program"],
        "command": settings["command"],
        "agents": None if team is None else list(team.names),
        "timeout_s": settings["program_timeout_s"],
    }
    given = {name: value for name, value in given.items() if value is not None}

    def build(tasks: str | None) -> Env:
        return make_env("program", **given, **({} if tasks is None else {"tasks": tasks}))

    env = build(settings["tasks_path"])
    # Its agents are found once, where no team names them, and recorded: a resumed run has the team that it began with.
    given.setdefault("agents", list(env.agents))
    env = env if team is not None else build(settings["tasks_path"])
    eval_env = None if settings["eval_tasks_path"] is None else build(settings["eval_tasks_path"])
    short = re.sub(r"[^A-Za-z0-9_.-]+", "_", (settings["program"] or "program").rpartition(":")[2])
    return PreparedRun(env, eval_env, team_for(env, team, settings["n_agents"]), short, ())


def typed(argv: Sequence[str], flag: str) -> str | None:
    """The value of a flag among the words, as `--flag value` or `--flag=value`; None if it is not there."""
    for word, value in zip_longest(argv, argv[1:]):
        name, equals, joined = word.partition("=")
        if name.replace("-", "_") == f"__{flag}":
            return joined if equals else value
    return None


def without_env(argv: Sequence[str]) -> list[str]:
    """The words without `--env NAME`."""
    after = zip(["", *argv], argv, strict=False)
    return [word for last, word in after if last != "--env" and word != "--env" and not word.startswith("--env=")]


def run(argv: Sequence[str]) -> int:
    """Train, or go on with a run of another script by that script."""
    # Read by hand before any parser: which command's flags are valid depends on it.
    words = {word.partition("=")[0].replace("-", "_") for word in argv if word.startswith("--")}
    if "__reward" in words or ("__dataset_path" in words and "__env" not in words):  # a function as the environment
        return int(importlib.import_module("mafrt.scripts.train_tasks").main(argv))
    if argv and not argv[0].startswith("-"):  # `mafrt train NAME`
        argv = ["--env", *argv]
    env, load_path = typed(argv, "env"), typed(argv, "load_path")
    if env in env_names() and f"train_{env}" in COMMANDS and "__workflow" in words:
        # That command has the flags of the tasks and of their workflows.
        return int(importlib.import_module(f"mafrt.scripts.train_{env}").main(without_env(argv)))
    if (config := typed(argv, "config")) is not None and shipped(config).is_file():
        stored = read_yaml(shipped(config))
        fitting = command_of_config(stored) if library_of(stored) else None
        if fitting not in (None, COMMAND.name):  # a file of another library that describes another command's run
            return int(importlib.import_module(f"mafrt.scripts.{fitting}").main(argv))
    started_by = None if load_path is None else command_of(Path(load_path).expanduser())
    # A run goes on with the command that began it, since only that one knows its settings.
    if started_by not in (None, COMMAND.name):
        if env is not None:
            raise ConfigError(
                f"{load_path} is a run of mafrt {started_by}, and goes on with what it trains on: leave {env!r} out; "
                f"for another run, begin with its adapters, which mafrt export {load_path} writes."
            )
        return int(importlib.import_module(f"mafrt.scripts.{started_by}").main(argv))
    if env is None or is_mixture(env):
        return train(COMMAND, argv, prepare)
    known = COMMAND.settings()
    command = replace(COMMAND, epilog=help_of(env, known))
    return train(command, with_env_kwargs(argv, env, known), prepare)


main = partial(run_main, run)


def _parser(settings: Mapping[str, Setting], env: str) -> StrictParser:
    parser = StrictParser(add_help=False, argument_default=argparse.SUPPRESS, formatter_class=FlagHelp)
    group = parser.add_argument_group(f"Settings of {env}")
    for setting in settings.values():
        add_flag(group, setting, setting.default)
    return parser


def _own(env: str, known: Mapping[str, Setting]) -> dict[str, Setting]:
    return {name: setting for name, setting in settings_of(env).items() if name not in known}


def with_env_kwargs(argv: Sequence[str], env: str, known: Mapping[str, Setting]) -> list[str]:
    """The words with flags of the environment's own settings as entries of `--env_kwargs`.

    `known` are the command's own flags, which are left as they are.

    Raises:
        ConfigError: a value is not of the setting's type, or a flag is nearly a setting of the environment.
    """
    of_env, words = _own(env, known), [underscored(word) for word in argv]
    refuse_values_of_switches(words, [name for name, setting in of_env.items() if setting.kind is bool])
    typed, rest = _parser(of_env, env).parse_known_args(words)
    for name in (word.partition("=")[0].removeprefix("--") for word in rest if word.startswith("--")):
        near = [] if name in known else difflib.get_close_matches(name, [*known, *of_env], 1, cutoff=0.75)
        # Before settings of the command that are like it; at least half of a name, as in `unknown`.
        near = near or [other for other in of_env if len(name) > 2 and name in other and len(other) <= 2 * len(name)]
        if near and near[0] in of_env:
            raise ConfigError(f"There is no flag '--{name}'; did you mean '--{near[0]}', a setting of {env}?")
    kwargs = {name: convert(of_env[name], value, f"--{name}") for name, value in vars(typed).items()}
    return [*rest, "--env_kwargs", json.dumps(kwargs)] if kwargs else list(argv)


def help_of(env: str, known: Mapping[str, Setting]) -> str:
    """The environment's own settings, for the end of the help; empty if it has none."""
    of_env = _own(env, known)
    return _parser(of_env, env).format_help().partition("\n\n")[2].rstrip() if of_env else ""


if __name__ == "__main__":
    sys.exit(main())
