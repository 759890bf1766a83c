"""Environments in worker processes, with a deadline for every call: one that hangs or crashes costs its episode only.

`guarded` decides where an environment is played. A worker that misses its deadline shows the line of the user's code in
which it hangs, is killed, and is replaced by the next call. Several sessions share a worker; those that lose it through
no fault of their own are played again to where they were, which is exact since an environment is a function of its
seed and the actions.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import json
import logging
import os
import re
import signal
import socket
import sys
import threading
import time
import warnings
import weakref
from collections import deque
from typing import Any

from mafrt.config.resolve import is_users
from mafrt.core.distributed import unpacked_error
from mafrt.core.errors import EnvError
from mafrt.core.records import unpack_step
from mafrt.core.threads import cores
from mafrt.core.types import Observation, StepResult
from mafrt.environment.base import Env
from mafrt.environment.checker import problems_of, raise_problems
from mafrt.environment.session import Session, session_of
from mafrt.environment.worker_process import receive, run_nursery, send

log = logging.getLogger(__name__)

MOST_WORKERS = 32
"""Workers of an environment whose calls wait for something outside (`Env.blocking`); more sessions share them."""
FEW_WORKERS = min(MOST_WORKERS, max(4, cores()))
"""Workers of any other environment: more than the cores make nothing faster, and each loads what it needs (a verifier,
a table) once more."""
_DUMP_S = 3.0
"""Time that a hanging worker gets to write its stack. One without a line of the user's takes all of it."""
_FRAME = re.compile(rb'^  File "(.*)", line (\d+)', re.MULTILINE)

_channels: weakref.WeakSet[socket.socket] = weakref.WeakSet()
"""The trainer's ends. A nursery closes them: while another process held one, a worker would not see it close."""


def guarded(env: Env, timeout_s: float | None) -> Session:
    """A session of `env` whose calls end within `timeout_s` seconds.

    In this process if there is no limit, or if the class of `env` itself says that it is `bounded` (a subclass has to
    say so again); otherwise in worker processes. Sessions that it spawns are played the same way.
    """
    if isinstance(env, WorkerSession):
        return env
    if timeout_s is None or is_bounded(env):
        return session_of(env)
    if sys.platform != "linux":
        log.warning("env_timeout_s needs Linux; %s is played in this process, without a deadline", env.class_name)
        return session_of(env)
    return WorkerSession(_Pool(env.unwrapped, timeout_s))


def is_bounded(env: Env) -> bool:
    """Whether the class of `env` itself says that its calls need no deadline."""
    bare = env.unwrapped
    return bare.bounded and ("bounded" in vars(type(bare)) or "bounded" in vars(bare))


def check_guarded(env: Env, timeout_s: float | None, *, seeds: tuple[int, ...] = (0, 1, 2)) -> None:
    """`mafrt.check_env` with a deadline of `timeout_s` seconds for every call of the user's code.

    Raises:
        EnvError: the environment breaks the contract, or hangs.
    """
    raise_problems(env, guarded_problems(env, seeds, timeout_s))


def guarded_problems(env: Env, seeds: tuple[int, ...], timeout_s: float | None) -> list[str]:
    """`mafrt.environment.checker.problems_of` in a worker; a call that hangs is a problem too."""
    session = guarded(env, timeout_s)
    if not isinstance(session, WorkerSession):
        return problems_of(env, seeds=seeds)
    try:
        problems: list[str] = session.call("check", seeds=list(seeds))["problems"]
    except EnvError as error:
        problems = [str(error)]
    return problems


