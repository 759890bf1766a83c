"""`mafrt evaluate --baselines`: which training tasks, start and budget belong to an evaluation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mafrt.config.team import Team
from mafrt.core.atomic_files import load_json
from mafrt.core.errors import ConfigError
from mafrt.environment.registry import held_out_of, make_env
from mafrt.environment.workers import guarded
from mafrt.envs.math import MathEnv
from mafrt.scripts.baselines.table import BaselineRow, Baselines, place_start, table
from mafrt.scripts.cli.command import Settings
from mafrt.scripts.cli.loading import env_arguments, stored_args, with_places
from mafrt.scripts.cli.recorded_run import rebuild, run_of
from mafrt.scripts.cli.settings import BaselineSettings
from mafrt.storage.checkpoint import ORIGIN
from mafrt.storage.load_path import resolve

if TYPE_CHECKING:
    from mafrt.environment.base import Env
    from mafrt.models.several_bases import Bases
    from mafrt.rollout.player import Player
    from mafrt.runners.evaluation import Evaluation, EvaluationPlan
    from mafrt.storage.load_path import LoadSource

__all__ = ["BaselinePlan", "BaselineRow", "plan", "table"]

EPISODES = 3840
"""of imitation and search where there is no run to compare with: those of the quickstart of word problems"""


@dataclass(frozen=True)
class BaselinePlan:
    """What the baselines need besides the evaluation itself; made before a model is loaded."""

    train_env: Env
    choice_env: Env
    team: Team
    start: dict[str, Path]
    """adapter -> folder of the weights that the run began with; empty for the base without training"""
    votes: int
    episodes: int
    lr: float

    def measure(
        self, env: Env, player: Player, base: Bases, evaluated: Evaluation, plan: EvaluationPlan
    ) -> list[BaselineRow]:
        """The rows of the table, the evaluated team first."""
        parts = Baselines(
            env=env,
            train_env=self.train_env,
            choice_env=self.choice_env,
            player=player,
            base=base,
            start=place_start(base, self.team, self.start),
            plan=plan,
            votes=self.votes,
            episodes=self.episodes,
            lr=self.lr,
        )
        return list(parts.rows(evaluated))


def plan(settings: Settings, loaded: LoadSource | None, env: Env, team: Team) -> BaselinePlan | None:
    """The plan, or None without --baselines.

    Raises:
        ConfigError: there are no training tasks, or the engine cannot hold the further adapters.
    """
    asked = settings.make(BaselineSettings)
    if not asked.baselines:
        return None
    if settings["engine"] != "local":
        raise ConfigError(
            f"baselines need adapters besides the team's, and engine is {settings['engine']}; take local."
        )
    if any(agent.model is not None for agent in team.agents):
        raise ConfigError("baselines compare a team on one base, and agents of this team name their own model.")
    stored, _ = stored_args(loaded)
    played = int(stored.get("iterations", 0)) * int(stored.get("n_rollout_threads", 0))
    train_env = training_env(settings, loaded, team)
    choice_env = validation_env(settings, loaded, train_env)
    return BaselinePlan(
        guarded(train_env, settings["env_timeout_s"]),
        guarded(choice_env, settings["env_timeout_s"]),
        team,
        start_of(stored, None if loaded is None else loaded.run),
        asked.baseline_votes,
        asked.baseline_episodes or played or EPISODES,
        asked.baseline_lr,
    )


def start_of(stored: Mapping[str, Any], run: Path | None) -> dict[str, Path]:
    """Adapter -> folder of the weights that a run with these settings began with."""
    named = stored.get("load_path")
    # The settings have the path as it was typed, perhaps in another working directory.
    if named is not None and run is not None and (run / ORIGIN).is_file():
        named = load_json(run / ORIGIN)["load_path"]
    return {} if named is None else dict(resolve(named).adapters)


def training_env(settings: Settings, loaded: LoadSource | None, team: Team) -> Env:
    """The environment of the training tasks that belong to the held-out ones."""
    run = run_of(loaded)
    if run is not None and "env" not in settings.flags:
        return rebuild(run).env
    if settings["dataset_path"] is not None:
        raise ConfigError(
            "baselines choose on training tasks, and --dataset_path names none; give the run that trained the team by "
            "--load_path, or leave it out."
        )
    return MathEnv(team=team) if settings["env"] is None else make_env(settings["env"], **_arguments(settings))


def validation_env(settings: Settings, loaded: LoadSource | None, train_env: Env) -> Env:
    """The environment of the validation tasks beside those of `train_env`, which is returned where there are none."""
    run = run_of(loaded)
    if run is not None and "env" not in settings.flags:
        found = rebuild(run, split="validation").eval_env
    elif settings["env"] is None:
        return train_env
    else:
        other = held_out_of(train_env, "validation")
        found = make_env(settings["env"], **{**_arguments(settings), **other}) if other else None
    return train_env if found is None or found.split == "test" else found


def _arguments(settings: Settings) -> dict[str, Any]:
    return with_places(settings["env"], env_arguments(settings["env_kwargs"], "env_kwargs"), settings)
