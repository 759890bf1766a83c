"""What can be refused before the first token is sampled."""

from __future__ import annotations

from typing import Any

from mafrt.env import Env
from mafrt.errors import ConfigError, PromptTooLongError
from mafrt.prompts import encode_prompt
from mafrt.team import Team

_CHECKED = 1000
"""tasks whose first prompts are looked at; of more, this many spread evenly"""


def check_team(env: Env, team: Team) -> None:
    """Raise ConfigError unless everybody who acts in `env` is in the team."""
    missing = [name for name in env.agents if name not in team.names]
    if missing:
        raise ConfigError(
            f"{type(env).__name__} has the agents {', '.join(env.agents)}, but the team has no {', '.join(missing)} "
            f"(it has {', '.join(team.names)}); give a profile with these roles."
        )


def check_window(window: int | None, trained: int) -> int:
    """The context window to use. Raises ConfigError if more is asked for than the base was trained for."""
    if window is not None and not 1 < window <= trained:
        raise ConfigError(
            f"context_window is {window}, but the base was trained for up to {trained} tokens; choose a value in "
            f"[2, {trained}]."
        )
    return window or trained


def check_prompts(env: Env, team: Team, tokenizer: Any, window: int) -> None:
    """Encode the first prompts of the tasks. Raises PromptTooLongError, naming the first task that does not fit."""
    count = env.num_tasks or 1
    step = max(1, -(-count // _CHECKED))
    probe = env.spawn()
    for task in range(0, count, step):
        observations, info = probe.reset(seed=0, options={"task": task} if env.num_tasks else None)
        for agent, seen in observations.items():
            length = len(encode_prompt(tokenizer, team.agent(agent).prompt, seen))
            if length >= window:
                raise PromptTooLongError(
                    f"Task {info.get('task', task)!r} gives {agent!r} a prompt of {length} tokens, which leaves no "
                    f"room for an answer in a context window of {window}; raise --context_window or leave the task out."
                )
    probe.close()
