"""`ProgramEnv`: the user's own agent program as an environment.

The program calls an address like OpenAI's; `model` names the agent. Each call is an observation of that agent, and the
agent's answer goes back as the completion. So a call becomes a turn with the token ids that were fed and sampled, and
algorithms, coaches, schedules, evaluations and resume work as with any environment. A program that edits, drops or
reorders its history changes the observation of its next call and nothing of the turns before.
"""

from __future__ import annotations

import copy
import itertools
import json
import logging
import random
import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from mafrt.core.errors import ConfigError, EnvError
from mafrt.core.reading import parse_json, read_text
from mafrt.core.text import clean_deep, shortened
from mafrt.core.types import Observation, Sampled, StepResult
from mafrt.environment.base import Env
from mafrt.environment.chat_api.protocol import ApiError, ChatCall, ChatReply, Token, before_stop
from mafrt.environment.chat_api.server import ChatServer, OnText
from mafrt.envs.program.episode import PendingCall, ProgramEnd, ProgramEpisode
from mafrt.envs.program.runner import Start, command_runner, function_runner, start_error
from mafrt.envs.tools.strict_calls import held_to_strict

log = logging.getLogger(__name__)

_ENDED = ApiError(410, "the episode has ended, so its calls are not answered any more", "episode_ended")
_NO_FORM = (
    "a JSON schema is not supported in training: tokens that a grammar leaves no choice of would be learnt from as the "
    "agent's own; say the form in a message and read the answer's JSON yourself"
)
# "Prompt is too long" is the phrase by which litellm knows what it is, so that harnesses end instead of asking again.
_TOO_LONG = ApiError(
    400,
    "the prompt is too long for the context window, or the episode was given up",
    "context_length_exceeded",
)


class ProgramServer:
    """One address for all episodes of this process; it starts with the first episode."""

    learns = True

    def __init__(self) -> None:
        self.episodes: dict[str, ProgramEpisode] = {}
        self.late_calls = 0
        """calls after the end of their episode"""
        self._server: ChatServer | None = None
        self._lock = threading.Lock()

    def open(self, episode: ProgramEpisode) -> str:
        """The base URL of a new episode."""
        with self._lock:
            if self._server is None:
                self._server = ChatServer(self)
            self.episodes[episode.key] = episode
        return f"{self._server.url}/episodes/{episode.key}/v1"

    def forget(self, episode: ProgramEpisode) -> None:
        self.episodes.pop(episode.key, None)
        if self._server is not None:
            self._server.forget(episode.key)

    def models(self, key: str) -> list[str]:
        return list(self._episode(key).agents)

    def begin(self, key: str, call: ChatCall, on_text: OnText) -> Future[ChatReply]:
        episode = self._episode(key)
        if call.schema:
            raise ApiError(400, _NO_FORM)
        return episode.begin(call)

    def count(self, key: str, call: ChatCall) -> int:
        self._episode(key)
        raise ApiError(400, "tokens are not counted in training; the 'usage' of each answer tells them")

    def reward(self, key: str, body: Any) -> None:
        self._episode(key).post(body)

    def _episode(self, key: str) -> ProgramEpisode:
        episode = self.episodes.get(key)
        if episode is None:
            self.late_calls += 1
            if self.late_calls == 1:
                log.warning("a program calls after the end of its episode; such calls are refused")
            raise _ENDED
        return episode


SERVER = ProgramServer()


