"""The other side of `AskedProcess` where it reads what a model wrote: bounded, and with nothing in reach.

An audit hook refuses to start programs, open sockets or write files, and limits bound memory, processor time and file
size. Time is processor time, so that a busy machine makes no right answer wrong. A signal ends running Python code; the
kernel ends the process some seconds later if a single operation on huge numbers holds the signal up.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import sys
from collections.abc import Callable, Mapping
from typing import Any

Reply = Callable[[Mapping[str, Any]], None]

_REFUSED = ("os.system", "os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn", "os.kill", "os.remove",
            "os.rename", "os.rmdir", "os.mkdir", "os.link", "os.symlink", "os.truncate", "os.chmod", "os.chown",
            "pty.spawn", "subprocess.Popen", "shutil.rmtree", "ctypes.dlopen")  # fmt: skip


def refuse(event: str, args: tuple[Any, ...]) -> None:
    """Audit hook: nothing that an answer needs starts a program, opens a socket or writes a file."""
    # Libraries evaluate parts of what they read, so that an answer may try to act; reading needs none of these.
    if event in _REFUSED or event.startswith("socket."):
        raise PermissionError(f"{event} is refused in this process")
    if event == "open":
        mode, flags = args[1], args[2]
        writes = any(c in mode for c in "wax+") if isinstance(mode, str) else False
        if writes or (isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC)):
            raise PermissionError("writing a file is refused in this process")


def limit(kind: int, value: int) -> None:
    """Lower a limit as far as the system lets us; a platform without that limit keeps its own."""
    with contextlib.suppress(ValueError, OSError):
        hard = resource.getrlimit(kind)[1]
        resource.setrlimit(kind, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))


class OutOfTime(BaseException):
    """A request used up its processor time; no `except Exception` of a library catches it."""


def replies() -> Reply:
    """The way back to whoever asks. What libraries print from now on is thrown away and does not get among them."""
    way = os.fdopen(os.dup(1), "w", encoding="utf-8")
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)

    def reply(message: Mapping[str, Any]) -> None:
        way.write(json.dumps(message) + "\n")
        way.flush()

    return reply


def answer_requests(
    reply: Reply,
    answer: Callable[[dict[str, Any]], Mapping[str, Any]],
    late: Mapping[str, Any],
    *,
    memory_mib: int,
    cpu_s: float,
    kill_after_s: float,
    prepare: Callable[[dict[str, Any]], Mapping[str, Any] | None] | None = None,
    prepare_s: float = 0.0,
) -> None:
    """Say that this process is ready, and answer a line each until the input ends.

    Args:
        reply: `replies()`.
        answer: request -> its reply, to which `id` and `timeout` are added.
        late: the reply to a request whose processor time ran out.
        memory_mib: bound of the address space.
        cpu_s: processor time of an answer.
        kill_after_s: processor time of a request after which the kernel ends the process.
        prepare: called first, in time that does not count; what it returns is the reply, unless it is None.
        prepare_s: processor time that it may take.
    """
    out_of_time = False

    def interrupt(signum: int, frame: Any) -> None:
        nonlocal out_of_time
        out_of_time = True
        raise OutOfTime

    limit(resource.RLIMIT_AS, memory_mib * 2**20)
    limit(resource.RLIMIT_FSIZE, 0)
    limit(resource.RLIMIT_CORE, 0)
    signal.signal(signal.SIGPROF, interrupt)
    sys.addaudithook(refuse)
    reply({"ready": True})
    for line in sys.stdin:
        request = json.loads(line)
        used = resource.getrusage(resource.RUSAGE_SELF)
        # Counted from what the process has used, since the limit is on its whole life.
        limit(resource.RLIMIT_CPU, int(used.ru_utime + used.ru_stime + kill_after_s + prepare_s))
        out_of_time = False
        if prepare is not None and (made := prepare(request)) is not None:
            reply({**made, "id": request["id"], "timeout": False})
            continue
        answered: Mapping[str, Any] = late
        with contextlib.suppress(OutOfTime):
            try:
                # It comes again every second: some libraries have handlers that catch everything.
                signal.setitimer(signal.ITIMER_PROF, cpu_s, 1.0)
                answered = answer(request)
            finally:
                signal.setitimer(signal.ITIMER_PROF, 0)
        # With the request's number, so that a late reply is not taken for the next one's.
        reply({**(late if out_of_time else answered), "id": request["id"], "timeout": out_of_time})