class WorkerSession(Session):
    """A session whose environment lives in a worker process.

    Attributes that the session lacks are those of the prototype in the trainer, such as its list of tasks; the state of
    the episode is in the worker.
    """

    blocking = True  # the trainer waits for a process: sessions that are stepped together are stepped in threads

    def __init__(self, pool: _Pool, worker: _Worker | None = None) -> None:
        super().__init__(pool.env)
        self._pool = pool
        self._worker = worker or pool.worker()
        self._handle = next(pool.handles)
        self._life: int | None = None
        """the worker's life in which this session was opened"""
        self._steps = 0
        weakref.finalize(self, self._worker.dropped.append, self._handle)

    @property
    def step_count(self) -> int:  # type: ignore[override]
        return self._steps

    def spawn(self) -> WorkerSession:
        return WorkerSession(self._pool)

    def fork(self) -> WorkerSession:
        name = self.class_name
        if self.done or self._played is None:
            raise EnvError(f"{name}.fork() was called before reset() or after the episode ended; call reset() first")
        self._present()
        twin = WorkerSession(self._pool, self._worker)
        self._worker.call(self._life, "fork", handle=twin._handle, of=self._handle)
        twin._life, twin._steps = self._life, self._steps
        twin.done, twin._acting, twin._played = False, self._acting, copy.copy(self._played)
        twin._played.steps = list(self._played.steps)
        return twin

    def close(self) -> None:
        """Release this session's environment; a later `reset` opens another."""
        if self._life is not None:
            self._worker.dropped.append(self._handle)
            self._handle, self._life, self.done = next(self._pool.handles), None, True
            weakref.finalize(self, self._worker.dropped.append, self._handle)

    def call(self, op: str, **arguments: Any) -> dict[str, Any]:
        """Have the worker do something with this session. Raises EnvError, also if the worker hangs or crashes."""
        return self._worker.call(self._life, op, handle=self._handle, **arguments)

    def _reset(
        self, seed: int | None, options: dict[str, Any] | None
    ) -> tuple[dict[str, Observation], dict[str, Any], Any]:
        self._open()
        self._steps = 0
        try:
            answer = self.call("reset", seed=seed, options=options)
        except _ReplacedError:
            self._open()
            answer = self.call("reset", seed=seed, options=options)
        return answer["observations"], answer["info"], None

    def _step(self, actions: dict[str, str]) -> StepResult:
        self._present()
        try:
            answer = self.call("step", actions=actions)
        except _ReplacedError:
            self._present()
            answer = self.call("step", actions=actions)
        self._steps = answer["step_count"]
        return unpack_step(answer["result"])

    def _open(self) -> None:
        """Have an environment in the worker's present life."""
        life = self._worker.start()
        if self._life != life:
            self._life = life
            self.call("open")

    def _present(self) -> None:
        """Have the running episode in the worker's present life: played again, if another session has lost it."""
        if self._life == self._worker.start():
            return
        played, acting, steps = self._played, self._acting, self._steps
        # Without a seed an episode cannot be played again up to the point where its process was lost.
        if played is None or played.seed is None:
            raise EnvError(f"{self.class_name} lost its worker process in an episode without a seed")
        self._open()
        # Played again in the new process, since state in a process that died cannot be had back.
        again = self.call("reset", seed=played.seed, options=played.options)
        same = again["observations"] == played.first
        for actions, shown in played.steps:
            same = same and tuple(unpack_step(self.call("step", actions=actions)["result"])[:4]) == shown
        if not same:
            raise EnvError(
                f"{self.class_name} lost its worker process, and played again with the same seed and actions it went "
                "another way; draw from self.rng only, and set all state in reset()"
            )
        self._acting, self._steps = acting, steps


class _Pool:
    """One environment's nursery and workers."""

    def __init__(self, env: Env, timeout_s: float) -> None:
        self.env, self.timeout_s = env, timeout_s
        self.handles = itertools.count(1)
        self._workers: list[_Worker] = []
        self._given = 0
        self._lock = threading.Lock()
        self._control: socket.socket | None = None
        self._begin()  # now, while the process is small, and not in the middle of play

    def worker(self) -> _Worker:
        """The worker of the next session: a fresh one as long as there may be more, then each in turn."""
        with self._lock:
            if len(self._workers) < (MOST_WORKERS if self.env.blocking else FEW_WORKERS):
                self._workers.append(_Worker(self, len(self._workers)))
            self._given += 1
            return self._workers[(self._given - 1) % len(self._workers)]

    def ask(self, request: dict[str, Any], descriptors: tuple[int, ...] = ()) -> dict[str, Any]:
        """Ask the nursery; one that is gone is replaced, and then asked once more."""
        with self._lock:
            for attempt in range(2):
                try:
                    control = self._control or self._begin()
                    socket.send_fds(control, [json.dumps(request).encode()], descriptors)
                    # The nursery only forks and kills, so that half a minute is generous even on a busy machine.
                    control.settimeout(30.0)
                    if answer := control.recv(65536):
                        reply: dict[str, Any] = json.loads(answer)
                        return reply
                except OSError as error:
                    log.debug("the nursery of %s is gone: %s", self.env.class_name, error)
                self._control = None
                if attempt or request["op"] != "worker":
                    break
            return {}

    def _begin(self) -> socket.socket:
        control, child_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        _channels.add(control)
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                with contextlib.suppress(OSError, ValueError):
                    stream.flush()  # or the child would write the same once more
        trainer = os.getpid()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # the child runs no code that takes a thread's lock
            # Forked while the process is small: copies of a loaded model's page tables would take long.
            pid = os.fork()
        if pid == 0:
            try:
                for channel in list(_channels):
                    channel.close()
                run_nursery(self.env, child_end, trainer)
            finally:
                os._exit(0)  # the trainer's code must never go on in this process
        child_end.close()
        self._control = control
        weakref.finalize(self, _end, control, pid, trainer)
        return control


def _end(control: socket.socket, pid: int, trainer: int) -> None:
    """End a nursery, which ends its workers."""
    if os.getpid() != trainer:
        return  # a fork of the trainer that comes to its end
    control.close()
    with contextlib.suppress(ChildProcessError):
        for _ in range(200):
            if os.waitpid(pid, os.WNOHANG)[0]:
                return
            time.sleep(0.01)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


