"""Starts the user's program for one episode: a function in a thread, or a command in a process of its own."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import os
import shlex
import signal
import subprocess
import threading
from collections.abc import Callable
from typing import Any

from mafrt.config.resolve import load_object, user_line
from mafrt.core.errors import ConfigError, EnvError
from mafrt.core.text import error_line, shortened
from mafrt.envs.program.episode import Ended, ProgramEpisode

Start = Callable[[ProgramEpisode, dict[str, Any], str], None]
"""(episode, task, base_url): starts the program; its end arrives in the episode's mailbox."""


def function_runner(path: str) -> tuple[Start, tuple[str, ...]]:
    """Runs `file.py:function` or `package.module:function`, and the agents that the function or its module names.

    The function is called as `function(task, base_url)` and returns the reward; it may be a coroutine function.
    """
    function = load_object(path)
    try:
        inspect.signature(function).bind({}, "")
    except TypeError as error:
        raise ConfigError(f"{path} must take (task, base_url): {error}.") from None
    named = getattr(function, "agents", None) or getattr(inspect.getmodule(function), "AGENTS", None)

    def run(episode: ProgramEpisode, task: dict[str, Any], base_url: str) -> None:
        try:
            result = function(task, base_url)
            if inspect.isawaitable(result):
                result = asyncio.run(_awaited(result))
        except BaseException as error:  # SystemExit too: a program does not end the run
            episode.events.put(Ended(error=f"raised {type(error).__name__}: {error_line(error)}{user_line(error)}"))
        else:
            episode.events.put(Ended(result))

    def start(episode: ProgramEpisode, task: dict[str, Any], base_url: str) -> None:
        # A daemon: a program that hangs does not keep the run from ending.
        episode.thread = threading.Thread(target=run, args=(episode, task, base_url), daemon=True, name=episode.key)
        episode.thread.start()

    return start, tuple(named or ())


async def _awaited(result: Any) -> Any:
    return await result


def command_runner(command: str, timeout_s: float) -> Start:
    """Runs a command per episode, with OPENAI_BASE_URL, OPENAI_API_KEY and MAFRT_TASK (JSON) in its environment.

    The last line of its output is the reward (a number or a JSON object), unless it posts one.
    """
    words = shlex.split(command)
    if not words:
        raise ConfigError("the command is empty; give one such as 'python my_agents.py'.")

    def run(episode: ProgramEpisode, task: dict[str, Any], base_url: str) -> None:
        where = {"OPENAI_BASE_URL": base_url, "OPENAI_API_KEY": episode.key, "MAFRT_TASK": json.dumps(task)}
        try:
            process = subprocess.Popen(
                words,
                env={**os.environ, **where},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,  # so that its children end with it
            )
        except OSError as error:
            episode.events.put(Ended(error=f"could not be started: {error.strerror} ({words[0]})"))
            return
        episode.process = process
        try:
            output, errors = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            kill(process)
            process.communicate()
            episode.events.put(Ended(error=f"did not end within {timeout_s:g} s"))
            return
        if process.returncode:
            last = (errors.decode("utf-8", "replace").strip().splitlines() or ["no message"])[-1]
            episode.events.put(Ended(error=f"ended with code {process.returncode}: {shortened(last, 300)}"))
            return
        episode.events.put(Ended(_last_line(output)))

    def start(episode: ProgramEpisode, task: dict[str, Any], base_url: str) -> None:
        threading.Thread(target=run, args=(episode, task, base_url), daemon=True, name=episode.key).start()

    return start


def kill(process: subprocess.Popen[bytes]) -> None:
    """End a command and all its children. The thread that started it reads the rest of its output and reaps it."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _last_line(output: bytes) -> Any:
    """The last line of the output as JSON; None if it is none."""
    lines = output.decode("utf-8", "replace").strip().splitlines()
    try:
        reward = json.loads(lines[-1]) if lines else None
    except ValueError:
        return None
    return reward if isinstance(reward, (int, float, dict)) else None


def start_error(error: str) -> EnvError:
    return EnvError(f"the program {error}")
