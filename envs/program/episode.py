"""One run of the user's program: its calls, which wait for answers, and its end."""

from __future__ import annotations

import asyncio
import os
import queue
import re
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from mafrt.config.resolve import is_users
from mafrt.core.errors import EnvError
from mafrt.core.text import brief, real_number, shortened
from mafrt.environment.chat_api.protocol import ApiError, ChatCall, ChatReply

MOST_UNKNOWN = 8
"""Names of models that are kept for an error's sentence"""


@dataclass
class PendingCall:
    """A call that waits for its answer."""

    agent: str
    call: ChatCall
    answer: Future[ChatReply] = field(default_factory=Future)


@dataclass(frozen=True)
class ProgramEnd:
    """The end of a program."""

    returned: Any = None
    error: str | None = None
    """why it failed, with file and line; None if it did not"""


@dataclass(frozen=True)
class Reward:
    """The task's verdict for the team, rewards of single agents, or both."""

    outcome: float | None = None
    rewards: dict[str, float] = field(default_factory=dict)


def agent_name(model: str) -> str:
    """The agent that a model stands for: names of agents hold no slashes or blanks, as `openai/gpt-5` does."""
    return re.sub(r"[^A-Za-z0-9_.-]+", "_", model)[:64]


def address_of(base_url: str, key: str) -> dict[str, str]:
    """The environment variables in which the stock clients look for the address and the key of their model."""
    return {
        **{"OPENAI_BASE_URL": base_url, "OPENAI_API_BASE": base_url, "OPENAI_API_KEY": key},
        # These clients add /v1 themselves.
        **{"ANTHROPIC_BASE_URL": base_url.removesuffix("/v1"), "ANTHROPIC_API_KEY": key},
        # Else the Agents SDK sends what the agents say to OpenAI.
        "OPENAI_AGENTS_DISABLE_TRACING": os.environ.get("OPENAI_AGENTS_DISABLE_TRACING", "1"),
    }


