"""The agents of a program that no team names: those that its first episodes call."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from typing import Any

from mafrt.core.errors import EnvError
from mafrt.environment.chat_api.protocol import ApiError, ChatCall, ChatReply
from mafrt.envs.program.episode import ProgramEnd, ProgramEpisode
from mafrt.envs.program.runner import Start

FIRST = 3
"""Episodes"""
MOST_ROUNDS = 16
"""Rounds of calls of each"""
_HANDOFFS = ("transfer_to_", "handoff")
_OVER = ApiError(410, "the agents have been found; the episode is over", "episode_ended")


def called_agents(
    start: Start,
    tasks: Sequence[dict[str, Any]],
    opened: Callable[[ProgramEpisode], str],
    forget: Callable[[ProgramEpisode], None],
    timeout_s: float,
) -> tuple[tuple[str, ...], str]:
    """The models that a program calls when every answer is OK, and why it ended early, if it did.

    Handoffs are followed, each once; other tools are not called.
    """
    found: dict[str, None] = {}
    followed: set[str] = set()
    why = ""
    for task in tasks[:FIRST]:
        episode = ProgramEpisode(f"first-{secrets.token_urlsafe(12)}", None)
        start(episode, task, opened(episode))
        for _ in range(MOST_ROUNDS):
            try:
                calls = episode.next_calls(timeout_s, 0.05)
            except EnvError as error:
                why = str(error)
                break
            if isinstance(calls, ProgramEnd):
                why = f"the program {calls.error}" if calls.error else why
                break
            for waiting in calls.values():
                waiting.answer.set_result(ChatReply(_answer(waiting.call, followed), completion_tokens=1))
        found |= dict.fromkeys(episode.agents)
        episode.end(_OVER)
        forget(episode)
        if episode.stop is not None:
            episode.stop()
    return tuple(found), why


def _answer(call: ChatCall, followed: set[str]) -> str:
    for name in call.tool_names:
        if name not in followed and name.startswith(_HANDOFFS):
            followed.add(name)
            return f'<tool_call>\n{{"name": "{name}", "arguments": {{}}}}\n</tool_call>'
    return "OK"
