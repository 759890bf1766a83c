"""Check that an environment keeps its contract: `check_env --env my_game:MyGame`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from mafrt.core.errors import ConfigError
from mafrt.core.text import counted
from mafrt.environment.registry import make_env
from mafrt.environment.sample import payment_problem, sample_episode
from mafrt.environment.workers import check_guarded, guarded
from mafrt.scripts.cli.command import Command
from mafrt.scripts.cli.loading import env_arguments, refuse_idle_limits
from mafrt.scripts.cli.run_main import run_main


@dataclass(frozen=True)
class CheckSettings:
    """Arguments of `mafrt check_env`."""

    env: str | None = None
    """a built-in environment such as math, or package.module:Class"""
    env_kwargs: tuple[str, ...] = ()
    """arguments of its constructor: key=value ..., or one JSON object"""
    env_timeout_s: float | None = 60.0
    """seconds that a reset or step of your own environment may take, in a worker process; none: no limit, no worker"""


SAMPLES = 8
"""Episodes that are played to see whether the environment ever pays."""

COMMAND = Command(
    "check_env",
    "Play an environment with scripted agents and list everything that breaks its contract.",
    (CheckSettings,),
    words="env",
)


def check(argv: Sequence[str]) -> int:
    settings = COMMAND.read(argv)
    if settings["env"] is None:
        raise ConfigError("Name an environment: --env package.module:Class, or a built-in one such as --env math.")
    env = make_env(settings["env"], **env_arguments(settings["env_kwargs"], "env_kwargs"))
    refuse_idle_limits(settings, env)
    check_guarded(env, settings["env_timeout_s"])
    tasks = "draws its own tasks" if env.num_tasks is None else counted(env.num_tasks, "tasks")
    print(f"{settings['env']} keeps the contract: agents {', '.join(env.agents)}; {tasks}.")
    session = guarded(env, settings["env_timeout_s"])
    try:
        samples = [sample_episode(session, seed) for seed in range(SAMPLES)]
    finally:
        session.close()
    print("\nA sample episode, with scripted answers:")
    print("\n".join(f"  {line}" for line in samples[0].lines))
    if (problem := payment_problem(samples)) is not None:
        print(f"\nCareful: {problem}.")
    return 0


main = partial(run_main, check)

if __name__ == "__main__":
    sys.exit(main())