class ProgramEnv(Env):
    """Runs the user's program for each episode.

    Args:
        program: `my_agents.py:run_episode` or `package.module:function`, called as `function(task, base_url)`.
        command: a command in place of a function.
        agents: the models that it may call; by default those that the function or its module names, or else those that
            its first episodes call.
        tasks: JSONL file with one task (an object) a line; without one, a task is `{"seed": N}`.
        timeout_s: seconds in which the program must make its next call or end.
        settle_s: seconds in which further calls count as made side by side.
    """

    bounded = True
    blocking = True
    costly_reset = True
    max_steps = 64
    what = "the program"
    """is played, for messages"""

    def __init__(
        self,
        program: str | None = None,
        command: str | None = None,
        agents: tuple[str, ...] | list[str] | None = None,
        tasks: str | None = None,
        timeout_s: float = 60.0,
        settle_s: float = 0.005,
    ) -> None:
        if (program is None) == (command is None):
            raise ConfigError("give either a program, such as my_agents.py:run_episode, or a command.")
        if not timeout_s > 0 or not settle_s >= 0:
            raise ConfigError("timeout_s must be above 0 and settle_s at least 0.")
        named: tuple[str, ...] = ()
        if program is not None:
            self._start, named = function_runner(program)
        else:
            assert command is not None
            self._start = command_runner(command, 10 * timeout_s)
        self.program, self.timeout_s, self.settle_s = program or command or "", timeout_s, settle_s
        self.tasks = None if tasks is None else read_tasks(tasks)
        self.num_tasks = None if self.tasks is None else len(self.tasks)
        self.agents = tuple(agents or named) or self._called()
        self._begin_playing()

    def _called(self) -> tuple[str, ...]:
        """The agents that the first episodes call. Raises ConfigError if they call none."""
        first = [{"seed": seed} for seed in range(FIRST)]
        tasks = first if self.tasks is None else [{**copy.deepcopy(task), "seed": 0} for task in self.tasks[:FIRST]]
        found, why = called_agents(self._start, tasks, SERVER.open, SERVER.forget, self.timeout_s)
        if not found:
            calls_none = f", and its first episodes call none ({why})" if why else ""
            raise ConfigError(
                f"the agents of {self.program} are not known{calls_none}"
                '; give a team file (--profile_path), or name them in the module: AGENTS = ("solver", "checker").'
            )
        log.info("the agents of %s are those that its first episodes call: %s", self.program, ", ".join(found))
        return found

    def _begin_playing(self) -> None:
        self._episode: ProgramEpisode | None = None
        self._calls: dict[str, PendingCall] = {}
        self._sampled: Mapping[str, Sampled] = {}

    @property
    def class_name(self) -> str:
        return f"program {self.program}"

    def spawn(self) -> ProgramEnv:
        """A sibling that shares tasks and program."""
        sibling = object.__new__(type(self))
        vars(sibling).update({**vars(self), "rng": random.Random()})
        sibling._begin_playing()
        return sibling

    def reset(
        self, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Observation], dict[str, Any]]:
        self._give_up()
        drawn = self.rng.randrange(2**31)
        if self.tasks is None:
            name, task = f"seed {drawn}", {"seed": drawn}
        else:
            place = options["task"] if options else drawn % len(self.tasks)
            name, task = f"task {place}", {**self.tasks[place], "seed": drawn}
        episode = ProgramEpisode(f"{next(_NUMBERS)}-{secrets.token_urlsafe(12)}", self.agents, self.what)
        self._episode = episode
        self._begin(episode, copy.deepcopy(task), SERVER.open(episode))  # a program may edit its task
        calls = self._next()
        if isinstance(calls, ProgramEnd):
            self._finish()
            self._refuse_failed(calls)
            asked = f"; it asked for {', '.join(map(repr, episode.unknown))}" if episode.unknown else ""
            raise EnvError(f"{self.what} ended without a call to an agent{asked}")
        return self._seen(calls), {"task": name, "problem": self._shown(task)}

    def _begin(self, episode: ProgramEpisode, task: dict[str, Any], base_url: str) -> None:
        self._start(episode, task, base_url)

    def _shown(self, task: dict[str, Any]) -> str:
        shown = {key: value for key, value in task.items() if key != "seed" or self.tasks is None}
        return shortened(json.dumps(shown, ensure_ascii=False), 2000)

    def _refuse_failed(self, ended: ProgramEnd) -> None:
        """Raise EnvError if the program failed."""
        if ended.error is not None:
            raise start_error(ended.error)

    def sampled(self, answers: Mapping[str, Sampled]) -> None:
        self._sampled = answers

    def step(self, actions: dict[str, str]) -> StepResult:
        episode, sampled = self._episode, self._sampled
        assert episode is not None
        self._sampled = {}
        for agent, text in actions.items():
            call = self._calls.pop(agent)
            if call.answer.done():  # a client that has gone cancels its call
                continue
            try:
                made = held_to_strict(call.call, _reply(call.call, text, sampled.get(agent, Sampled(0, 0, "eos"))))
            except ApiError as error:
                call.answer.set_exception(error)
            else:
                call.answer.set_result(made)
        calls = self._next()
        if not isinstance(calls, ProgramEnd):
            if self.step_count + 1 >= (self.max_steps or self.step_count + 2):
                self._give_up()
                return StepResult({}, {}, False, True, {})
            return StepResult(self._seen(calls), {}, False, False, {})
        self._finish()
        self._refuse_failed(calls)
        return self._result(episode, calls.returned)

    def _result(self, episode: ProgramEpisode, returned: Any) -> StepResult:
        """The end of an episode whose program has returned this."""
        reward = episode.reward(returned)
        info: dict[str, Any] = {} if reward.outcome is None else {"outcome": reward.outcome}
        return StepResult({}, reward.rewards, True, False, info)

    def close(self) -> None:
        self._give_up()

    def _next(self) -> dict[str, PendingCall] | ProgramEnd:
        assert self._episode is not None
        try:
            calls = self._episode.next_calls(self.timeout_s, self.settle_s)
        except EnvError:
            self._give_up()
            raise
        self._calls = {} if isinstance(calls, ProgramEnd) else dict(calls)
        return calls

    @staticmethod
    def _seen(calls: dict[str, PendingCall]) -> dict[str, Observation]:
        return {agent: list(waiting.call.messages) for agent, waiting in calls.items()}

    def _finish(self, why: ApiError = _ENDED) -> None:
        """Refuse further calls of the episode."""
        if self._episode is not None:
            self._episode.end(why, self._calls)
            SERVER.forget(self._episode)
            self._episode, self._calls = None, {}

    def _give_up(self) -> None:
        """End an episode whose program still runs: its calls get the API's error, and it is ended where it can be."""
        stop = None if self._episode is None else self._episode.stop
        self._finish(_TOO_LONG)
        if stop is not None:
            stop()


def _reply(call: ChatCall, text: str, how: Sampled) -> ChatReply:
    """The answer of a turn to the call that it came from; a stop text cuts the program's copy."""
    tokens = tuple(Token(*each) for each in how.said()) if call.logprobs and how.said is not None else ()
    text, stopped = before_stop(text, call.stop)
    cut = how.stop == "length" and not stopped
    return ChatReply(text, cut, how.prompt_tokens, how.tokens, tokens, stopped)


_NUMBERS = itertools.count()


def read_tasks(path: str) -> list[dict[str, Any]]:
    """The objects of a JSONL file. Raises ConfigError that names the line."""
    try:
        lines = read_text(Path(path).expanduser()).splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"tasks {path} cannot be read ({error}); give a JSONL file.") from None
    tasks = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            task = clean_deep(parse_json(line))
        except ValueError as error:
            raise ConfigError(f"tasks {path}, line {number}: is no JSON ({error}).") from None
        if not isinstance(task, dict):
            raise ConfigError(f"tasks {path}, line {number}: expected an object, found {type(task).__name__}.")
        tasks.append(task)
    if not tasks:
        raise ConfigError(f"tasks {path} holds no tasks; give a JSONL file with one object a line.")
    return tasks


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
