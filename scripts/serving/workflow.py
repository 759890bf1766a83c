"""The team's workflow on a problem of the user's: all agents speak in turn, as in training."""

from __future__ import annotations

import contextlib
import copy
from dataclasses import replace
from typing import TYPE_CHECKING

from mafrt.core.errors import ConfigError, MafrtError
from mafrt.core.types import Episode
from mafrt.envs.math import MathEnv
from mafrt.envs.math.tasks import Task
from mafrt.rollout.ask import one_episode
from mafrt.rollout.player import Player
from mafrt.scripts.cli.loading import refuse_idle_limits
from mafrt.scripts.cli.recorded_run import rebuild
from mafrt.scripts.serving.trained_team import Source, TrainedTeam

if TYPE_CHECKING:
    from mafrt.envs.math import MathEnv


def workflow_of(source: Source) -> MathEnv | None:
    """The environment of the run, if it poses problems that a user can pose too; None for others.

    Raises:
        ConfigError: a sandbox is typed, and no program would run in it.
    """
    settings, env = source.settings, None
    changed = {name: settings[name] for name in ("sandbox",) if name in settings.flags}
    # Where the environment cannot be built here, the agents can be talked to all the same.
    with contextlib.suppress(MafrtError):
        env = None if source.loaded.run is None else rebuild(source.loaded.run, changed).env
    if changed and (env is None or not isinstance(env.unwrapped, MathEnv)):
        raise ConfigError("No workflow of this team is played here, so that --sandbox has no effect; leave it out.")
    if env is None:
        return None
    refuse_idle_limits(settings, env)
    return env.unwrapped if isinstance(env.unwrapped, MathEnv) else None


def play_problem(
    team: TrainedTeam, env: MathEnv, problem: str, seed: int, max_tokens: int | None = None
) -> Episode | None:
    """One episode about `problem`, of turns up to `max_tokens`; None if it was cut because a prompt was too long."""
    spawned = copy.copy(env.spawn())
    spawned.tasks = (Task("asked", problem, "0"),)
    main = team.base.main
    sampling = {
        name: replace(how, max_new_tokens=min(how.max_new_tokens, max_tokens or how.max_new_tokens))
        for name, how in team.sampling.items()
    }
    shared = (team.queue, main.tokenizer, team.team, sampling, main.context_window, team.reasoning)
    player = Player(*shared, keep_thoughts=team.kept is not None, voices=team.voices)
    return one_episode(player, spawned, seed)
