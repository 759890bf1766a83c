"""Passes over the training tasks, as a number of iterations."""

from __future__ import annotations

from dataclasses import replace

from mafrt.config.train_config import TrainConfig
from mafrt.core.errors import ConfigError
from mafrt.environment.base import Env


def with_epochs(config: TrainConfig, env: Env, before: int = 0) -> TrainConfig:
    """`config` with the iterations that `epochs` passes over the tasks of `env` take; itself without `epochs`.

    `before`: iterations of the run before it began with these tasks.

    An iteration draws a task for each group of `n_samples` episodes. Where `episode_length` or dynamic sampling makes
    it draw more, more passes are played.

    Raises:
        ConfigError: the environment has no numbered tasks.
    """
    if not config.run.epochs:
        return config
    if not env.num_tasks:
        raise ConfigError(
            f"epochs is {config.run.epochs}, but {env.class_name} has no numbered tasks; give --iterations instead."
        )
    groups = max(1, config.play.n_rollout_threads // config.play.n_samples)
    iterations = -(-config.run.epochs * env.num_tasks // groups)
    return replace(config, run=replace(config.run, iterations=before + iterations))
