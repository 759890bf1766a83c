"""The process of programs with globals of their own: it loads their libraries once, and is forked for each episode.

Forked and not started, since the OpenAI Agents SDK and its like take seconds to import. A fork imports the program's
own file, with the episode's address in its environment, plays one episode and ends; it also ends, with all that it has
started, when its channel to the trainer closes.
"""

from __future__ import annotations

import asyncio
import ctypes
import importlib
import inspect
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Sequence
from typing import Any

from mafrt.config.resolve import load_object, user_line
from mafrt.core.errors import MafrtError
from mafrt.core.text import brief, error_line, real_number
from mafrt.environment.worker_process import receive, send
from mafrt.envs.program.episode import address_of, line_of_task, line_of_thread

log = logging.getLogger(__name__)
_DEATH_SIGNAL = 1
_LATE = (
    *("openai.resources.responses", "openai.resources.chat", "anthropic.resources.messages"),
    "anyio._backends._asyncio",
)
"""Imported by the clients in their first call, which would cost every fork most of a second."""


def main(words: Sequence[str]) -> int:
    control, path = socket.socket(fileno=int(words[0])), words[1]
    control.setblocking(True)
    # Ends with its channel. A death signal would come when the thread ends that started it, which is an episode's.
    asked = receive(control)
    for name in [] if asked is None else asked["imports"]:
        _import_ahead(name)
    for name in _LATE:
        if name.partition(".")[0] in sys.modules:
            _import_ahead(name)
    send(control, {"ready": True})
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the forks
    while True:
        data, descriptors, _, _ = socket.recv_fds(control, 1, 1)
        if not data:
            return 0
        if os.fork():
            os.close(descriptors[0])
            continue
        status = 1
        try:
            control.close()
            os.setsid()
            ctypes.CDLL(None).prctl(_DEATH_SIGNAL, int(signal.SIGKILL))
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            play(socket.socket(fileno=descriptors[0]), path)
            status = 0
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)


def _import_ahead(name: str) -> None:
    """Import a module to be there for every fork; the program's own import tells its user what is wrong."""
    try:
        importlib.import_module(name)
    except Exception as error:
        log.debug("%s cannot be imported ahead: %s", name, error)


def play(channel: socket.socket, path: str) -> None:
    """Play the one episode of this process."""
    asked = receive(channel)
    if asked is None:
        return
    base_url = asked["base_url"]
    os.environ.update(address_of(base_url, asked["key"]))
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    try:
        function = load_object(path)
    except MafrtError as error:
        send(channel, {"error": f"cannot be imported: {error_line(error)}"})
        return
    send(channel, {"begun": True})
    threading.Thread(target=_listen, args=(channel, loop), daemon=True).start()
    try:
        result = function(*(asked["task"], base_url)[: asked["parameters"]])
        if inspect.isawaitable(result):
            result = loop.run_until_complete(_awaited(result))
    except BaseException as error:  # SystemExit too
        answer: dict[str, Any] = {"error": f"raised {type(error).__name__}: {error_line(error)}{user_line(error)}"}
    else:
        answer = {"returned": _numbers(result)}
    try:
        send(channel, answer)
    except (TypeError, ValueError):
        send(channel, {"error": f"returned {brief(answer.get('returned'))}, which is no reward"})


async def _awaited(result: Any) -> Any:
    return await result


def _numbers(value: Any) -> Any:
    """Numbers of NumPy and torch, which may stand in a reward, as Python's."""
    if isinstance(value, dict):
        return {key: _numbers(entry) for key, entry in value.items()}
    number = real_number(value)
    return value if number is None else number


def _listen(channel: socket.socket, loop: asyncio.AbstractEventLoop) -> None:
    """Tell where the program stands when asked, and end all when the trainer hangs up."""
    main_thread = threading.main_thread().ident
    while True:
        try:
            message = receive(channel)
        except (OSError, ValueError):
            message = None
        if message is None:
            os.killpg(0, signal.SIGKILL)
            return
        lines = [line_of_task(task) for task in asyncio.all_tasks(loop)]
        line = next((line for line in lines if line), "") or line_of_thread(main_thread)
        send(channel, {"line": line})


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
