"""Settings that no run can use, refused before a model is loaded: absurd sizes, more tokens than the base can hold."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mafrt.config.agent import AgentSpec
from mafrt.config.schema import check_number
from mafrt.config.team import Team
from mafrt.config.train_config import TrainConfig
from mafrt.core.errors import ConfigError
from mafrt.core.reading import parse_json, read_text
from mafrt.core.shipped import base_folder

MOST: dict[str, float] = {
    "seed": 2**63 - 1,  # seeds are hashed as 64-bit integers
    "iterations": 10**9,
    "n_rollout_threads": 2**16,
    "n_samples": 2**16,
    "tree_samples": 2**10,
    "episode_length": 10**6,
    "max_new_tokens": 2**24,
    "context_window": 2**26,
    "max_batch_rows": 2**16,
    "top_k": 2**24,
    "temperature": 100.0,
    "lr": 10.0,
    "critic_lr": 10.0,
    "weight_decay": 100.0,
    "ppo_epoch": 10**4,
    "critic_epoch": 10**6,
    "num_mini_batch": 10**6,
    "critic_hidden_size": 2**16,
    "replay_steps": 10**8,
    "micro_batch_tokens": 2**30,
    "lora_rank": 4096,
    "lora_alpha": 10**6,
    "eval_episodes": 10**7,
    "eval_samples": 10**5,
    "tasks": 10**7,
    "k": 10**5,
    "baseline_votes": 10**5,
    "baseline_episodes": 10**7,
    "per_task": 10**5,
    "epochs": 10**6,
    "batch_size": 10**7,
    "max_calls": 2**16,
    "max_sessions": 2**20,
    "coach_concurrency": 10**4,
    "vllm_concurrency": 10**5,
    "tensor_parallel_size": 4096,
    "program_timeout": 86_400,
}
"""Largest value of a setting that any machine could use; a larger one is a typing error."""

ABOVE_ZERO = ("env_timeout_s", "program_timeout", "program_memory", "program_timeout_s", "retriever_timeout_s")
"""Limits within which nothing could be done if they were 0."""


def refuse_absurd(values: Mapping[str, Any], where: str = "") -> None:
    """Raise ConfigError for a setting that is larger than any machine could use, or a limit that is not above 0.

    Args:
        values: name -> value; names without a limit are passed over.
        where: begins the message.
    """
    for name, most in MOST.items():
        value = values.get(name)
        if isinstance(value, int | float) and value > most:
            raise ConfigError(f"{where}{name} is {value}; choose a value of at most {most:g}.")
    for name in ABOVE_ZERO:
        if isinstance(values.get(name), int | float):
            check_number(f"{where}{name}", values[name], above=0)


def check_limits(config: TrainConfig, team: Team, models: Mapping[str, str], *, tokens_given: bool = True) -> None:
    """Raise ConfigError for a setting that is absurdly large, or too large for the base's configuration.

    Args:
        config: of the run.
        team: its agents; their own settings go before the run's.
        models: adapter -> folder or name of its base; a base that is not on disk yet is not checked.
        tokens_given: whether `max_new_tokens` was asked for; a default is cut to the window instead.
    """
    refuse_absurd(config.flat())
    for agent in team.agents:
        shape = {} if agent.lora is None else {"lora_rank": agent.lora.rank, "lora_alpha": agent.lora.alpha}
        refuse_absurd(vars(agent) | shape, f"agent {agent.name!r}: ")
        _check_sizes(config, agent, models[agent.adapter], tokens_given=tokens_given)


def _check_sizes(config: TrainConfig, agent: AgentSpec, model: str, *, tokens_given: bool) -> None:
    """Raise ConfigError for a rank or a number of tokens that is too large for an agent's base."""
    base = base_config(model)
    width, positions = base.get("hidden_size"), base.get("max_position_embeddings")
    if isinstance(width, int):
        rank = agent.lora_shape(config.team.lora).rank
        if rank > width:
            raise ConfigError(
                f"lora_rank is {rank} (agent {agent.name}), but the layers of {model} are {width} wide; a higher "
                "rank adds nothing, choose a smaller one."
            )
    if isinstance(positions, int):
        window = min(positions, config.play.context_window or positions)
        tokens = agent.max_new_tokens or (config.play.max_new_tokens if tokens_given else 0)
        if tokens >= window:
            raise ConfigError(
                f"max_new_tokens is {tokens} (agent {agent.name}), but prompt and answer together have {window} "
                f"tokens on {model}; choose a smaller value."
            )


def base_config(model: str) -> dict[str, Any]:
    """config.json of a base that is a local folder, text part only; empty if it cannot be read."""
    folder = base_folder(model) or Path(model).expanduser()
    try:
        config = parse_json(read_text(folder / "config.json"))
    except (OSError, ValueError):
        return {}
    if not isinstance(config, dict):
        return {}
    text = config.get("text_config")
    return text if isinstance(text, dict) else config