class _Worker:
    """One worker process, started on first use and again after it was killed or crashed. Calls come one at a time."""

    def __init__(self, pool: _Pool, number: int) -> None:
        self._pool = weakref.ref(pool)
        self._name, self._timeout_s, self._number = pool.env.class_name, pool.timeout_s, number
        self._lock = threading.RLock()
        self._channel: socket.socket | None = None
        self._stack = -1
        self._pid = 0
        self._lives = 0
        self.dropped: deque[int] = deque()
        """handles of sessions that are gone; the next call says so"""

    def start(self) -> int:
        """The number of the present life; a process that is gone is replaced."""
        with self._lock:
            if self._channel is None:
                channel, child_end = socket.socketpair()
                stack, stack_end = os.pipe()
                # Read only as far as there is something, since a stack may never be written.
                os.set_blocking(stack, False)
                # Known to all, so that a forked child can close the ends that are not its own.
                _channels.add(channel)
                self._lives += 1
                request = {"op": "worker", "number": self._number + MOST_WORKERS * self._lives}
                answer = self._ask(request, (child_end.fileno(), stack_end))
                child_end.close()
                os.close(stack_end)
                if "pid" not in answer:
                    channel.close()
                    os.close(stack)
                    raise EnvError(f"no worker process could be started for {self._name}; is there memory left?")
                self._channel, self._stack, self._pid = channel, stack, answer["pid"]
                self.dropped.clear()
            return self._lives

    def call(self, life: int | None, op: str, **arguments: Any) -> dict[str, Any]:
        """Send a request and wait for its answer; each message of a check has a deadline of its own.

        Raises:
            EnvError: the environment raised, hung or crashed, or its process is of another life than the session's.
        """
        with self._lock:
            if self.start() != life and op != "check":
                raise _ReplacedError(f"{self._name}.{op}(): its process was lost through an episode that shared it")
            drop = [self.dropped.popleft() for _ in range(len(self.dropped))]
            answer = self._exchange({"op": op, **arguments, **({"drop": drop} if drop else {})})
        if "error" in answer:
            raise unpacked_error(answer["error"]) from WorkerStackError(answer["stack"])
        return answer

    def _exchange(self, request: dict[str, Any]) -> dict[str, Any]:
        """Send a request and wait for its answer. After any failure the process is gone."""
        assert self._channel is not None
        method = {"open": "spawn", "check": "reset"}.get(request["op"], request["op"])
        answer: dict[str, Any] | None = None
        where = None
        try:
            self._channel.settimeout(self._timeout_s)
            send(self._channel, request)
            answer = receive(self._channel, time.monotonic() + self._timeout_s)
            while answer is not None and "beat" in answer:
                method, answer = answer["beat"], None
                answer = receive(self._channel, time.monotonic() + self._timeout_s)
        except TimeoutError:
            where = self._where()
        except (OSError, ValueError) as error:
            log.debug("the worker of %s is gone: %s", self._name, error)
        finally:
            status = None if answer is not None else self._kill(hangs=where is not None)
        if answer is not None:
            return answer
        if where is not None:
            raise EnvError(
                f"{self._name}.{method}() has not returned within {self._timeout_s:g} s{where}; it was killed. Make it "
                "return, or raise --env_timeout_s"
            )
        raise EnvError(f"{self._name}.{method}() ended its process ({_said(status)}); it is started again")

    def _where(self) -> str:
        """` (FILE, line N)` of the user's code in which the process hangs, as its signal handler tells."""
        self._ask({"op": "dump", "pid": self._pid})
        # A process stuck in C code cannot write its stack, so the wait for it is short.
        data, until = b"", time.monotonic() + _DUMP_S
        while time.monotonic() < until:
            with contextlib.suppress(BlockingIOError):
                data += os.read(self._stack, 65536)
            # The handler writes piece by piece, the innermost frame first: a line without its end may go on, and the
            # first frame of the user's is the one wanted, however much is still to come.
            for file, line in _FRAME.findall(data[: data.rfind(b"\n") + 1]):
                path = os.fsdecode(file)
                if is_users(path):
                    return f" ({path}, line {int(line)})"
            time.sleep(0.01)
        return ""

    def _kill(self, *, hangs: bool) -> int | None:
        """End the process: its exit code if it ended by itself, None if it had to be killed."""
        status = self._ask({"op": "kill", "pid": self._pid, "wait_s": 0.0 if hangs else 1.0}).get("status")
        if self._channel is not None:
            self._channel.close()
            os.close(self._stack)
        self._channel, self._stack = None, -1
        return status

    def _ask(self, request: dict[str, Any], descriptors: tuple[int, ...] = ()) -> dict[str, Any]:
        pool = self._pool()
        return {} if pool is None else pool.ask(request, descriptors)


class _ReplacedError(EnvError):
    """The worker was replaced between two calls of a session, which has to play again there."""


class WorkerStackError(Exception):
    """The cause of an EnvError from a worker: the stack in that process, for `--debug`."""

    def __str__(self) -> str:
        return f"in the environment's process:\n\n{self.args[0]}"


def _said(status: int | None) -> str:
    if status is None:
        return "no exit code"
    if status < 0:
        with contextlib.suppress(ValueError):
            return f"signal {signal.Signals(-status).name}"
    return f"exit code {status}"