class ProgramEpisode:
    """The mailbox between a running program and the environment.

    Args:
        key: names the episode in the address.
        agents: models that it may call; None: any, and `agents` then holds those that it has called.
        what: is played, for messages.
    """

    def __init__(self, key: str, agents: tuple[str, ...] | None, what: str = "the program") -> None:
        self.what = what
        self.key, self.agents, self._any = key, agents or (), agents is None
        self.events: queue.Queue[PendingCall | ProgramEnd] = queue.Queue()
        self.stop: Callable[[], None] | None = None
        """ends the program; None for one that cannot be ended"""
        self.line: Callable[[], str] | None = None
        """` (FILE, line N)` where the program stands in the user's own code"""
        self.over: ApiError | None = None
        """why further calls are refused; None while calls are taken"""
        self.posted = 0
        """rewards that were posted, up to two"""
        self._reward: Reward | None = None
        self.unknown: list[str] = []
        """models that it asked for and that are no agents"""
        self._held: list[PendingCall] = []
        """calls of agents that already have one being answered"""
        self._lock = threading.Lock()

    # ------------------------------------------------------------------------- the server's side

    def begin(self, call: ChatCall) -> Future[ChatReply]:
        """Take a call. Raises ApiError for an unknown model, and after the end."""
        with self._lock:
            if self.over is not None:
                raise self.over
            agent = call.model if call.model in self.agents else agent_name(call.model)
            if agent not in self.agents and self._any:
                self.agents += (agent,)
            if agent not in self.agents:
                if call.model not in self.unknown and len(self.unknown) < MOST_UNKNOWN:
                    self.unknown.append(shortened(call.model))
                raise ApiError(
                    404,
                    f"there is no agent {shortened(call.model)!r}; there are {', '.join(self.agents)}; give one of "
                    "them as 'model', or name this one in the team file or in AGENTS",
                    "model_not_found",
                )
            waiting = PendingCall(agent, call)
            self.events.put(waiting)
            return waiting.answer

    def post(self, body: Any) -> None:
        """Take a posted reward. Raises ApiError for one that cannot be read (400), and after the end (410)."""
        try:
            reward = read_reward(body, self.agents)
        except EnvError as error:
            raise ApiError(400, str(error)) from error
        with self._lock:
            if self.over is not None:
                raise self.over
            self.posted = min(self.posted + 1, 2)
            self._reward = reward

    # -------------------------------------------------------------------- the environment's side

    def next_calls(self, timeout_s: float, settle_s: float) -> dict[str, PendingCall] | ProgramEnd:
        """The calls that are answered next, one for each agent, or the end of the program.

        Waits up to `timeout_s` for the first event, then `settle_s` for calls made side by side.

        Raises:
            EnvError: the program neither called nor ended in time.
        """
        calls: dict[str, PendingCall] = {}
        held, self._held = self._held, []
        for waiting in held:
            self._sort(waiting, calls)
        deadline = time.monotonic() + (settle_s if calls else timeout_s)
        while True:
            try:
                event = self.events.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                if calls:
                    return {name: calls[name] for name in self.agents if name in calls}
                raise EnvError(
                    f"{self.what} made no call and did not end within {timeout_s:g} s{self.where()}"
                ) from None
            if isinstance(event, ProgramEnd):
                self._held += calls.values()  # of threads that the program has left behind
                return event
            self._sort(event, calls)
            deadline = time.monotonic() + settle_s

    def _sort(self, waiting: PendingCall, calls: dict[str, PendingCall]) -> None:
        if waiting.agent in calls:
            self._held.append(waiting)
        else:
            calls[waiting.agent] = waiting

    def end(self, why: ApiError, pending: dict[str, PendingCall] | None = None) -> None:
        """Refuse all calls from now on, those that wait included."""
        with self._lock:
            self.over = self.over or why
        waiting = [*(pending or {}).values(), *self._held]
        while True:
            try:
                event = self.events.get_nowait()
            except queue.Empty:
                break
            waiting += [event] if isinstance(event, PendingCall) else []
        for call in waiting:
            if not call.answer.done():
                call.answer.set_exception(why)

    def where(self) -> str:
        """` (FILE, line N)` where the program stands in the user's own code; empty if it is not known."""
        return "" if self.line is None else self.line()

    def reward(self, returned: Any) -> Reward:
        """The reward of an episode that has ended. Raises EnvError if there is none, or more than one."""
        given = self.posted + (returned is not None)
        if not given:
            raise EnvError("the program gave no reward; return a number, or post one to BASE_URL/reward")
        if given > 1:
            raise EnvError(f"the program gave {given} rewards; return one or post one, not both")
        return self._reward if self._reward is not None else read_reward(returned, self.agents)


def read_reward(given: Any, agents: tuple[str, ...]) -> Reward:
    """A number (the team's outcome), or an object with `reward` for the team, `rewards` by agent, or both."""
    if (number := real_number(given)) is not None:
        return Reward(number)
    if isinstance(given, dict) and given.keys() <= {"reward", "rewards"} and given:
        outcome, rewards = real_number(given.get("reward")), given.get("rewards") or {}
        amounts = {name: real_number(value) for name, value in rewards.items()} if isinstance(rewards, dict) else None
        known = outcome is not None if given.get("reward") is not None else bool(amounts)
        if known and amounts is not None and all(n in agents and value is not None for n, value in amounts.items()):
            return Reward(outcome, {name: value for name, value in amounts.items() if value is not None})
    raise EnvError(
        f'the reward must be a number or an object with "reward" and "rewards" (agent -> number; agents are '
        f"{', '.join(agents)}), found {brief(given)}"
    )


def line_of_thread(ident: int | None) -> str:
    """` (FILE, line N)` where a thread stands in the user's own code; empty if it does not."""
    frame = sys._current_frames().get(ident or -1)
    return _users_line([] if frame is None else traceback.extract_stack(frame))


def line_of_task(task: asyncio.Task[Any] | None) -> str:
    """The same for a coroutine that waits."""
    stack, inner = [], None if task is None else task.get_coro()
    while inner is not None:
        frame = getattr(inner, "cr_frame", None)
        if frame is None:
            break
        stack.append(traceback.FrameSummary(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
        inner = getattr(inner, "cr_await", None)
    return _users_line(stack)


def _users_line(stack: Sequence[traceback.FrameSummary]) -> str:
    for entry in reversed(stack):
        if is_users(entry.filename):
            return f" ({entry.filename}, line {entry.lineno})"
    return ""
