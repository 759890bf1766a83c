"""Train a team on any environment: `--env math`, or one's own as `--env package.module:Class`."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence

from mafrt.core.errors import ConfigError
from mafrt.scripts.cli.command import Command, Settings, run_main
from mafrt.scripts.cli.loading import env_arguments, load_team, team_for, with_sandbox
from mafrt.scripts.cli.settings import TRAIN, EnvSettings, ModelSettings, PlaceSettings, ScaleSettings
from mafrt.scripts.cli.train import Stage, train

COMMAND = Command(
    "train",
    "Train a team of agents, each with its own LoRA adapter on one frozen base, by playing an environment.",
    (EnvSettings, ModelSettings, PlaceSettings, ScaleSettings, *TRAIN),
)


def prepare(settings: Settings) -> Stage:
    """Environment and team, checked before the model is loaded."""
    from mafrt.environment.registry import env_names, make_env

    name = settings["env"]
    if name is None:
        raise ConfigError(f"Name an environment: --env {' or '.join(env_names())}, or --env package.module:Class.")
    team = load_team(settings)
    kwargs = with_sandbox(name, env_arguments(settings["env_kwargs"], "env_kwargs"), settings)
    env = make_env(name, **kwargs)
    if settings["check_env"]:
        from mafrt.environment.checker import check_env

        check_env(make_env(name, **kwargs))
    differing = env_arguments(settings["eval_env_kwargs"], "eval_env_kwargs")
    eval_env = make_env(name, **{**kwargs, **differing}) if differing else None
    short = re.sub(r"[^A-Za-z0-9_.-]+", "_", name.rpartition(":")[2])
    return Stage(env, eval_env, team_for(env, team, settings["n_agents"]), short)


def main(argv: Sequence[str] | None = None) -> int:
    return run_main(lambda words: train(COMMAND, words, prepare), argv)


if __name__ == "__main__":
    sys.exit(main())
