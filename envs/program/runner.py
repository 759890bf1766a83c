"""Starts the user's program for one episode: a function in a thread, or a command in a process of its own."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import json
import logging
import os
import selectors
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from mafrt.config.resolve import check_source, load_object, user_line
from mafrt.core.errors import ConfigError, EnvError
from mafrt.core.text import brief, error_line, shortened
from mafrt.envs.program.episode import ProgramEnd, ProgramEpisode, address_of, line_of_task, line_of_thread
from mafrt.envs.program.own_process import ProgramProcesses, Source

log = logging.getLogger(__name__)

MOST_TASK_BYTES = 100_000
"""Of a task in the environment; Linux takes 128 KiB."""
MOST_OUTPUT_MIB = 64
"""Of both streams; a program that writes more is ended."""
KEPT_BYTES = 65536
"""Of the end of each stream"""
END_S = 10.0
"""For the reaper to end what is left"""
_REAPER = Path(__file__).with_name("reaper.py")

Start = Callable[[ProgramEpisode, dict[str, Any], str], None]
"""(episode, task, base_url): starts the program; its end arrives in the episode's mailbox."""


def function_runner(path: str) -> tuple[Start, tuple[str, ...]]:
    """Runs `file.py:function` or `package.module:function`, and the agents that the function or its module names.

    The function is called as `function(task, base_url)` and returns the reward; it may be a coroutine function. One
    that finds the address elsewhere runs in a process for each episode (`own_process.py`), any other in this one:
    coroutines in one event loop, functions in a thread for each episode.
    """
    source = Source.read(path)
    if source is not None and source.callable and source.needs_process:
        check_source(path, source.file)
        _check_system(f"{path} changes or reads what its whole process has, and such a program")
        return ProgramProcesses(path, source).start, _names(path, source.agents)
    function = load_object(path)
    try:
        inspect.signature(function).bind({}, "")
    except TypeError as error:
        raise ConfigError(f"{path} must take (task, base_url): {error}.") from None
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise ConfigError(f"{path} has a `yield` in it, so that a call runs none of it; return the reward instead.")
    # Not by the module's name alone, which another module may have.
    inner = inspect.unwrap(function.func if isinstance(function, functools.partial) else function)
    module = getattr(inner, "__globals__", None) or vars(inspect.getmodule(inner) or object)
    named = getattr(function, "agents", None) or module.get("AGENTS")

    async def awaited(episode: ProgramEpisode, result: Any) -> None:
        task = asyncio.current_task()
        episode.line = lambda: line_of_task(task)
        try:
            returned = await result
        except BaseException as error:
            _failed(episode, error)
        else:
            episode.events.put(ProgramEnd(returned))

    async def called(episode: ProgramEpisode, task: dict[str, Any], base_url: str) -> None:
        await awaited(episode, function(task, base_url))

    def run(episode: ProgramEpisode, task: dict[str, Any], base_url: str) -> None:
        try:
            result = function(task, base_url)
        except BaseException as error:  # SystemExit too: a program does not end the run
            _failed(episode, error)
            return
        if inspect.isawaitable(result):
            in_loop(episode, awaited(episode, result))
        else:
            episode.events.put(ProgramEnd(result))

    def in_loop(episode: ProgramEpisode, coroutine: Coroutine[Any, Any, None]) -> None:
        future = LOOPS.submit(coroutine)

        def stop() -> None:
            future.cancel()

        episode.stop = stop

    def start(episode: ProgramEpisode, task: dict[str, Any], base_url: str) -> None:
        if inspect.iscoroutinefunction(function):
            in_loop(episode, called(episode, task, base_url))
            return
        # A daemon: a program that hangs does not keep the run from ending.
        thread = threading.Thread(target=run, args=(episode, task, base_url), daemon=True, name=episode.key)
        thread.start()
        episode.line = lambda: line_of_thread(thread.ident)

    return start, _names(path, named)


def _names(path: str, given: Any) -> tuple[str, ...]:
    """The names of `AGENTS`. Raises ConfigError for anything else, such as one text."""
    names = () if given is None or isinstance(given, str) else tuple(given) if isinstance(given, Iterable) else (given,)
    if isinstance(given, str) or not all(isinstance(name, str) and name for name in names):
        raise ConfigError(
            f'{path} names its agents as {brief(given)}; give names, as in AGENTS = ("solver", "checker").'
        )
    return tuple(dict.fromkeys(names))


def _failed(episode: ProgramEpisode, error: BaseException) -> None:
    episode.events.put(ProgramEnd(error=f"raised {type(error).__name__}: {error_line(error)}{user_line(error)}"))


def _check_system(who: str) -> None:
    """ConfigError where nothing could end what a program leaves running."""
    if sys.platform != "linux":
        raise ConfigError(
            f"{who} runs in processes of its own, which needs Linux (this is {sys.platform}); give a function that "
            "hands the address it is given to its client, or run mafrt in a Linux container."
        )


