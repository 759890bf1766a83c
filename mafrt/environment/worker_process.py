"""The processes beside the trainer in which environments are played: one nursery per environment, and its workers.

The nursery is forked from the trainer once, with the environment in it, and forks a worker whenever one is needed.
Forks, because an environment may come from a notebook or a closure, which no other process could import or unpickle;
one fork from the trainer, because a later one would copy the trainer's threads, page tables and CUDA handles again.
Messages are JSON: nothing that an environment or a model wrote is ever unpickled.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import json
import logging
import os
import random
import select
import signal
import socket
import struct
import sys
import time
import traceback
from typing import Any

from mafrt.core.distributed import packed_error
from mafrt.core.errors import EnvError, MafrtError
from mafrt.core.records import pack_step
from mafrt.core.text import error_line
from mafrt.environment.base import Env
from mafrt.environment.checker import problems_of
from mafrt.environment.session import Session, attributed

log = logging.getLogger(__name__)

LARGEST = 256 << 20
"""Bytes of one message."""
DUMP_SIGNAL = signal.SIGUSR2
"""Makes a worker write the stack of its main thread, in C code, so also from within an endless loop."""
_ALONE_S = 1.0
"""Interval at which the nursery looks whether its trainer is still there."""
_LENGTH = struct.Struct("!I")
_PR_SET_PDEATHSIG = 1


def send(channel: socket.socket, message: dict[str, Any]) -> None:
    """Send one message. Raises ValueError or TypeError if it is not JSON-able or too large, before anything is sent."""
    data = json.dumps(message, default=plain).encode()
    if len(data) > LARGEST:
        raise ValueError(f"it has {len(data)} bytes, more than {LARGEST}")
    channel.sendall(_LENGTH.pack(len(data)) + data)


def receive(channel: socket.socket, deadline: float | None = None) -> dict[str, Any] | None:
    """One message; None if the other side has closed.

    Raises:
        TimeoutError: `deadline` (of `time.monotonic`) passed.
        ValueError: the bytes are no message.
    """
    head = _read(channel, _LENGTH.size, deadline)
    if head is None:
        return None
    (size,) = _LENGTH.unpack(head)
    if size > LARGEST:
        raise ValueError(f"a message of {size} bytes")
    body = _read(channel, size, deadline)
    message = None if body is None else json.loads(body)
    if message is not None and not isinstance(message, dict):
        raise ValueError("a message that is no object")
    return message


def _read(channel: socket.socket, size: int, deadline: float | None) -> bytes | None:
    parts, missing = [], size
    while missing:
        if deadline is not None:
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError
            channel.settimeout(left)
        part = channel.recv(min(missing, 1 << 20))
        if not part:
            return None
        parts.append(part)
        missing -= len(part)
    return b"".join(parts)


def run_nursery(env: Env, control: socket.socket, trainer: int) -> None:
    """Fork workers on request until the trainer closes `control` or is gone. Returns with every worker killed.

    Requests (one packet each): `{"op": "worker"}` with two descriptors, the worker's channel and the pipe for its
    stack; `{"op": "dump" | "kill", "pid": ...}`. Only the nursery's own children are ever signalled, and a pid is
    theirs until it has been waited for here.
    """
    os.setsid()  # Ctrl-C is for the trainer to deal with
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    with contextlib.suppress(ValueError):
        signal.set_wakeup_fd(-1)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)  # an environment that calls input() gets EOFError, and does not wait for ever
    os.close(null)
    sys.stdin = os.fdopen(0)
    gc.freeze()  # the collector would write to, and so copy, every page that is shared with the trainer
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(1)  # OpenMP's threads do not survive a fork
    workers: set[int] = set()
    try:
        while os.getppid() == trainer:
            if not select.select([control], [], [], _ALONE_S)[0]:
                continue
            data, descriptors, _, _ = socket.recv_fds(control, 65536, 2)
            if not data:
                return
            request = json.loads(data)
            if request["op"] == "worker":
                pid = _fork_worker(env, control, descriptors, request["number"])
                workers.add(pid)
                answer: dict[str, Any] = {"pid": pid}
            else:
                answer = {"status": _signalled(request, workers)}
            control.send(json.dumps(answer).encode())
    finally:
        for pid in workers:
            _kill(pid)
        for pid in workers:
            os.waitpid(pid, 0)


def _signalled(request: dict[str, Any], workers: set[int]) -> int | None:
    """Dump or kill a worker; the exit code of one that ends by itself (negative: the signal), else None."""
    pid = request["pid"]
    if pid not in workers:
        return None
    if request["op"] == "dump":
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, DUMP_SIGNAL)
        return None
    until = time.monotonic() + request["wait_s"]  # its channel closes a moment before it has ended
    while not (ended := _ended(pid)) and time.monotonic() < until:
        time.sleep(0.005)
    _kill(pid)
    _, status = os.waitpid(pid, 0)
    workers.discard(pid)
    return os.waitstatus_to_exitcode(status) if ended else None


def _ended(pid: int) -> bool:
    """Whether a child has ended; it stays to be waited for."""
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _kill(pid: int) -> None:
    for kill in (os.killpg, os.kill):  # the group includes the processes that the environment has started
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(pid, signal.SIGKILL)


def _fork_worker(env: Env, control: socket.socket, descriptors: list[int], number: int) -> int:
    pid = os.fork()
    if pid:
        for descriptor in descriptors:
            os.close(descriptor)
        return pid
    try:
        os.setpgid(0, 0)
        control.close()
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        faulthandler.register(DUMP_SIGNAL, file=descriptors[1], all_threads=False, chain=False)
        # An environment must not use the global generators; one that does shall not draw the same in every worker.
        random.seed(number)
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(number)
        serve(env, socket.socket(fileno=descriptors[0]))
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
    raise AssertionError("not reached")


def serve(env: Env, channel: socket.socket) -> None:
    """Play sessions of `env` on request until the trainer closes the channel."""
    sessions: dict[int, Session] = {}
    while (request := receive(channel)) is not None:
        for handle in request.get("drop", ()):
            if (session := sessions.pop(handle, None)) is not None:
                try:
                    session.close()
                except Exception as error:
                    log.warning("%s.close() raised %s: %s", env.class_name, type(error).__name__, error_line(error))
        answer: dict[str, Any]
        try:
            answer = _answer(env, sessions, request, channel)
        except MafrtError as error:
            answer = {"error": packed_error(error), "stack": traceback.format_exc()}
        except BaseException as error:
            failure = EnvError(f"{env.class_name}: {type(error).__name__}: {error_line(error)}")
            answer = {"error": packed_error(failure), "stack": traceback.format_exc()}
        try:
            send(channel, answer)
        except (TypeError, ValueError, RecursionError) as error:
            failure = EnvError(
                f"{env.class_name}.{request['op']}() returned a value that cannot be sent as JSON "
                f"({error_line(error)}); keep observations and info to texts, numbers, lists and dicts with text keys"
            )
            send(channel, {"error": packed_error(failure), "stack": ""})
        sys.stdout.flush()


def _answer(env: Env, sessions: dict[int, Session], request: dict[str, Any], channel: socket.socket) -> dict[str, Any]:
    op, handle = request["op"], request.get("handle", 0)
    if op == "open":
        with attributed(env, "spawn"):
            sessions[handle] = Session(env.spawn())
        return {}
    if op == "check":
        beat = Session(env, lambda method: send(channel, {"beat": method}))
        return {"problems": problems_of(beat, seeds=tuple(request["seeds"]))}
    if op == "fork":
        sessions[handle] = sessions[request["of"]].fork()
        return {}
    session = sessions[handle]
    if op == "reset":
        observations, info = session.reset(seed=request["seed"], options=request["options"])
        return {"observations": observations, "info": info}
    return {"result": pack_step(session.step(request["actions"])), "step_count": session.step_count}


def plain(value: Any) -> Any:
    """Values that JSON does not know: scalars and arrays of numpy and torch, sets as lists, the rest as text."""
    if hasattr(value, "tolist"):
        return value.tolist()
    return sorted(value, key=str) if isinstance(value, (set, frozenset)) else str(value)