def command_runner(command: str, timeout_s: float) -> Start:
    """Runs a command per episode, with its address (`address_of`) and MAFRT_TASK (JSON) in its environment.

    Its standard input holds the task too, of any length; the environment holds up to `MOST_TASK_BYTES`. The last line
    of its output is the reward (a number or a JSON object), unless it posts one. What it has started ends with it.
    """
    words = shlex.split(command)
    if not words:
        raise ConfigError("the command is empty; give one such as 'python my_agents.py'.")
    _check_system("A command")

    def run(episode: ProgramEpisode, task: dict[str, Any], base_url: str) -> None:
        text = json.dumps(task)
        where = address_of(base_url, episode.key)
        if len(text) <= MOST_TASK_BYTES:
            where["MAFRT_TASK"] = text
        if shutil.which(words[0]) is None:
            episode.events.put(ProgramEnd(error=f"could not be started: there is no such command ({words[0]})"))
            return
        try:
            with tempfile.TemporaryFile() as given:
                given.write(text.encode())
                given.seek(0)
                process = subprocess.Popen(
                    [sys.executable, "-I", "-S", str(_REAPER), *words],
                    env={**{name: value for name, value in os.environ.items() if name != "MAFRT_TASK"}, **where},
                    stdin=given,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    start_new_session=True,  # Ctrl-C is for the trainer
                )
        except OSError as error:
            episode.events.put(ProgramEnd(error=f"could not be started: {error.strerror} ({words[0]})"))
            return
        episode.stop = lambda: end(process) if process.poll() is None else None
        outputs, why = _read(process, timeout_s)
        if why is not None:
            end(process)
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            kill(process)
            process.wait()
        if why is not None:
            episode.events.put(ProgramEnd(error=why))
        elif process.returncode:
            last = (bytes(outputs[1]).decode("utf-8", "replace").strip().splitlines() or ["no message"])[-1]
            episode.events.put(ProgramEnd(error=f"ended with code {process.returncode}: {shortened(last, 300)}"))
        else:
            episode.events.put(ProgramEnd(_last_line(bytes(outputs[0]))))

    def start(episode: ProgramEpisode, task: dict[str, Any], base_url: str) -> None:
        threading.Thread(target=run, args=(episode, task, base_url), daemon=True, name=episode.key).start()

    return start


def _read(process: subprocess.Popen[bytes], timeout_s: float) -> tuple[list[bytearray], str | None]:
    """The ends of both streams, and why the program has to be ended; None if it closed them."""
    assert process.stdout is not None and process.stderr is not None
    outputs, total, until = [bytearray(), bytearray()], 0, time.monotonic() + timeout_s
    with selectors.DefaultSelector() as ready, process.stdout, process.stderr:
        for place, stream in enumerate((process.stdout, process.stderr)):
            ready.register(stream, selectors.EVENT_READ, outputs[place])
        while ready.get_map():
            left = until - time.monotonic()
            if left <= 0:
                return outputs, f"did not end within {timeout_s:g} s"
            for key, _ in ready.select(left):
                part = os.read(key.fd, 65536)
                if not part:
                    ready.unregister(key.fileobj)
                key.data.extend(part)
                del key.data[:-KEPT_BYTES]
                total += len(part)
            # Counted although only the ends are kept: an endless writer would hold a core until its deadline.
            if total > MOST_OUTPUT_MIB * 2**20:
                return outputs, f"wrote more than {MOST_OUTPUT_MIB} MiB; write less, or to a file"
        # A program may close its streams and go on.
        try:
            process.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            return outputs, f"did not end within {timeout_s:g} s"
    return outputs, None


def end(process: subprocess.Popen[bytes]) -> None:
    """Have a command ended with everything that it has started. The thread that started it reaps it."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(process.pid, signal.SIGTERM)  # to the reaper, which ends the others first


def kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a process with its group at once. The thread that started it reads the rest of its output and reaps it."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _last_line(output: bytes) -> Any:
    """The last line of the output as JSON; None if it is none."""
    lines = output.decode("utf-8", "replace").strip().splitlines()
    try:
        reward = json.loads(lines[-1]) if lines else None
    except (ValueError, RecursionError):
        return None
    return reward if isinstance(reward, (int, float, dict)) else None


def start_error(error: str) -> EnvError:
    return EnvError(f"the program {error}")


RESPONDS_S = 1.0
"""in which a loop that is not blocked takes a call; the processor may be busy"""
RESPONDS_AGAIN_S = 0.1
"""the same, once a program was found that blocks"""


class _Loop:
    """An event loop in a thread, for ever."""

    def __init__(self, number: int) -> None:
        self.loop = asyncio.new_event_loop()
        self._answered = threading.Event()
        self._answered.set()
        threading.Thread(target=self._run, daemon=True, name=f"mafrt-programs-{number}").start()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        while not self.loop.is_closed():
            try:
                self.loop.run_forever()  # until a program stops it
            except (SystemExit, KeyboardInterrupt) as error:  # of a task that a program has started and left
                log.warning("a task of a program raised %s; the others go on", type(error).__name__)

    def responds(self, within_s: float) -> bool:
        """Whether the loop takes calls. One that has not answered the last question is still blocked."""
        if not self._answered.is_set():
            return False
        self._answered.clear()
        self.loop.call_soon_threadsafe(self._answered.set)
        return self._answered.wait(within_s)


class ProgramLoops:
    """Runs coroutines in the first loop that responds.

    A client that a program keeps belongs to the loop in which it was first used, so a loop for each episode would break
    it ("Event loop is closed"). A program that blocks its loop would hold up all others; those that come then get
    another.
    """

    def __init__(self) -> None:
        self._loops: list[_Loop] = []
        self._lock = threading.Lock()

    def submit(self, coroutine: Coroutine[Any, Any, Any]) -> Future[Any]:
        """Start a coroutine; cancelling the future cancels it. May be called in any thread."""
        with self._lock:
            within_s = RESPONDS_S if len(self._loops) < 2 else RESPONDS_AGAIN_S
            free = next((each for each in self._loops if each.responds(within_s)), None)
            if free is None:
                free = _Loop(len(self._loops))
                self._loops.append(free)
        return asyncio.run_coroutine_threadsafe(coroutine, free.loop)


LOOPS = ProgramLoops()
